"""What goes wrong on the virtual Mac, on request: `with simulate(Heat(slowdown=3)): ...`. All of it is simulated.

Each fault is a value that says what happens; `simulate` makes it happen until its end. docs/apple.md shows them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar

from whet.base.errors import UsageError, closest_match
from whet.device.virtual_mac.native import native, state
from whet.machine.facts import Conditions

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Undo = Callable[[], object]
When = Callable[..., bool]
"""A question to the tensors that a kernel was given, e.g. `lambda x, weight: len(x) > 32_768`."""


class SimulatedFault(Protocol):
    def start(self) -> Undo:
        """Makes it happen; how to end it."""


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """So many bytes of GPU memory are taken outside of torch's allocator."""

    num_bytes: int

    def start(self) -> Undo:
        native().hold_more(self.num_bytes)
        return lambda: native().hold_more(-self.num_bytes)


@dataclass(frozen=True, slots=True)
class GraphCache:
    """Every new operator, shape or dtype really takes so many bytes of host memory, until `torch.mps.empty_cache()`."""

    bytes_per_graph: int = 55_000

    def start(self) -> Undo:
        return _push(_graph_bytes, self.bytes_per_graph, native().hold_per_graph)


@dataclass(frozen=True, slots=True)
class GpuFailure:
    """A kernel fails as Metal does when the GPU has no memory: a line on stderr, garbage in the result, no error."""

    operator: str | None = None
    """Only kernels of this operator count, e.g. "mm"."""
    after_kernels: int = 0
    times: int = 1

    def start(self) -> Undo:
        fault = native().start_gpu_failure(_kernel(self.operator), self.after_kernels, self.times)
        return lambda: native().end_fault(fault)


@dataclass(frozen=True, slots=True)
class Miscompute:
    """An operator's results are wrong by a factor, and nothing says so."""

    operator: str
    relative_error: float = 1e-2
    when: When | None = None
    """Asked with the tensors the kernel was given; without it every result is wrong."""

    def start(self) -> Undo:
        fault = native().start_miscompute(_kernel(self.operator), self.relative_error, self.when)
        return lambda: native().end_fault(fault)


@dataclass(frozen=True, slots=True)
class Heat:
    """Every kernel becomes slower in proportion to its own time: not at all at first, fully after `after` + `over`."""

    slowdown: float = 2.0
    after: float = 0
    over: float = 0
    unit: Literal["kernels", "seconds"] = "kernels"

    def start(self) -> Undo:
        fault = native().start_heat(self.slowdown, self.after, self.over, self.unit == "seconds")
        _heats.append(self)

        def undo() -> None:
            native().end_fault(fault)
            _heats.remove(self)

        return undo


@dataclass(frozen=True, slots=True)
class KilledByPressure:
    """SIGKILL as soon as tensors and held memory take more than this share of the machine's memory."""

    share: float = 1.0

    def start(self) -> Undo:
        if state.asked is None or state.asked.memory_bytes is None:
            raise UsageError("nobody knows how much memory this machine has", try_='install("m2-air-8gb")')
        return _push(_deadly_bytes, int(self.share * state.asked.memory_bytes), native().kill_above)


class Simulation:
    """What is being simulated; `with` ends it, or `end()`."""

    def __init__(self, undo: list[Undo]) -> None:
        self._undo = undo

    def end(self) -> None:
        """Once more is harmless."""
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
# What may be set several times at once, oldest first: the newest counts.
_graph_bytes: dict[object, int] = {}
_deadly_bytes: dict[object, int] = {}
_conditions: dict[object, Conditions] = {}
_held_by_hand: list[HeldMemory] = [HeldMemory(0)]


def simulate(*faults: SimulatedFault | Conditions) -> Simulation:
    """Starts at once, as `open` does: use it with `with`, or call `end()`, or leave it until the process ends.

    `Conditions` are what the sensors of the machine shall say: heat, memory pressure, power.
    """
    native()
    simulation = Simulation([])
    _running.append(simulation)
    try:
        for fault in faults:
            simulation._undo.append(_push(_conditions, fault) if isinstance(fault, Conditions) else fault.start())
    except BaseException:
        simulation.end()
        raise
    return simulation


def end_all() -> None:
    """Ends every simulation, and what `hold_memory` holds."""
    for simulation in reversed(_running.copy()):
        simulation.end()
    hold_memory(0)


def hold_memory(num_bytes: int) -> None:
    """`simulate(HeldMemory(num_bytes))` in place of what this function held before."""
    native().hold_more(num_bytes - _held_by_hand[0].num_bytes)
    _held_by_hand[0] = HeldMemory(num_bytes)


def conditions() -> Conditions | None:
    """What the sensors of the virtual Mac say: only what is simulated is set. None where nothing is."""
    if state.asked is None or not (_conditions or _heats):
        return None
    said: dict[str, Any] = {"thermal": _thermal()} if _heats else {}
    for one in _conditions.values():
        said.update({name: getattr(one, name) for name in one.model_fields_set})
    return Conditions(**said)


def reduces_over(size: int) -> When:
    """True for a product that sums over more than `size` terms, as in pytorch#177116 on M1 and M2 (32 768)."""
    return lambda left, right, *_: max(left.shape[-1], right.shape[-1 if right.dim() == 1 else -2]) > size


def has_strided_weight(_x: "torch.Tensor", weight: "torch.Tensor", *_bias: "torch.Tensor") -> bool:
    """True for a weight that is not contiguous, as in pytorch#192212 for convolutions."""
    return not weight.is_contiguous()


def _push(into: dict[object, T], value: T, apply: Callable[[Any], object] = lambda _: None) -> Undo:
    """Applies the value until it is taken out again; then the newest that is left, or 0."""
    key = object()
    into[key] = value
    apply(value)

    def undo() -> None:
        del into[key]
        apply(next(reversed(into.values()), 0))

    return undo


def _thermal() -> str:
    """macOS says "heavy" when it throttles fully."""
    now, full = native().slowdown_now(), max(heat.slowdown for heat in _heats)
    return "nominal" if now <= 1 else "moderate" if now < full else "heavy"


def _kernel(operator: str | None) -> str:
    """The operator's name as kernels are called here; all of them for none."""
    if operator is None:
        return ""
    name = operator.removeprefix("aten::").partition(".")[0]
    if name in state.kernels:
        return name
    meant = {"linear": "addmm", "scaled_dot_product_attention": "bmm"}.get(name) or closest_match(name, state.kernels)
    hint = f"{meant!r}?" if meant else "the name of an operator that torch computes on MPS, e.g. 'mm'"
    raise UsageError("no kernel of the virtual GPU has this name", got=operator, try_=hint)
