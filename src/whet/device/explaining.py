"""MPS's errors in words that help: what is missing, on which line of yours, and what can be done."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from whet.base.authors import author_of
from whet.base.errors import UsageError, WhetError

_MISSING = re.compile(r"The operator '([\w:.]+)' is not currently implemented for the MPS device")
_NO_DOUBLE = "MPS framework doesn't support float64"
_DOUBLES = {torch.float64: "float32", torch.complex128: "complex64"}


class WideDtypeError(UsageError):
    """A tensor has a number format that the device lacks."""

    def __init__(self, tensor: Tensor, *, name: str = "a tensor", cure: str | None = None) -> None:
        narrow = _DOUBLES[tensor.dtype]
        self._tensor = tensor
        super().__init__(
            "MPS has no float64",
            got=f"{name} is {tensor.dtype}, of shape {tuple(tensor.shape)}",
            try_=cure or f".to(torch.{narrow}), or dtype=torch.{narrow} where it is made; or --device cpu",
        )

    def named(self, name: str) -> "WideDtypeError":
        """The same, told with the name of what was to be moved."""
        return WideDtypeError(self._tensor, name=name)


def refuse_wide(tensor: Tensor, *, name: str = "a tensor", cure: str | None = None) -> None:
    """Metal has no float64 and no complex128."""
    if tensor.dtype in _DOUBLES:
        raise WideDtypeError(tensor, name=name, cure=cure)


@contextmanager
def explained() -> Iterator[None]:
    """While a model computes on MPS, its errors are told in three lines; all other errors pass."""
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        told = _explain(error)
        if told is None:
            raise
        raise told from error


def _explain(error: Exception) -> WhetError | None:
    missing = _MISSING.search(str(error))
    if missing:
        return WhetError(
            f"MPS has no operator {missing[1]}",
            got=_place(error),
            try_="mps_fallback=on, which computes it on the CPU; --device cpu; or another operator there",
        )
    if _NO_DOUBLE in str(error):
        cure = ".float() or dtype=torch.float32 there; numpy's numbers are float64 unless told; or --device cpu"
        return WhetError("MPS has no float64", got=_place(error), try_=cure)
    return None


def _place(error: Exception) -> str:
    """The innermost line that is neither torch's nor whet's; or that none was at work."""
    frames = [(frame, author_of(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    # The error was caught in whet, so what stands behind its last own frame is the user's or a library's.
    last_own = max((index for index, (_, author) in enumerate(frames) if author in ("whet", "recipe")), default=-1)
    theirs = [frame for frame, author in frames[last_own + 1 :] if author == "you"]
    theirs = theirs or [frame for frame, author in frames if author == "recipe"]
    if not theirs:
        return "in the backward pass or the optimizer, where no line of yours is at work"
    frame = theirs[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}(): {frame.line}"
