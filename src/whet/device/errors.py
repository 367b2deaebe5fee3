"""Recognize out-of-memory errors, explain MPS errors, and silence warnings that whet has already handled."""

import re
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from whet.base.errors import UsageError, WhetError
from whet.base.origin import code_origin

_MISSING_OPERATOR = re.compile(r"The operator '([\w:.]+)' is not currently implemented for the MPS device")
_NO_FLOAT64 = "MPS framework doesn't support float64"
_NARROWER = {torch.float64: "float32", torch.complex128: "complex64"}


class WideDtypeError(UsageError):
    """A tensor has a number format that the device lacks."""

    def __init__(self, tensor: Tensor, *, name: str = "a tensor", cure: str | None = None) -> None:
        narrow = _NARROWER[tensor.dtype]
        self._tensor = tensor
        super().__init__(
            "MPS has no float64",
            got=f"{name} is {tensor.dtype}, of shape {tuple(tensor.shape)}",
            try_=cure or f".to(torch.{narrow}), or dtype=torch.{narrow} where it is made; or --device cpu",
        )

    def named(self, name: str) -> "WideDtypeError":
        """The same, told with the name of what was to be moved."""
        return WideDtypeError(self._tensor, name=name)


def check_dtype(tensor: Tensor, *, name: str = "a tensor", cure: str | None = None) -> None:
    """Metal has no float64 and no complex128."""
    if tensor.dtype in _NARROWER:
        raise WideDtypeError(tensor, name=name, cure=cure)


@contextmanager
def explain_mps_errors() -> Iterator[None]:
    """While a model computes on MPS, its errors are told in three lines; all other errors pass."""
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        told = _explain(error)
        if told is None:
            raise
        raise told from error


def _explain(error: Exception) -> WhetError | None:
    missing = _MISSING_OPERATOR.search(str(error))
    if missing:
        return WhetError(
            f"MPS has no operator {missing[1]}",
            got=_user_line(error),
            try_="mps_fallback=on, which computes it on the CPU; --device cpu; or another operator there",
        )
    if _NO_FLOAT64 in str(error):
        cure = ".float() or dtype=torch.float32 there; numpy's numbers are float64 unless told; or --device cpu"
        return WhetError("MPS has no float64", got=_user_line(error), try_=cure)
    return None


def _user_line(error: Exception) -> str:
    """The innermost line that is neither torch's nor whet's; or that none was at work."""
    frames = [(frame, code_origin(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    # The error was caught in whet, so what stands behind its last own frame is the user's or a library's.
    last_own = max((index for index, (_, author) in enumerate(frames) if author in ("whet", "recipe")), default=-1)
    theirs = [frame for frame, author in frames[last_own + 1 :] if author == "you"]
    theirs = theirs or [frame for frame, author in frames if author == "recipe"]
    if not theirs:
        return "in the backward pass or the optimizer, where no line of yours is at work"
    frame = theirs[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}(): {frame.line}"


FALLBACK_WARNING = r"The operator '[\w:.]+' is not currently supported on the MPS backend and will fall back"
"""Names the first operator only; with the fall-back, a run's report names them all and what they cost."""
PIN_MEMORY_WARNING = r"'pin_memory' argument is set as true but not supported on MPS"
"""Rule L3 has said so, and nothing is pinned."""


@contextmanager
def ignore_handled_warnings(*, has_fallback: bool) -> Iterator[None]:
    """While entered, what whet has said itself is not said again."""
    with warnings.catch_warnings():
        for text in (PIN_MEMORY_WARNING, *((FALLBACK_WARNING,) if has_fallback else ())):
            warnings.filterwarnings("ignore", message=text, category=UserWarning)
        yield


OUT_OF_MEMORY_TEXTS = (
    "MPS backend out of memory",
    "Invalid buffer size:",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Starts of messages. MPS raises a plain RuntimeError (MPSAllocator.mm, torch 2.13), so its type says nothing."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out.

    >>> is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 16.00 GiB, ..."))
    True
    >>> is_out_of_memory(RuntimeError("the file says: CUDA out of memory"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    # The CPU allocator's text stands behind the place in the source: "[enforce fail at alloc_cpu.cpp:118] . ...".
    return text.startswith(OUT_OF_MEMORY_TEXTS) or (
        text.startswith("[enforce fail at") and "DefaultCPUAllocator:" in text
    )
