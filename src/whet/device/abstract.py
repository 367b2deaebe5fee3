"""The interface of a device. The base classes do nothing; a device overrides what it needs.

To add a device, subclass `AbstractDevice` in a file of its own and add it to `open.py`.
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
from whet.device.kernels.switches import prefer_sdpa_kernel, use_own_kernels, use_torch_kernels

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Mark = Any
"""A point in time on the device's clock; only the device that made it can read it."""

Made = TypeVar("Made")

Replay = Callable[[], None]
"""Runs captured work again on the same memory, without running its Python code."""


class AbstractDevice(ABC):
    """A device where tensors are stored and kernels run."""

    kind: str
    lr_dtype: torch.dtype = torch.float64
    """The widest dtype that a learning rate can have on this device."""
    attention_kernels: tuple[str, ...] = ()
    """Values of the setting `attention` that this device supports besides "torch"."""
    has_own_norms = False
    """Whether whet's own norm kernels run on this device."""

    def __init__(self) -> None:
        self.memory = DeviceMemory()
        self.monitor = DeviceMonitor()

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The device as torch names it."""

    @property
    def generator(self) -> torch.Generator | None:
        """The device's random number generator; None where the CPU's is the only one."""
        return None

    # --- tensors and time --------------------------------------------------------------------------------------------

    def put(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device. The copy is complete for every later kernel."""
        return tensor.to(self.torch_device)

    def put_async(self, tensor: Tensor) -> Tensor:
        """Copy a small host tensor without waiting for queued work."""
        return self.put(tensor)

    def put_model(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002
        """Move a model to this device in place. Modules and parameters keep their identity."""
        model.to(self.torch_device)

    def sync(self) -> None:
        """Wait until all queued work is done."""

    def mark(self) -> Mark:
        """Record the current point on the device's clock."""
        return time.perf_counter()

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        """Seconds between two marks; waits until the device has passed them."""
        return float(end - start)

    # --- how models are computed -------------------------------------------------------------------------------------

    def use_precision(self, precision: str) -> None:
        """Set the process-wide precision of float32 products (tf32 or full)."""

    def preserve_precision(self) -> AbstractContextManager[object]:
        """Restore on exit what `use_precision` changes."""
        return contextlib.nullcontext()

    def autocast(self, precision: str) -> AbstractContextManager[object]:
        """The autocast context of the forward pass."""
        half = HALF_TYPES.get(precision)
        return torch.autocast(self.torch_device.type, dtype=half) if half else contextlib.nullcontext()

    @contextlib.contextmanager
    def use_kernels(self, *, attention: str = "torch", norms: str = "torch") -> Iterator[None]:
        """Select attention and norm kernels while entered.

        "torch" leaves the choice to torch. "own" uses whet's kernels in models that call them; the other attention
        values are preferred backends of scaled_dot_product_attention.
        """
        self.check_settings(attention=attention, norms=norms)
        with contextlib.ExitStack() as stack:
            for name, value in (("attention", attention), ("norms", norms)):
                stack.enter_context(use_own_kernels(name) if value == "own" else use_torch_kernels(name))
            if attention not in ("own", "torch"):
                stack.enter_context(prefer_sdpa_kernel(attention))
            yield

    def check_settings(self, *, attention: str = "torch", norms: str = "torch", layout: str = "contiguous") -> None:  # noqa: ARG002
        """Raise UsageError for a setting that this device does not support or computes wrongly with."""
        if attention not in ("torch", *self.attention_kernels):
            supported = ", ".join(self.attention_kernels)
            raise UsageError(
                f"{self.kind} has no such attention kernel"
                if supported
                else f"{self.kind} has no choice of attention kernels",
                got=f"attention={attention}",
                try_="attention=" + " or ".join(("torch", *self.attention_kernels)),
            )
        if norms == "own" and not self.has_own_norms:
            raise UsageError(f"{self.kind} has no norm kernels of whet's own", got="norms=own", try_="norms=torch")

    def check_loss_scaling(self, optimizer: Optimizer) -> None:
        """Raise UsageError for an optimizer that computes wrongly with loss scaling on this device."""

    def compute_context(self, *, is_step: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """The context in which the user's model computes: explains errors that only this device raises."""
        return contextlib.nullcontext()

    def graphs(self) -> "AbstractGraphs | None":
        """A capturer of steps with its own memory pool; None where the device cannot capture."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUsage:
    """Bytes, read from counters without waiting for the device; None where there is no counter."""

    allocated: int | None = None
    """Live tensors."""
    reserved: int | None = None
    """Taken from the system, caches included."""
    peak: int | None = None
    """Maximum of `allocated` since the last reset."""
    limit: int | None = None
    """The maximum that the device recommends."""


class DeviceMemory:
    """Memory counters and caches of a device."""

    is_shared_with_host = False
    """Whether the device uses host memory, so that a host copy reduces what training can use."""

    def usage(self) -> MemoryUsage:
        """Read the counters."""
        return MemoryUsage()

    def reset_peak(self) -> None:
        """Start a new peak measurement, where there is a counter."""

    def empty_cache(self) -> None:
        """Return cached memory to the system. Waits for the device, so never inside a step."""

    def keep_freed(self) -> AbstractContextManager[object]:
        """Keep memory that tensors free in this process while entered, where it is returned otherwise."""
        return contextlib.nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Allocate host memory that the device can copy to quickly."""
        return torch.empty(num_bytes, dtype=torch.uint8)


class DeviceMonitor:
    """Failures and events of a device that raise no error."""

    def watch(self, *, has_fallback: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """Watch the device while a run trains on it."""
        return contextlib.nullcontext()

    def check(self, *, wait: bool = False) -> None:
        """Raise if the device has failed silently; with `wait`, after everything written so far was examined."""

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events for the run's log since the last call: kinds and fields."""
        return iter(())


class AbstractGraphs(ABC):
    """Captures work once and replays it as one launch.

    All graphs of one instance share a memory pool, so two of them are never replayed at once. Capturing computes
    nothing: tensors that existed before and the device's generator are unchanged afterwards. Side effects of the Python
    code remain.
    """

    @abstractmethod
    def warm_up(self) -> AbstractContextManager[list[str]]:
        """Run work eagerly before its capture; yields the source lines that synchronized with the device."""

    @abstractmethod
    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """Return a replay function and the result of `work`: tensors that each replay fills again.

        Raises what `work` raised. After an error, graphs captured before must not be replayed; the device stays usable.
        """

    @abstractmethod
    def forget(self) -> None:
        """Start a new memory pool: graphs captured so far will not be replayed again."""
