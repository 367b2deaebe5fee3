"""Recognize out-of-memory errors, explain MPS errors, and hide warnings that whet handles."""

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

OUT_OF_MEMORY_TEXTS = (
    "MPS backend out of memory",
    "Invalid buffer size:",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Starts of out-of-memory messages. The type is not enough, because MPS raises a plain RuntimeError (torch 2.13)."""

FALLBACK_WARNING = r"The operator '[\w:.]+' is not currently supported on the MPS backend and will fall back"
"""Hidden, because it names only the first operator. The report of a run lists all operators and their cost."""
PIN_MEMORY_WARNING = r"'pin_memory' argument is set as true but not supported on MPS"
"""Hidden, because rule L4 already reports that nothing is pinned."""

_MISSING_OPERATOR = re.compile(r"The operator '([\w:.]+)' is not currently implemented for the MPS device")
_NO_FLOAT64 = "MPS framework doesn't support float64"
_NARROWER = {torch.float64: "float32", torch.complex128: "complex64"}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out.

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
    # The message of the CPU allocator follows a source location: "[enforce fail at alloc_cpu.cpp:118] . ...".
    return text.startswith(OUT_OF_MEMORY_TEXTS) or (
        text.startswith("[enforce fail at") and "DefaultCPUAllocator:" in text
    )


class WideDtypeError(UsageError):
    """A tensor has a dtype that the device does not support."""

    def __init__(self, tensor: Tensor, *, name: str = "a tensor", hint: str | None = None) -> None:
        narrow = _NARROWER[tensor.dtype]
        self._tensor = tensor
        super().__init__(
            "MPS has no float64",
            got=f"{name} is {tensor.dtype}, of shape {tuple(tensor.shape)}",
            try_=hint or f".to(torch.{narrow}), or dtype=torch.{narrow} where it is created; or --device cpu",
        )

    def named(self, name: str) -> "WideDtypeError":
        """Return the same error with the name of the tensor."""
        return WideDtypeError(self._tensor, name=name)


def check_dtype(tensor: Tensor, *, name: str = "a tensor", hint: str | None = None) -> None:
    """Raise WideDtypeError for float64 and complex128, which Metal does not support."""
    if tensor.dtype in _NARROWER:
        raise WideDtypeError(tensor, name=name, hint=hint)


@contextmanager
def explain_mps_errors() -> Iterator[None]:
    """Convert MPS errors of the model's code into WhetErrors with a hint. Other errors are not changed."""
    try:
        yield
    except (NotImplementedError, TypeError) as error:
        explained = _explain(error)
        if explained is None:
            raise
        raise explained from error


def _explain(error: Exception) -> WhetError | None:
    missing = _MISSING_OPERATOR.search(str(error))
    if missing:
        return WhetError(
            f"MPS has no operator {missing[1]}",
            got=_user_line(error),
            try_="mps_fallback=on, which computes it on the CPU; --device cpu; or another operator there",
        )
    if _NO_FLOAT64 in str(error):
        hint = ".float() or dtype=torch.float32 there; NumPy defaults to float64; or --device cpu"
        return WhetError("MPS has no float64", got=_user_line(error), try_=hint)
    return None


def _user_line(error: Exception) -> str:
    """Return a description of the innermost line of user code in a traceback."""
    frames = [(frame, code_origin(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    # whet called the model, so user frames come after the last frame of whet.
    last_own = max((index for index, (_, origin) in enumerate(frames) if origin in ("whet", "recipe")), default=-1)
    user_frames = [frame for frame, origin in frames[last_own + 1 :] if origin == "you"]
    user_frames = user_frames or [frame for frame, origin in frames if origin == "recipe"]
    if not user_frames:
        return "in the backward pass or the optimizer, outside of your code"
    frame = user_frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}(): {frame.line}"


@contextmanager
def ignore_handled_warnings(*, has_fallback: bool) -> Iterator[None]:
    """Hide only those warnings of torch whose content whet reports itself."""
    with warnings.catch_warnings():
        for text in (PIN_MEMORY_WARNING, *((FALLBACK_WARNING,) if has_fallback else ())):
            warnings.filterwarnings("ignore", message=text, category=UserWarning)
        yield
