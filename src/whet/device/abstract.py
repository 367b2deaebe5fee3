"""The interface of a device. The base classes provide defaults, and a device overrides what it needs.

To add a device, subclass `AbstractDevice` in a new file and add the class to `open.py`.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.device.kernels.switches import prefer_sdpa_kernel, use_torch_kernels, use_whet_kernels

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Mark = Any
"""A point in time on the clock of a device. Only the device that created it can read it."""

Made = TypeVar("Made")

Replay = Callable[[], None]
"""Runs captured work again on the same memory, without executing its Python code."""


class AbstractDevice(ABC):
    """A device that stores tensors and runs kernels."""

    kind: str
    lr_dtype: torch.dtype = torch.float64
    """Widest dtype of a learning rate on this device."""
    attention_kernels: tuple[str, ...] = ()
    """Values of the setting `attention` that this device supports besides "torch"."""
    has_whet_norms = False
    """Whether the norm kernels of whet run on this device."""

    def __init__(self) -> None:
        self.memory: DeviceMemory = DeviceMemory()
        self.monitor: DeviceMonitor = DeviceMonitor()

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The torch device."""

    @property
    def generator(self) -> torch.Generator | None:
        """Random number generator of the device, or None if it uses the generator of the CPU."""
        return None

    # --- tensors and time --------------------------------------------------------------------------------------------

    def put(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device. Every later kernel sees the complete copy."""
        return tensor.to(self.torch_device)

    def put_async(self, tensor: Tensor) -> Tensor:
        """Copy a small host tensor to this device without waiting for queued work."""
        return self.put(tensor)

    def put_model(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002
        """Move a model to this device in place. Modules and parameters keep their identity."""
        model.to(self.torch_device)

    def sync(self) -> None:
        """Wait for all queued work."""

    def mark(self) -> Mark:
        """Return a mark for the current point on the clock of the device."""
        return time.perf_counter()

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks. Waits until the device has passed both."""
        return float(end - start)

    # --- computation of models ---------------------------------------------------------------------------------------

    def use_precision(self, precision: str) -> None:
        """Set the process-wide precision of float32 matrix products: tf32 or full."""

    def preserve_precision(self) -> AbstractContextManager[object]:
        """Restore on exit the settings that `use_precision` changes."""
        return contextlib.nullcontext()

    def autocast(self, precision: str) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass."""
        half = HALF_TYPES.get(precision)
        return torch.autocast(self.torch_device.type, dtype=half) if half else contextlib.nullcontext()

    @contextlib.contextmanager
    def use_kernels(self, *, attention: str = "torch", norms: str = "torch") -> Iterator[None]:
        """Select attention and norm kernels in this context.

        "torch" leaves the choice to torch. "whet" selects whet's kernels in models that call them. All other values of
        `attention` name a preferred backend of scaled_dot_product_attention.
        """
        self.check_settings(attention=attention, norms=norms)
        with contextlib.ExitStack() as stack:
            for name, value in (("attention", attention), ("norms", norms)):
                stack.enter_context(use_whet_kernels(name) if value == "whet" else use_torch_kernels(name))
            if attention not in ("whet", "torch"):
                stack.enter_context(prefer_sdpa_kernel(attention))
            yield

    def check_settings(self, *, attention: str = "torch", norms: str = "torch", layout: str = "contiguous") -> None:  # noqa: ARG002
        """Raise UsageError for a setting that this device does not support, or with which it computes wrong results."""
        if attention not in ("torch", *self.attention_kernels):
            supported = ", ".join(self.attention_kernels)
            raise UsageError(
                f"{self.kind} has no such attention kernel"
                if supported
                else f"{self.kind} has no choice of attention kernels",
                got=f"attention={attention}",
                try_="attention=" + " or ".join(("torch", *self.attention_kernels)),
            )
        if norms == "whet" and not self.has_whet_norms:
            raise UsageError(f"{self.kind} has no norm kernels of whet", got="norms=whet", try_="norms=torch")

    def check_loss_scaling(self, optimizer: Optimizer) -> None:
        """Raise UsageError for an optimizer that gives wrong results with loss scaling on this device."""

    def compute_context(self, *, is_step: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context for running the model, which explains errors that only this device raises."""
        return contextlib.nullcontext()

    def graphs(self) -> "AbstractGraphs | None":
        """Return a graph capturer with a new memory pool, or None if the device does not support graphs."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUsage:
    """Memory counters in bytes, read without waiting for the device, or None if the device has no such counter."""

    allocated: int | None = None
    """Bytes of live tensors."""
    reserved: int | None = None
    """Bytes taken from the system, including caches."""
    peak: int | None = None
    """Maximum of `allocated` since the last reset."""
    limit: int | None = None
    """Recommended maximum of the device."""


class DeviceMemory:
    """Memory counters and caches of a device."""

    is_shared_with_host = False
    """Whether the device uses host memory. A copy on the host then reduces the memory for training."""

    def usage(self) -> MemoryUsage:
        return MemoryUsage()

    def free_bytes(self) -> int | None:
        """Return the free memory of the device in bytes, for all processes, or None if it uses host memory."""
        return None

    def reset_peak(self) -> None:
        """Reset the peak, if the device has such a counter."""

    def empty_cache(self) -> None:
        """Return cached memory to the system. Waits for the device, so do not call this during a step."""

    def keep_freed(self) -> AbstractContextManager[object]:
        """Return a context that keeps freed tensor memory in this process instead of returning it to the system."""
        return contextlib.nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device can copy to quickly."""
        return torch.empty(num_bytes, dtype=torch.uint8)


class DeviceMonitor:
    """Reports failures and events of a device that raise no error."""

    def watch(self, *, has_fallback: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context that watches the device during training."""
        return contextlib.nullcontext()

    def check(self, *, wait: bool = False) -> None:
        """Raise WhetError if the device has failed silently. With `wait`, first examine all output written so far."""

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the events since the last call, as pairs of event kind and fields."""
        return iter(())


class AbstractGraphs(ABC):
    """Captures work once and replays it as a single launch.

    All graphs of an instance share a memory pool, so they must not be replayed at the same time. Capturing computes
    nothing: existing tensors and the generator of the device are unchanged afterward. Side effects of the Python code
    remain.
    """

    @abstractmethod
    def warm_up(self) -> AbstractContextManager[list[str]]:
        """Return a context for running work eagerly before its capture.

        The context yields a list, which receives the source lines that synchronize with the device.
        """

    @abstractmethod
    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """Capture `work` and return a replay function and the result, whose tensors each replay fills again.

        Errors of `work` are raised unchanged. After an error, do not replay earlier graphs. The device stays usable.
        """

    @abstractmethod
    def forget(self) -> None:
        """Start a new memory pool. Graphs captured so far must not be replayed."""
