"""Recognize out-of-memory errors and GPU failures, explain MPS errors, and hide warnings that whet handles."""

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
"""Starts of out-of-memory messages. The type is not enough, because MPS raises a plain RuntimeError (torch 2.13)."""

FALLBACK_WARNING = r"The operator '[\w:.]+' is not currently supported on the MPS backend and will fall back"
"""Hidden, because it names only the first operator. The report of a run lists all operators and their cost."""
PIN_MEMORY_WARNING = r"'pin_memory' argument is set as true but not supported on MPS"
"""Hidden, because rule L4 already reports that nothing is pinned."""

COMMAND_BUFFER_TEXT = "MPS command buffer execution failed"
"""Start of the error that torch raises since 2.15 if the GPU has failed, at the next point that waits for the GPU.

If memory ran out, it is a torch.OutOfMemoryError.
"""

_MISSING_OPERATOR = re.compile(r"The operator '([\w:.]+)' is not currently implemented for the MPS device")
_NO_FLOAT64 = "MPS framework doesn't support float64"
_NARROWER = {torch.float64: "float32", torch.complex128: "complex64"}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out.

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


def is_gpu_failure(error: BaseException | None) -> bool:
    """Return whether torch reports that the GPU has failed, in work that may be older than the current step.

    What was computed since the last wait for the GPU is invalid, so a step cannot be undone or repeated by itself.
    """
    return any(str(one).startswith(COMMAND_BUFFER_TEXT) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


class GpuFailedError(WhetError):
    """The GPU has failed, and its results since then are invalid."""

    def __init__(self, report: str) -> None:
        """Explain a failure from the words of torch or Metal."""
        kept = "the same command resumes from the last checkpoint, which is from before the failure"
        if any(word in report for word in WATCHDOG_TEXTS):
            # Smaller batches do not help: the display waits for the sum of the work, not for one kernel.
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
    """Return an explanation if torch reports that the GPU has failed, or None for other errors."""
    if isinstance(error, GpuFailedError):
        return None
    reported = next((str(one) for one in _chain(error) if str(one).startswith(COMMAND_BUFFER_TEXT)), None)
    return None if reported is None else GpuFailedError(reported.partition(". This error may have been")[0])


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
    except RuntimeError as error:
        # NotImplementedError is one too. Memory that ran out is handled where the step can be repeated with less.
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
