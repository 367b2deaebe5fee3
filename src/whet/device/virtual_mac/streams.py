"""Streams of `torch.mps`, which torch has since 2.15. A Linux build has the classes without an implementation."""

import itertools
from typing import Any

from whet.device.virtual_mac.native import native

_NUM_POOLED = 32
"""MPSStream.h: the streams besides the default one, which has number 0."""


def stream_patches() -> list[tuple[Any, str, Any]]:
    """Return what to set in torch, as (owner, attribute, value). Empty for a torch without streams."""
    import torch

    base = getattr(torch._C, "_MPSStreamBase", None)
    if base is None:
        return []
    current, pool = [0], itertools.cycle(range(1, _NUM_POOLED + 1))

    def make(cls: type, *_args: object, stream_id: int | None = None, **_kwargs: object) -> Any:
        stream: Any = object.__new__(cls)
        # Not an attribute of this name: torch's class has a property that asks its base.
        stream.__dict__["_number"] = next(pool) if stream_id is None else stream_id
        return stream

    def is_same(stream: Any, other: object) -> bool:
        return isinstance(other, base) and stream._number == other._number

    def select(stream: Any) -> None:
        current[0] = stream._number

    return [
        (base, "__new__", staticmethod(make)),
        (base, "__init__", lambda *_args, **_kwargs: None),
        (base, "__eq__", is_same),
        (base, "__hash__", lambda stream: hash(stream._number)),
        (base, "stream_id", property(lambda stream: stream._number)),
        (base, "synchronize", lambda _stream: native().wait_for_gpu()),
        (torch._C, "_mps_getCurrentStream", lambda: base(stream_id=current[0])),
        (torch._C, "_mps_setStream", select),
    ]
