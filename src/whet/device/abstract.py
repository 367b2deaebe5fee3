"""The device interface. The base classes provide defaults, which the classes of the devices override.

CONTRIBUTING.md lists the steps to add a device.
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
"""A point in time on a device's clock. Only the device that created it can read it."""

_NO_CONTEXT = contextlib.nullcontext()

Made = TypeVar("Made")

Replay = Callable[[], None]
"""A function that runs captured work again on the same memory, without executing its Python code."""


class AbstractDevice(ABC):
    """A device that holds tensors and runs kernels."""

    kind: str
    lr_dtype: torch.dtype = torch.float64
    """Widest dtype that this device supports for a learning rate."""
    attention_kernels: tuple[str, ...] = ()
    """Values of the `attention` setting that this device supports besides "torch"."""
    has_whet_norms = False
    """Whether whet's norm kernels run on this device."""
    has_tf32 = False
    """Whether float32 matrix products can be computed with TF32."""
    is_cpu = False
    """Whether this is the CPU, with which other devices are compared."""
    adds_in_any_order = False
    """Whether kernels use atomic additions, so that the same step may round differently each time."""
    rank_backend: str | None = "gloo"
    """The backend of torch.distributed for ranks with a device each, or None if ranks cannot train together on it."""
    rounding_variables: tuple[str, ...] = ("MKL_CBWR", "ONEDNN_DEFAULT_FPMATH_MODE")
    """Environment variables that change the last bits and that no setting of the plan covers.

    OMP_NUM_THREADS and MKL_NUM_THREADS are not included: a run records their effect as `threads`.
    """

    def __init__(self) -> None:
        self.memory: DeviceMemory = DeviceMemory()
        self.monitor: DeviceMonitor = DeviceMonitor()

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """The `torch.device` on which tensors are placed."""

    @property
    def generator(self) -> torch.Generator | None:
        """The random number generator of the device, or None if it uses the CPU generator."""
        return None

    @property
    def is_virtual(self) -> bool:
        """Whether the device is simulated."""
        return False

    def check_environment(self, *, watermarks: tuple[float, float] | None, needs_fallback: bool) -> None:
        """Raise UsageError if torch has read other environment variables of MPS than the plan needs."""

    # --- tensors and time --------------------------------------------------------------------------------------------

    def put(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device. All later kernels see the complete copy."""
        return tensor.to(self.torch_device)

    def put_async(self, tensor: Tensor) -> Tensor:
        """Return a copy of a small host tensor on this device, without waiting for queued work if possible."""
        return self.put(tensor)

    def put_model(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:  # noqa: ARG002
        """Move a model to this device in place. Modules and parameters remain the same objects."""
        model.to(self.torch_device)

    def sync(self) -> None:
        """Wait for all queued work to finish."""

    def mark(self) -> Mark:
        """Return a mark that the device reaches after all work queued so far."""
        return time.perf_counter()

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks. Waits until the device has reached both."""
        return float(end - start)

    # --- model execution ---------------------------------------------------------------------------------------------

    def use_precision(self, precision: str) -> None:
        """Enable TF32 for float32 matrix products and convolutions in this process if `precision` is "tf32".

        Any other precision disables it. Does nothing on devices without TF32.
        """

    def preserve_precision(self) -> AbstractContextManager[object]:
        """Return a context that restores the settings of `use_precision` on exit."""
        return contextlib.nullcontext()

    def autocast(self, precision: str, *, keeps_weights: bool = True) -> AbstractContextManager[object]:
        """Return the context of the forward pass: autocast for "bf16" and "fp16", otherwise a null context.

        With `keeps_weights`, weights are converted once, so they must not change inside the context.
        """
        half = HALF_TYPES.get(precision)
        if half is None:
            return _NO_CONTEXT
        return torch.autocast(self.torch_device.type, dtype=half, cache_enabled=keeps_weights)

    @contextlib.contextmanager
    def use_kernels(self, *, attention: str = "torch", norms: str = "torch") -> Iterator[None]:
        """Select attention and norm kernels in this context.

        "torch" leaves the choice to torch. "whet" selects whet's kernels in models that call them. Any other value of
        `attention` names the preferred backend of scaled_dot_product_attention.
        """
        self.check_settings(attention=attention, norms=norms)
        with contextlib.ExitStack() as stack:
            for name, value in (("attention", attention), ("norms", norms)):
                stack.enter_context(use_whet_kernels(name) if value == "whet" else use_torch_kernels(name))
            if attention not in ("whet", "torch"):
                stack.enter_context(prefer_sdpa_kernel(attention))
            yield

    def check_settings(self, *, attention: str = "torch", norms: str = "torch", layout: str = "contiguous") -> None:  # noqa: ARG002
        """Raise UsageError for a setting that this device does not support or that gives wrong results on it."""
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
            raise UsageError(f"whet has no norm kernels for {self.kind}", got="norms=whet", try_="norms=torch")

    def check_loss_scaling(self, optimizer: Optimizer) -> None:
        """Raise UsageError if this optimizer gives wrong results with loss scaling on this device."""

    def compute_context(self, *, is_step: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context for running the model. `is_step` is whether the work is an optimizer step.

        A device may use it to select its kernels and to explain its errors.
        """
        return _NO_CONTEXT

    def reader(self) -> "AbstractReader | None":
        """Return a reader of tensors that does not wait for later work, or None if the device has none."""
        return None

    def graphs(self) -> "AbstractGraphs | None":
        """Return a new graph capturer with its own memory pool, or None if the device does not support graphs."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUsage:
    """Memory counters in bytes. A counter that the device does not provide is None."""

    allocated: int | None = None
    """Bytes of live tensors. On the CPU, the resident memory of the process."""
    reserved: int | None = None
    """Bytes taken from the system, including caches."""
    peak: int | None = None
    """Maximum of `allocated` since the last reset."""
    limit: int | None = None
    """Total memory of the device. On MPS, the maximum that Metal recommends."""


class DeviceMemory:
    """Memory counters and cache of a device."""

    is_shared_with_host = False
    """Whether the device uses host memory. A copy on the host then takes memory from training."""

    def usage(self) -> MemoryUsage:
        """Return the current memory counters, without waiting for the device."""
        return MemoryUsage()

    def free_bytes(self) -> int | None:
        """Return the bytes of device memory that no process uses, or None if the device uses host memory."""
        return None

    def reset_peak(self) -> None:
        """Reset the peak counter, if the device has one."""

    def empty_cache(self) -> None:
        """Return cached memory to the system. This may wait for the device, so do not call it during a step."""

    def keep_freed(self) -> AbstractContextManager[object]:
        """Return a context that keeps freed memory in this process instead of returning it to the system."""
        return contextlib.nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 tensor in host memory to which the device copies quickly."""
        return torch.empty(num_bytes, dtype=torch.uint8)


class DeviceMonitor:
    """Detects device failures that raise no error, and collects events to report."""

    def watch(self, *, has_fallback: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context that watches the device during training. `has_fallback` is whether MPS may use the CPU."""
        return contextlib.nullcontext()

    def check(self, *, wait: bool = False) -> None:
        """Raise WhetError if the device has failed silently. With `wait`, wait for reports of all earlier failures."""

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return an iterator over the events since the last call, as pairs of kind and fields."""
        return iter(())


class AbstractReader(ABC):
    """Reads tensors while the device works on what was queued after them.

    A plain read waits for everything that is queued. The device is then idle until the host has launched more.
    """

    @abstractmethod
    def has_reached(self, mark: Mark) -> bool:
        """Return whether the device has finished all work queued before a mark, without waiting."""

    @abstractmethod
    def after(self, mark: Mark) -> AbstractContextManager[object]:
        """Return a context in which reading a tensor waits only for the work queued before a mark."""


class AbstractGraphs(ABC):
    """Captures work once and replays it with a single launch.

    All graphs of an instance share a memory pool, so they must not be replayed at the same time. A capture does not
    change existing tensors or the generator of the device. Side effects of the Python code remain.
    """

    @abstractmethod
    def warm_up(self) -> AbstractContextManager[list[str]]:
        """Return a context for running work eagerly before its capture.

        The context yields a list that collects the source line or the operator of every device synchronization.
        """

    @abstractmethod
    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        """Capture `work`, and return a replay function and the result. Each replay overwrites the result's tensors.

        Errors of `work` are raised unchanged. After an error, the device stays usable, but do not replay earlier
        graphs.
        """

    @abstractmethod
    def forget(self) -> None:
        """Start a new memory pool. Do not replay graphs captured before this call."""
