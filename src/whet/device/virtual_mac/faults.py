"""Simulated faults of the virtual Mac, as in `with simulate(Heat(slowdown=3)): ...`.

docs/apple.md lists all faults.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from whet.base.errors import UsageError, closest_match
from whet.device.virtual_mac.native import native, state
from whet.machine.facts import SystemState

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Undo = Callable[[], object]
When = Callable[..., bool]
"""A predicate on the tensor arguments of a kernel, such as `lambda x, weight: len(x) > 32_768`."""


class SimulatedFault(Protocol):
    """The interface of simulated faults."""

    def start(self) -> Undo:
        """Start the fault and return a function that ends it."""


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Simulates GPU memory that is allocated outside torch's allocator."""

    num_bytes: int

    def start(self) -> Undo:
        native().hold_more(self.num_bytes)
        return lambda: native().hold_more(-self.num_bytes)


@dataclass(frozen=True, slots=True)
class GraphCache:
    """Allocates host memory for every new combination of operator, shapes and dtypes.

    `torch.mps.empty_cache()` frees it.
    """

    bytes_per_graph: int = 55_000

    def start(self) -> Undo:
        return _push(_graph_bytes, self.bytes_per_graph, native().hold_per_graph)


@dataclass(frozen=True, slots=True)
class DriverGrowth:
    """Makes Metal reserve more unused memory with every kernel. `torch.mps.empty_cache()` frees it."""

    bytes_per_kernel: int

    def start(self) -> Undo:
        fault = native().start_driver_growth(self.bytes_per_kernel)
        return lambda: native().end_fault(fault)


@dataclass(frozen=True, slots=True)
class GpuFailure:
    """Makes kernels fail as on Metal: an error is printed to stderr, and the result is garbage."""

    operator: str | None = None
    """Operator whose kernels fail, such as "mm", or None for all operators."""
    after_kernels: int = 0
    """Number of matching kernels that succeed first."""
    times: int = 1
    """Number of kernels that fail."""
    cause: Literal["memory", "watchdog"] = "memory"
    """Either the GPU is out of memory, or macOS stops the GPU's work because the display has to wait for it."""
    raises: bool | None = None
    """Whether the next synchronization raises an error, as in torch 2.15 and later. None: as in the installed torch."""

    def start(self) -> Undo:
        raises = native().reports_failures if self.raises is None else self.raises
        is_watchdog = self.cause == "watchdog"
        fault = native().start_gpu_failure(_kernel(self.operator), self.after_kernels, self.times, is_watchdog, raises)
        return lambda: native().end_fault(fault)


@dataclass(frozen=True, slots=True)
class Miscompute:
    """Multiplies the results of an operator by 1 + `relative_error`, without an error message."""

    operator: str
    relative_error: float = 1e-2
    when: When | None = None
    """Condition on the tensor arguments of the kernel, or None to change every result."""

    def start(self) -> Undo:
        fault = native().start_miscompute(_kernel(self.operator), self.relative_error, self.when)
        return lambda: native().end_fault(fault)


@dataclass(frozen=True, slots=True)
class Heat:
    """Slows down every kernel, so that it takes `slowdown` times as long.

    The slowdown starts at `after`, and increases linearly to its full value at `after` + `over`.
    """

    slowdown: float = 2.0
    after: float = 0
    over: float = 0
    unit: Literal["kernels", "seconds"] = "kernels"
    """Unit of `after` and `over`, which are counted from the start of the fault."""

    def start(self) -> Undo:
        fault = native().start_heat(self.slowdown, self.after, self.over, self.unit == "seconds")
        _heats.append(self)

        def undo() -> None:
            native().end_fault(fault)
            _heats.remove(self)

        return undo


@dataclass(frozen=True, slots=True)
class KilledByPressure:
    """Sends SIGKILL to the process if tensors and held memory exceed this share of the machine's memory."""

    share: float = 1.0

    def start(self) -> Undo:
        if state.machine is None or state.machine.memory_bytes is None:
            raise UsageError("the memory of this machine is unknown", try_='install("m2-air-8gb")')
        return _push(_deadly_bytes, int(self.share * state.machine.memory_bytes), native().kill_above)


