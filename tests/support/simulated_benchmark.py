"""A simulated bench for sweeps: step times and memory are functions, with faults on request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whet.autotune.candidates import plan_with
from whet.autotune.step_bench import ProbeFailedError, SettingsAgreement
from whet.machine.known import load_machine
from whet.plan.plan import Plan, make_plan
from whet.plan.workload import Workload

GB = 1024**3
WORKLOAD = Workload(
    recipe="simulated", num_parameters=1_000_000, global_batch_size=32, num_steps=1000, activation_bytes=1000
)


@dataclass
class SimulatedSweepBench:
    """`seconds(plan, now)` is what a step takes at that time on the simulated clock, `memory(plan)` its peak."""

    seconds: Callable[[Plan, float], float] = lambda plan, now: 0.1
    memory: Callable[[Plan], int] = lambda plan: GB
    plan: Plan = field(default_factory=lambda: make_plan(load_machine("linux-2core"), WORKLOAD))
    faults: Mapping[object, ProbeFailedError] = field(default_factory=dict)
    """By micro-batch: raised when it is made ready."""
    late_faults: Mapping[object, ProbeFailedError] = field(default_factory=dict)
    """By micro-batch: raised at its fifth step."""
    now: float = 0.0
    alive: int = 0
    most_alive: int = 0
    visited: list[tuple[object, int]] = field(default_factory=list)
    """Micro-batch and index of every step after preparations."""

    def clock(self) -> float:
        return self.now

    def predicted_bytes(self, settings):
        return self.memory(plan_with(self.plan, settings))

    def agreement(self, settings, *, seconds):
        self.now += 0.2
        agrees = settings["precision"] != "fp16"
        return SettingsAgreement(loss_error=1e-7, gradient_error=1e-6, bound=1e-3, agrees=agrees)

    def prepare(self, settings, *, seconds):
        plan = plan_with(self.plan, settings)
        fault = self.faults.get(plan.micro_batch)
        if fault is not None:
            raise fault
        prepared = SimulatedSweepStep(self, plan)
        wanted = 0.3 + 2 * prepared.step_seconds
        if wanted > seconds:
            self.now += seconds
            raise ProbeFailedError(f"no answer after {seconds:.1f} s; it was ended", kind="timeout")
        self.now += wanted
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        return prepared


class SimulatedSweepStep:
    preparation_seconds = 0.5

    def __init__(self, bench: SimulatedSweepBench, plan: Plan) -> None:
        self._bench, self._plan = bench, plan
        self.step_seconds = bench.seconds(plan, bench.now)
        self._number = 0

    def step(self, index: int) -> float:
        micro_batch = self._plan.micro_batch
        self._number += 1
        fault = self._bench.late_faults.get(micro_batch)
        if fault is not None and self._number >= 5:
            raise fault
        taken = self._bench.seconds(self._plan, self._bench.now)
        self._bench.now += taken
        self._bench.visited.append((micro_batch, index))
        return taken

    def check(self, *, seconds):
        pass

    def peak_bytes(self):
        return self._bench.memory(self._plan)

    def close(self) -> None:
        self._bench.alive -= 1
