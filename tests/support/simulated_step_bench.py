"""A simulated workload on a simulated machine with its own clock, memory and noise. Nothing is computed."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from whet.autotune.candidates import plan_with
from whet.autotune.step_bench import FailureKind, LaunchFacts, ProbeFailedError, Settings, SettingsAgreement
from whet.plan.plan import Plan, make_plan

Noise = Callable[[float, random.Random], float]
"""By how much a step is longer than it should be, at a moment on the clock."""


def quiet(_now: float, _random: random.Random) -> float:
    return 1.0


def gaussian(share: float) -> Noise:
    return lambda _now, draw: max(0.5, draw.gauss(1.0, share))


def heavy_tailed(_now: float, draw: random.Random) -> float:
    """One step in ten is hit by something that may last for many steps' worth of time."""
    return draw.lognormvariate(0, 0.02) * (1 + (min(20.0, draw.paretovariate(1.2)) - 1 if draw.random() < 0.1 else 0))


def drifting(now: float, draw: random.Random) -> float:
    """A machine that gets hot: half as slow again within 20 seconds, and on."""
    return draw.lognormvariate(0, 0.01) * (1 + 0.025 * now)


def periodic(period: float, height: float = 0.3) -> Noise:
    """Something that takes a part of the machine every `period` seconds, half of the time."""
    return lambda now, draw: draw.lognormvariate(0, 0.01) * (1 + (height if now % period < period / 2 else 0))


@dataclass
class SimulatedPreparedStep:
    bench: "SimulatedStepBench"
    settings: Settings
    preparation_seconds: float
    step_seconds: float
    is_closed: bool = False

    @property
    def launches(self) -> LaunchFacts:
        return self.bench.launches(self.bench.planned(self.settings))

    def step(self, index: int) -> float:
        assert not self.is_closed, "a step after the end"
        self.bench._recover()
        return self.bench.make_step(self.settings, index)

    def check(self, *, seconds: float) -> None:
        takes = self.bench.check_seconds
        self.bench.now += min(takes, seconds)
        if takes > seconds:
            self.bench._is_down = True
            raise ProbeFailedError(f"no answer within {seconds:.1f} s", kind="timeout")
        if not self.bench.compiles_correctly(self.bench.planned(self.settings)):
            raise ProbeFailedError("the loss differs from the eager model", kind="error")

    def peak_bytes(self) -> int | None:
        return self.bench.bytes(self.bench.planned(self.settings))

    def close(self) -> None:
        assert not self.is_closed, "closed twice"
        self.is_closed = True
        self.bench.alive -= 1


@dataclass
class SimulatedStepBench:
    plan: Plan
    seconds: Callable[[Plan], float]
    """The true duration of a step."""
    noise: Noise = quiet
    preparation: Callable[[Plan], float] = lambda _plan: 0.2
    bytes: Callable[[Plan], int | None] = lambda _plan: None
    predicted: Callable[[Plan], int | None] = lambda _plan: None
    agrees: Callable[[Plan], bool] = lambda _plan: True
    compiles_correctly: Callable[[Plan], bool] = lambda _plan: True
    agreement_seconds: float = 0.1
    check_seconds: float = 0.0
    failure: Callable[[Plan], FailureKind | None] = lambda _plan: None
    """How preparing fails; a "timeout" uses all the seconds it was given."""
    launches: Callable[[Plan], LaunchFacts] = lambda _plan: LaunchFacts()
    ends_at: float | None = None
    tick: Callable[[], None] | None = None
    recovery_seconds: float = 0.0
    """Extra time after a failure, as if a process had to be restarted."""
    batch_spread: float = 0.2
    seed: int = 0
    now: float = 0.0
    alive: int = 0
    most_alive: int = 0
    prepared: list[Settings] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._is_down = False
        self._plans: dict[object, Plan] = {}
        self._batches = [math.exp(self._draw.gauss(0, self.batch_spread)) for _ in range(997)]

    def planned(self, settings: Settings) -> Plan:
        key = frozenset(settings.items())
        if key not in self._plans:
            self._plans[key] = plan_with(self.plan, settings)
        return self._plans[key]

    def clock(self) -> float:
        return self.now

    def use_batch(self, size: int) -> None:
        assert self.alive == 0, "another batch while something is ready"
        workload = self.plan.workload
        changed = {"global_batch_size": size, "num_steps": 3 * -(-(workload.num_samples or 1) // size)}
        self.plan = make_plan(self.plan.machine, workload.model_copy(update=changed), overrides=self.plan.overrides)
        self._plans.clear()

    def _recover(self) -> None:
        if self._is_down:
            self._is_down = False
            self.now += self.recovery_seconds

    def predicted_bytes(self, settings: Settings) -> int | None:
        return self.predicted(self.planned(settings))

    def agreement(self, settings: Settings, *, seconds: float) -> SettingsAgreement:
        if self.agreement_seconds > seconds:
            self.now += seconds
            raise ProbeFailedError("no time", kind="timeout")
        self.now += self.agreement_seconds
        agrees = self.agrees(self.planned(settings))
        return SettingsAgreement(agrees=agrees, loss_error=0.001 if agrees else 0.4, gradient_error=0.002, bound=0.02)

    def prepare(self, settings: Settings, *, seconds: float) -> SimulatedPreparedStep:
        self._recover()
        plan, began = self.planned(settings), self.now
        self.prepared.append(dict(settings))
        kind, now = self.failure(plan), self.now
        step = self.make_step(settings, 0)
        self.now = now
        if kind == "timeout" or self.preparation(plan) + step > seconds:
            self.now += seconds
            self._is_down = True
            raise ProbeFailedError(f"no answer within {seconds:.1f} s", kind="timeout")
        if kind is not None:
            self.now += min(seconds, self.preparation(plan))
            self._is_down = kind != "unsupported"
            raise ProbeFailedError("simulated", kind=kind)
        self.now += self.preparation(plan) + step
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        return SimulatedPreparedStep(self, dict(settings), self.now - began, step)

    def make_step(self, settings: Settings, index: int) -> float:
        true = self.seconds(self.planned(settings)) * self._batches[index % len(self._batches)]
        taken = true * self.noise(self.now, self._draw)
        self.now += taken
        self.steps += 1
        return taken


GRID: dict[str, list] = {
    "threads": [1, 2],
    "precision": ["fp32", "bf16"],
    "micro_batch": [1, 2, 4, 8, 16, 32],
    "lengths": ["packed", "sorted", "bucketed", "fixed"],
    "optimizer_kernels": ["fused", "foreach", "loop"],
    "compile": ["off", "blocks", "on"],
}


def landscape(seed: int):
    """Random factors; each precision has a micro-batch that suits it: kernels cost time, and so do caches."""
    draw = random.Random(seed)
    factor = {(n, v): draw.choice([1, 1, 1.03, 1.1, 1.3, 0.9, 0.7]) for n, values in GRID.items() for v in values}
    launch = {"fp32": draw.uniform(0.1, 2), "bf16": draw.uniform(0.1, 2)}
    cache = {"fp32": 0.8, "bf16": 0.1}

    def seconds(plan: Plan) -> float:
        micro, precision = plan.micro_batch, plan.precision
        pieces = 1 + launch[precision] * 4 / micro + cache[precision] * (micro / 32) ** 2
        total = 0.03 * pieces * factor["precision", precision]
        for name in ("threads", "lengths", "optimizer_kernels", "compile"):
            total *= factor[name, plan.settings[name].value]
        return total

    return seconds
