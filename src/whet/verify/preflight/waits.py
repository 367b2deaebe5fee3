"""Where does Python wait for the device, and where do shapes depend on numbers?"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from whet.verify.preflight.finding import Sighting
from whet.verify.preflight.host import ASKS
from whet.verify.preflight.watcher import Call, Watcher

_DYNAMIC = {
    "nonzero": "nonzero", "nonzero_numpy": "nonzero", "masked_select": "masked_select", "_unique2": "unique",
    "unique_dim": "unique", "unique_consecutive": "unique_consecutive", "repeat_interleave": "repeat_interleave",
    "bincount": "bincount", "index": "a mask as an index", "index_put_": "a mask as an index",
    "_index_put_impl_": "a mask as an index", "index_put": "a mask as an index",
}  # fmt: skip
_BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")
_MASKS = (torch.bool, torch.uint8)


class WaitWatcher(Watcher):
    """Values that Python asks for, and shapes that only the numbers decide."""

    def __init__(self, device: str) -> None:
        self._device = device.upper()

    def function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Sighting]:
        ask = ASKS.get(function)
        if ask is not None and args and isinstance(args[0], Tensor) and ask.is_asking(args, kwargs):
            yield self._wait(ask.spoken)

    def operator(self, call: Call) -> Iterable[Sighting]:
        if call.phase != "training":
            return
        if call.base == "_local_scalar_dense":
            yield self._wait("a number out of a tensor")
        spoken = _DYNAMIC.get(call.base)
        if not spoken or (call.base in _BY_MASK and not _is_masked(call)):
            return
        if call.name == "repeat_interleave.self_int" or call.kwargs.get("output_size") is not None:
            return
        cost = "it waits for the GPU" + (
            ", and each new shape is compiled and kept in memory" if self._device == "MPS" else ""
        )
        yield Sighting(
            "dynamic-shape",
            "warning",
            f"{spoken}: the shape depends on the numbers; {cost}",
            "torch.where() or a product with the mask, which keep the shape",
        )

    def _wait(self, spoken: str) -> Sighting:
        return Sighting(
            "wait-for-device",
            "warning",
            f"{spoken} waits until {self._device} has done all it was asked",
            "keep it a tensor; read it every so many steps, outside the loss",
        )


def _is_masked(call: Call) -> bool:
    indices = [index for index in call.args[1] if isinstance(index, Tensor)]
    if not any(index.dtype in _MASKS for index in indices):
        return False
    # One number for all masked places is a masked_fill, whose shape does not change.
    return call.base == "index" or call.args[2].numel() != 1
