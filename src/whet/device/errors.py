"""Recognize out-of-memory errors and GPU failures, explain MPS errors, and hide warnings that whet replaces."""

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
from whet.device.environment import HIGH
from whet.device.stderr_watch import GPU_MEMORY_TEXTS, WATCHDOG_TEXTS

OUT_OF_MEMORY_TEXTS = (
    "MPS backend out of memory",
    "Invalid buffer size:",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Prefixes of out-of-memory messages. The type is not enough, because MPS raises a plain RuntimeError (torch 2.13)."""

FALLBACK_WARNING = r"The operator '[\w:.]+' is not currently supported on the MPS backend and will fall back"
"""Regular expression of a warning that is hidden, because torch emits it only for the first operator.

whet reports all operators that fall back, with their cost.
"""
PIN_MEMORY_WARNING = r"'pin_memory' argument is set as true but not supported on MPS"
"""Regular expression of a warning that is hidden, because rule L4 already reports that nothing is pinned."""

COMMAND_BUFFER_TEXT = "MPS command buffer execution failed"
"""Prefix of the error that torch 2.15 and later raise at the first synchronization after a GPU failure.

If the GPU ran out of memory, the type is torch.OutOfMemoryError.
"""

_MISSING_OPERATOR = re.compile(r"The operator '([\w:.]+)' is not currently implemented for the MPS device")
_NO_FLOAT64 = "MPS framework doesn't support float64"
_NARROWER = {torch.float64: "float32", torch.complex128: "complex64"}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host ran out of memory.

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
    # The CPU allocator puts a source location before its message: "[enforce fail at alloc_cpu.cpp:118] . ...".
    return text.startswith(OUT_OF_MEMORY_TEXTS) or (
        text.startswith("[enforce fail at") and "DefaultCPUAllocator:" in text
    )


def is_gpu_failure(error: BaseException | None) -> bool:
    """Return whether an error of torch reports a GPU failure.

    All results since the last synchronization are invalid. They may include earlier steps, so undoing or repeating the
    current step is not enough.
    """
    return any(str(one).startswith(COMMAND_BUFFER_TEXT) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class GpuFailedError(WhetError):
    """Raised when the GPU has failed. Its results since then are invalid."""

    def __init__(self, report: str) -> None:
        """Choose the message based on `report`, the text from torch or Metal."""
        kept = "the same command resumes from the last checkpoint, which is from before the failure"
        if any(word in report for word in WATCHDOG_TEXTS):
            # Smaller batches do not help, because the display waits for all queued work, not for one kernel.
            super().__init__(
                "macOS stopped the GPU's work because the display had to wait for it",
                got=f"{report}; the results since then are invalid",
                try_=f"a display that sleeps, or SSH from another computer with nobody logged in at the screen; {kept}",
            )
        elif any(word in report for word in GPU_MEMORY_TEXTS):
            super().__init__(
                "the GPU ran out of memory, and its results since then are invalid",
                got=report,
                try_=f"a smaller micro_batch, without {HIGH}=0.0; {kept}",
            )
        else:
            super().__init__(
                "the GPU failed, and its results since then are invalid",
                got=report,
                try_=f"{kept}; whet doctor, if it fails again",
            )


def explain_gpu_failure(error: BaseException | None) -> GpuFailedError | None:
    """Return a GpuFailedError for an error with which torch reports a GPU failure, or None for any other error."""
    if isinstance(error, GpuFailedError):
        return None
    reported = next((str(one) for one in _chain(error) if str(one).startswith(COMMAND_BUFFER_TEXT)), None)
    return None if reported is None else GpuFailedError(reported.partition(". This error may have been")[0])


class WideDtypeError(UsageError):
    """Raised for a float64 or complex128 tensor, which Metal does not support."""

    def __init__(self, tensor: Tensor, *, name: str = "a tensor", hint: str | None = None) -> None:
        narrow = _NARROWER[tensor.dtype]
        self._tensor = tensor
        super().__init__(
            "MPS has no float64",
            got=f"{name} is {tensor.dtype}, of shape {tuple(tensor.shape)}",
            try_=hint or f".to(torch.{narrow}), or dtype=torch.{narrow} where it is created; or --device cpu",
        )

    def named(self, name: str) -> "WideDtypeError":
        """Return the same error for the same tensor, with a name and without the custom hint."""
        return WideDtypeError(self._tensor, name=name)


def check_dtype(tensor: Tensor, *, name: str = "a tensor", hint: str | None = None) -> None:
    """Raise WideDtypeError if the tensor is float64 or complex128."""
    if tensor.dtype in _NARROWER:
        raise WideDtypeError(tensor, name=name, hint=hint)


@contextmanager
def explain_mps_errors() -> Iterator[None]:
    """Convert MPS errors raised in this context to WhetErrors with a hint. Other errors are raised unchanged."""
    try:
        yield
    except RuntimeError as error:
        # NotImplementedError is a RuntimeError too. Out-of-memory errors are left to callers that can repeat the step
        # with less memory.
        explained = None if is_out_of_memory(error) else explain_gpu_failure(error) or _explain(error)
        if explained is None:
            raise
        raise explained from error
    except TypeError as error:
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
    """Return a description of the innermost line of user code in the traceback."""
    frames = [(frame, code_origin(frame.filename)) for frame in traceback.extract_tb(error.__traceback__)]
    # whet called the user's code, so look only at frames after whet's last one.
    last_own = max((index for index, (_, origin) in enumerate(frames) if origin in ("whet", "recipe")), default=-1)
    user_frames = [frame for frame, origin in frames[last_own + 1 :] if origin == "you"]
    user_frames = user_frames or [frame for frame, origin in frames if origin == "recipe"]
    if not user_frames:
        return "in the backward pass or the optimizer, outside your code"
    frame = user_frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}(): {frame.line}"


@contextmanager
def ignore_handled_warnings(*, has_fallback: bool) -> Iterator[None]:
    """Hide the torch warnings whose content whet reports itself."""
    with warnings.catch_warnings():
        for text in (PIN_MEMORY_WARNING, *((FALLBACK_WARNING,) if has_fallback else ())):
            warnings.filterwarnings("ignore", message=text, category=UserWarning)
        yield