class Simulation:
    """The faults that one call of `simulate` has started. Exiting the context or calling `end()` ends them."""

    def __init__(self, undo: list[Undo]) -> None:
        self._undo = undo

    def end(self) -> None:
        """End the faults. Later calls do nothing."""
        while self._undo:
            self._undo.pop()()
        if self in _running:
            _running.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


_running: list[Simulation] = []
_heats: list[Heat] = []
# Values of the running simulations, oldest first. The newest value applies.
_graph_bytes: dict[object, int] = {}
_deadly_bytes: dict[object, int] = {}
_simulated_states: dict[object, SystemState] = {}
_held_by_hand: list[HeldMemory] = [HeldMemory(0)]


def simulate(*faults: SimulatedFault | SystemState) -> Simulation:
    """Start faults immediately and return the simulation.

    Use the result in a `with` statement, call its `end()`, or let the faults run until the process exits. A
    `SystemState` simulates sensor readings, such as thermal state, memory pressure and power source.
    """
    native()
    simulation = Simulation([])
    _running.append(simulation)
    try:
        for fault in faults:
            simulation._undo.append(
                _push(_simulated_states, fault) if isinstance(fault, SystemState) else fault.start()
            )
    except BaseException:
        simulation.end()
        raise
    return simulation


def end_all() -> None:
    """End every simulation, and release the memory held by `hold_memory`."""
    for simulation in reversed(_running.copy()):
        simulation.end()
    hold_memory(0)


def hold_memory(num_bytes: int) -> None:
    """Simulate GPU memory held outside torch's allocator. Each call replaces the amount of the previous one."""
    native().hold_more(num_bytes - _held_by_hand[0].num_bytes)
    _held_by_hand[0] = HeldMemory(num_bytes)


def system_state() -> SystemState | None:
    """Return the simulated sensor readings, with only the simulated fields set, or None if there are none."""
    if state.machine is None or not (_simulated_states or _heats):
        return None
    readings: dict[str, Any] = {"thermal": _thermal()} if _heats else {}
    for one in _simulated_states.values():
        readings.update({name: getattr(one, name) for name in one.model_fields_set})
    return SystemState(**readings)


def reduces_over(size: int) -> When:
    """Return a condition for matrix products that sum over more than `size` terms.

    In pytorch#177116, the limit is 32,768 on M1 and M2.
    """
    return lambda left, right, *_: max(left.shape[-1], right.shape[-1 if right.dim() == 1 else -2]) > size


def has_strided_weight(_x: "torch.Tensor", weight: "torch.Tensor", *_bias: "torch.Tensor") -> bool:
    """Return whether the weight is not contiguous. Use this as a condition for convolutions (pytorch#192212)."""
    return not weight.is_contiguous()


def _push(into: dict[object, T], value: T, apply: Callable[[Any], object] = lambda _: None) -> Undo:
    """Apply the value of a fault. Return a function that removes it and applies the newest remaining value, or 0."""
    key = object()
    into[key] = value
    apply(value)

    def undo() -> None:
        del into[key]
        apply(next(reversed(into.values()), 0))

    return undo


def _thermal() -> str:
    """Return the thermal state: "heavy" at the full slowdown, "moderate" below it, "nominal" without a slowdown."""
    now, full = native().slowdown_now(), max(heat.slowdown for heat in _heats)
    return "nominal" if now <= 1 else "moderate" if now < full else "heavy"


def _kernel(operator: str | None) -> str:
    """Return the kernel name of an operator, or "" for None, which stands for all kernels."""
    if operator is None:
        return ""
    name = operator.removeprefix("aten::").partition(".")[0]
    if name in state.kernels:
        return name
    meant = {"linear": "addmm", "scaled_dot_product_attention": "bmm"}.get(name) or closest_match(name, state.kernels)
    hint = f"{meant!r}?" if meant else "the name of an operator that torch computes on MPS, e.g. 'mm'"
    raise UsageError("the virtual GPU has no kernel of this name", got=operator, try_=hint)
