"""Apple GPUs through MPS. Based on PyTorch's source code and issues. Not yet run on a real Mac."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.base.errors import UsageError
from whet.base.units import format_seconds
from whet.device import virtual_mac
from whet.device.abstract import AbstractDevice, DeviceMemory, DeviceMonitor, MemoryUsage
from whet.device.environment import FALLBACK, check_mps_memory, configure_mps_memory, has_fallback
from whet.device.errors import GpuFailedError, check_dtype, explain_mps_errors, ignore_handled_warnings
from whet.device.operators import operator_status, torch_operators
from whet.device.stderr_watch import GPU_MEMORY_TEXTS, METAL_FAILURES, WATCHDOG_TEXTS, StderrWatch
from whet.machine.apple import oldest_macos
from whet.machine.facts import Release, TorchFacts, parse_release

_HALF_TYPES = (torch.float16, torch.bfloat16)


@final
class MpsDevice(AbstractDevice):
    """The Apple GPU of this machine, used through torch's MPS backend."""

    kind = "mps"
    # Metal does not support float64.
    lr_dtype = torch.float32
    rank_backend = None

    def __init__(self) -> None:
        super().__init__()
        configure_mps_memory()
        self.memory: MpsMemory = MpsMemory()
        self.monitor: MpsMonitor = MpsMonitor(self.sync)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("mps")

    @property
    def generator(self) -> torch.Generator:
        return torch.mps._get_default_mps_generator()

    @property
    def is_virtual(self) -> bool:
        return virtual_mac.installed() is not None

    def check_environment(self, *, watermarks: tuple[float, float] | None, needs_fallback: bool) -> None:
        if watermarks is not None:
            check_mps_memory(watermarks)
        if needs_fallback and not has_fallback():
            raise UsageError(
                "mps_fallback must be set before torch starts",
                got=f"mps_fallback=on, and no {FALLBACK} in the environment",
                try_=f"{FALLBACK}=1 python ..., or whet train, which sets it",
            )

    def put(self, tensor: Tensor) -> Tensor:
        check_dtype(tensor)
        # Do not use non_blocking, because such copies have read freed memory (pytorch#139550, #189690).
        return tensor.to(self.torch_device)

    def put_model(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        named = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
        for role, tensors in named.items():
            for name, tensor in tensors:
                hint = "model.float() before the optimizer is made; or --device cpu"
                check_dtype(tensor, name=f"{role} {name!r}", hint=hint)
        super().put_model(model)
        # conv2d gives wrong results with weights that are not contiguous (pytorch#192212).
        make_contiguous(model, optimizer)

    def sync(self) -> None:
        torch.mps.synchronize()

    def mark(self) -> torch.mps.Event:
        self.memory.sample_peak()
        event = torch.mps.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_seconds(self, start: torch.mps.Event, end: torch.mps.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def check_settings(self, *, attention: str = "torch", norms: str = "torch", layout: str = "contiguous") -> None:
        if layout != "contiguous":
            raise UsageError(
                "channels_last gives crashes and wrong results on MPS (pytorch#188371, #180992, #175189)",
                got=f"layout={layout}",
                try_="layout=contiguous, or --device cpu",
            )
        super().check_settings(attention=attention, norms=norms)

    def check_loss_scaling(self, optimizer: Optimizer) -> None:
        if torch_release() >= (2, 13):
            return
        hint = "precision=bf16, precision=fp32, or torch 2.13"
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                "a fused optimizer ignores the loss scale on MPS before torch 2.13 (pytorch#186360)",
                got=f"fp16 with {type(optimizer).__name__}(fused=True) and torch {torch.__version__}",
                try_=f"fused=False; {hint}",
            )
        if any(p.dtype in _HALF_TYPES for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "loss scaling sets half gradients to zero on MPS before torch 2.13 (pytorch#184286)",
                got=f"fp16 with weights in half precision and torch {torch.__version__}",
                try_=f"model.float(), whose products are still fp16; {hint}",
            )

    @contextmanager
    def compute_context(self, *, is_step: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(explain_mps_errors())
            if is_step:
                stack.enter_context(self.monitor.time_fallbacks())
            yield


@final
class MpsMemory(DeviceMemory):
    """Counters and cache of the MPS allocator."""

    is_shared_with_host = True

    def __init__(self) -> None:
        # Since torch 2.13, the allocator counts the peak (pytorch#186748). For older versions, sample it at each mark.
        self._has_peak = torch_release() >= (2, 13)
        self._sampled_peak = 0

    def sample_peak(self) -> None:
        """Update the sampled peak, unless the allocator counts the peak."""
        if not self._has_peak:
            self._sampled_peak = max(self._sampled_peak, torch.mps.current_allocated_memory())

    def usage(self) -> MemoryUsage:
        allocated = torch.mps.current_allocated_memory()
        self._sampled_peak = max(self._sampled_peak, allocated)
        return MemoryUsage(
            allocated=allocated,
            reserved=torch.mps.driver_allocated_memory(),
            peak=torch.accelerator.max_memory_allocated("mps") if self._has_peak else self._sampled_peak,
            limit=torch.mps.recommended_max_memory(),
        )

    def reset_peak(self) -> None:
        self._sampled_peak = 0
        if self._has_peak:
            torch.accelerator.reset_peak_memory_stats("mps")

    def empty_cache(self) -> None:
        torch.mps.empty_cache()


@final
class MpsMonitor(DeviceMonitor):
    """Detects GPU failures, and times operators that fall back to the CPU."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self._sync = sync
        self._watch: StderrWatch | None = None
        self._raises_failures = False
        self._timer: FallbackTimer | None = None
        self._events: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def watch(self, *, has_fallback: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(ignore_handled_warnings(has_fallback=has_fallback))
            self._timer = FallbackTimer(sync=self._sync) if has_fallback else None
            self._raises_failures = torch_release() >= (2, 15)
            if not self._raises_failures:
                # Before torch 2.15, a failed command buffer is reported only on standard error.
                self._watch = stack.enter_context(StderrWatch(*METAL_FAILURES, *GPU_MEMORY_TEXTS, *WATCHDOG_TEXTS))
            yield

    @contextmanager
    def time_fallbacks(self) -> Iterator[None]:
        """Time CPU fallbacks during one optimizer step, if the fallback is enabled."""
        if self._timer is None:
            yield
            return
        with self._timer.during_step():
            yield

    def check(self, *, wait: bool = False) -> None:
        if wait and self._raises_failures:
            # At a synchronization, torch raises an error if the GPU has reported a failure.
            self._sync()
        if self._watch is None:
            return
        failures = self._watch.seen(wait=wait).intersection(METAL_FAILURES)
        if not failures:
            return
        # Metal prints the reason on the next lines, so wait for them.
        seen = self._watch.seen(wait=True)
        reasons = " and ".join(repr(text) for text in (*WATCHDOG_TEXTS, *GPU_MEMORY_TEXTS) if text in seen)
        raise GpuFailedError(f"Metal's {min(failures)!r} on standard error, with {reasons or 'no reason'}")

    def events(self) -> Iterator[tuple[str, dict[str, Any]]]:
        result = None if self._timer is None else self._timer.result()
        if result is not None:
            self._timer = None
            self._events.append(("fallback", result))
        events, self._events = self._events, []
        return iter(events)


# --- operators that fall back to the CPU -----------------------------------------------------------------------------


@dataclass
class _FallbackCost:
    calls: int = 0
    seconds: float = 0.0


class FallbackTimer:
    """Times operators that fall back to the CPU during the first `num_steps` steps.

    Timing stops then, because each timed call needs two extra synchronizations.
    """

    def __init__(self, *, num_steps: int = 2, sync: Callable[[], None]) -> None:
        self._num_steps = num_steps
        self._steps_done = 0
        self._mode = _FallbackTimingMode(sync)

    @contextmanager
    def during_step(self) -> Iterator[None]:
        """Time the fallbacks of one optimizer step, unless enough steps have been timed."""
        if self._steps_done >= self._num_steps:
            yield
            return
        with self._mode:
            yield
        self._steps_done += 1

    def result(self) -> dict[str, Any] | None:
        """Return the fields of a fallback event: the calls and seconds per step of each operator, and a message.

        The result is None before all steps have been timed, and if no operator fell back.
        """
        if self._steps_done < self._num_steps or not self._mode.costs:
            return None
        steps = self._steps_done
        by_cost = sorted(self._mode.costs.items(), key=lambda item: -item[1].seconds)
        lines = [
            f"{name} {cost.calls / steps:g} calls a step, {_format_duration(cost.seconds / steps)} a step"
            for name, cost in by_cost
        ]
        return {
            "operators": {n: {"calls": c.calls / steps, "seconds": c.seconds / steps} for n, c in by_cost},
            "reason": f"fell back to the CPU: {'; '.join(lines)} (the mean of {steps} steps)",
        }


def _format_duration(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else format_seconds(seconds)


class _FallbackTimingMode(TorchDispatchMode):
    def __init__(self, sync: Callable[[], None]) -> None:
        super().__init__()
        self.costs: dict[str, _FallbackCost] = {}
        self._sync = sync

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not (falls_back(name) and _is_on_mps((args, kwargs))):
            return func(*args, **(kwargs or {}))
        # Wait for queued work first, so that the measured time does not include it.
        self._sync()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._sync()
        cost = self.costs.setdefault(name, _FallbackCost())
        cost.calls += 1
        cost.seconds += time.perf_counter() - start
        return result


def falls_back(name: str) -> bool:
    """Return whether an operator such as "aten::x.out" falls back to the CPU when it is called with MPS tensors."""
    namespace, _, name = name.partition("::")
    if namespace != "aten":
        return False
    status = operator_status(name, torch_operators())
    if status.way == "CompositeExplicitAutograd":
        # The decomposition of an operator x calls its in-place form x_. If there is none, x does not fall back.
        base, dot, overload = name.partition(".")
        return falls_back(f"aten::{base}_{dot}{overload}")
    return status.kind in ("missing", "on the CPU")


def _is_on_mps(arguments: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type == "mps" for leaf in tree_leaves(arguments))


# --- layout and versions ---------------------------------------------------------------------------------------------


@torch.no_grad()
def make_contiguous(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Make every parameter contiguous in place, with its gradient and optimizer state.

    Parameters that share memory are skipped, because copying one would end the sharing.
    """
    owners = Counter(_storage_address(tensor) for tensor in {id(p): p for p in model.parameters()}.values())
    for parameter in model.parameters():
        if parameter.is_contiguous() or owners[_storage_address(parameter)] > 1:
            continue
        parameter.data = parameter.data.contiguous()
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        # Fused optimizer kernels need the state in the same layout as the parameter.
        state.update({k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0})


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def torch_release() -> Release:
    """Return the version of the installed torch as (major, minor)."""
    release = parse_release(str(torch.__version__))
    assert release is not None
    return release


def mps_unavailable_reason() -> str | None:
    """Return why MPS cannot be used in this process, or None if it can."""
    if torch.backends.mps.is_available():
        return None
    if not torch.backends.mps.is_built():
        return "this torch is built without MPS"
    return f"macOS {oldest_macos(TorchFacts(version=str(torch.__version__)))} or newer is needed"
