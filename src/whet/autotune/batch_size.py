"""The batch size finder: the smallest global batch within 10 % of the highest throughput."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Protocol

from whet.autotune.candidates import memory_limit
from whet.autotune.statistics import median_interval, rate_interval
from whet.autotune.step_bench import (
    Budget,
    PlannedStepBench,
    PreparedStep,
    ProbeFailedError,
    ProgressCallback,
    ProgressReporter,
)
from whet.base.errors import UsageError, WhetError
from whet.base.units import format_bytes, format_percent, format_seconds
from whet.plan.plan import Plan, read_plan
from whet.plan.workload import AutoBatch, BatchPoint, Scaling
from whet.run.folder import RUN_FILE, open_run

_WITHIN = 0.10
_WHY: Mapping[Scaling, str] = {
    "linear": "the noise of a mean over more samples is smaller, and SGD takes its steps in proportion: Goyal et al. "
    "2017, arXiv:1706.02677",
    "square root": "Adam and its kin divide by the gradient's own size, which holds the noise as its root: Malladi et "
    "al. 2022, arXiv:2205.10287",
}

_SCALING: Mapping[str, Scaling] = {
    "sgd": "linear",
    **dict.fromkeys(
        (
            "adam",
            "adamw",
            "adam_atan2",
            "adamax",
            "nadam",
            "radam",
            "sparseadam",
            "adafactor",
            "rmsprop",
            "adagrad",
        ),
        "square root",
    ),
}


def lr_scaling(optimizer: str) -> Scaling:
    """How an optimizer's learning rate goes with the batch; refused where nobody knows.

    >>> scaling_of("AdamW"), scaling_of("SGD")
    ('square root', 'linear')
    """
    found = _SCALING.get(optimizer.lower())
    if found is None:
        raise UsageError(
            "how this optimizer's learning rate goes with the batch is not known",
            got=f"global_batch_size=auto with {optimizer}",
            try_="global_batch_size=N, with a learning rate for it",
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizeChoice:
    """The smallest batch that is nearly as fast as the fastest one."""

    batch: int
    samples_per_second: float
    best_batch: int
    best_samples_per_second: float

    @property
    def words(self) -> str:
        """One line."""
        if self.batch == self.best_batch:
            return f"{self.batch}: the fastest of those measured, and none smaller comes within 10 % of it"
        share = format_percent(self.samples_per_second / self.best_samples_per_second)
        return f"{self.batch}: the smallest within 10 % of the fastest ({share} of {self.best_batch})"


def smallest_fast_batch(points: Mapping[int, float]) -> BatchSizeChoice:
    """From samples per second by batch size.

    >>> find_knee({8: 400.0, 16: 700.0, 32: 920.0, 64: 1000.0}).batch
    32
    """
    usable = {batch: rate for batch, rate in points.items() if batch > 0 and math.isfinite(rate) and rate > 0}
    if not usable:
        raise UsageError("no batch size could be measured", got=dict(points), try_="global_batch_size=N")
    best = max(usable, key=lambda batch: (usable[batch], -batch))
    batch = min(batch for batch, rate in usable.items() if rate >= (1 - _WITHIN) * usable[best])
    return BatchSizeChoice(
        batch=batch, samples_per_second=usable[batch], best_batch=best, best_samples_per_second=usable[best]
    )


def lr_factor(*, before: int, after: int, scaling: Scaling) -> float:
    """What a learning rate is multiplied by for another global batch."""
    return after / before if scaling == "linear" else math.sqrt(after / before)


def scale_learning_rate(rate: float, *, before: int, after: int, scaling: Scaling) -> tuple[float, str]:
    """The learning rate for another global batch, and how it came about.

    >>> scale_learning_rate(0.1, before=32, after=128, scaling="square root")
    (0.2, 'lr 0.1 at batch 32 becomes 0.2 at batch 128 (times the square root of 4)')
    """
    scaled, larger = rate * lr_factor(before=before, after=after, scaling=scaling), after / before
    times = f"times {larger:g}" if scaling == "linear" else f"times the square root of {larger:g}"
    return scaled, f"lr {rate:g} at batch {before} becomes {scaled:.3g} at batch {after} ({times})"


def describe_scaling(rates: tuple[float, ...], *, before: int, after: int, scaling: Scaling) -> str:
    """How learning rates are scaled, and why so."""
    if before == after:
        return f"lr stays {', '.join(f'{rate:g}' for rate in rates)}: it is meant for this batch"
    told = [scale_learning_rate(rate, before=before, after=after, scaling=scaling)[1] for rate in dict.fromkeys(rates)]
    return f"{'; '.join(told)}: {_WHY[scaling]}"


LEAST_STEPS = 20
"""Optimizer steps of an epoch: with fewer the learning rate has nothing to go by."""
_LEAST_BATCH = 8
_STEPS, _SECONDS, _MOST_STEPS = 8, 0.3, 200
"""A visit lasts so many steps and so long: a few quick steps may fall into one hiccup of the machine."""
_VISIT_SHARE = 0.1
"""Of the budget, for the timed steps of one visit at most."""
_ROUNDS = 2
"""After the first one."""
_GAIN = 1.05
_MOST_FLAT = 2
"""Batches in a row that gain less end the way up."""
_NEAR = 0.8
"""What is slower than this share of the best cannot be the knee, and is not visited again."""
_GROWTH = 2.5
"""The next larger batch may take this much longer than the last one did."""
_TIMEOUT_FACTOR = 1.08


class BatchStepBench(PlannedStepBench, Protocol):
    """A rig whose global batch can be another one."""

    def use_batch(self, size: int) -> None:
        """From here on a step has so many samples, and `plan` is the rules' for it. Nothing prepared before may step.

        Raises ProbeFailedError.
        """


def batch_sizes_to_try(base: int, num_samples: int | None) -> list[int]:
    """Halves and doubles of a batch that leave enough steps in an epoch; refused where there is nothing to choose from.

    >>> possible_batches(32, 5_280)
    [8, 16, 32, 64, 128, 256]
    """
    if num_samples is None:
        raise UsageError(
            "global_batch_size=auto needs data of a known length",
            got="data without a length",
            try_="global_batch_size=N",
        )
    most = num_samples // LEAST_STEPS
    smallest = base
    while smallest % 2 == 0 and smallest // 2 >= _LEAST_BATCH:
        smallest //= 2
    found = [smallest << shift for shift in range(21) if smallest << shift <= most]
    if len(found) < 2:
        raise UsageError(
            "too few samples to choose a global batch from",
            got=f"{num_samples:,} samples: for {LEAST_STEPS} steps an epoch a batch may have {most} at most",
            try_="global_batch_size=N",
        )
    return found


def choose_batch_size(
    rig: BatchStepBench,
    *,
    base_rates: Sequence[float],
    scaling: Scaling,
    budget_seconds: float,
    watch: ProgressCallback | None = None,
) -> AutoBatch:
    """The knee among batches around the rig's own, which the learning rates are meant for; the rig is left at it."""
    budget = Budget(clock=rig.clock, start=rig.clock(), seconds=budget_seconds)
    base = rig.plan.workload.global_batch_size
    sizes = batch_sizes_to_try(base, rig.plan.workload.num_samples)
    visits = _BatchTimings(rig=rig, budget=budget, watched=ProgressReporter(watch, budget))
    outer, rig.ends_at = rig.ends_at, budget.start + _TIMEOUT_FACTOR * budget_seconds
    rig.tick = None if watch is None else visits.watched.again
    try:
        _go_up_and_down(visits, sizes, start=max((size for size in sizes if size <= base), default=sizes[0]))
        _go_back(visits)
        rates = visits.rates
        if not rates:
            why = next(iter(visits.failures.values()), "no time for even one step")
            raise WhetError("no global batch could be measured", got=why, try_="global_batch_size=N")
        knee = smallest_fast_batch(rates)
        rig.use_batch(knee.batch)
    except ProbeFailedError as error:
        raise WhetError("no global batch could be measured", got=error.reason, try_="global_batch_size=N") from None
    finally:
        rig.ends_at, rig.tick = outer, None
    factor = lr_factor(before=base, after=knee.batch, scaling=scaling)
    told = [f"{knee.words}; {len(rates)} measured in {format_seconds(budget.spent)}"]
    if knee.batch == sizes[-1]:
        told.append(f"a larger one would leave fewer than {LEAST_STEPS} steps an epoch")
    told += [f"{size} was not measured: {why}" for size, why in sorted(visits.failures.items())]
    return AutoBatch(
        batch=knee.batch,
        base_batch=base,
        base_rates=tuple(base_rates),
        rates=tuple(rate * factor for rate in base_rates),
        factor=factor,
        scaling=scaling,
        reason="; ".join(told),
        rate_reason=describe_scaling(tuple(base_rates), before=base, after=knee.batch, scaling=scaling),
        points=visits.points,
        spent_seconds=budget.spent,
    )


@dataclass(slots=True)
class _BatchTimings:
    """What was seen of each batch so far."""

    rig: BatchStepBench
    budget: Budget
    watched: ProgressReporter
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """Of single steps, in the order in which the batches were first visited."""
    took: dict[int, float] = field(default_factory=dict)
    """A whole visit, the longest."""
    failures: dict[int, str] = field(default_factory=dict)
    facts: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """Micro-batch and peak of memory."""

    @property
    def rates(self) -> dict[int, float]:
        return {size: size / median(seconds) for size, seconds in self.seconds.items()}

    @property
    def best(self) -> float:
        return max(self.rates.values(), default=0.0)

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        found = []
        for size in sorted({*self.seconds, *self.failures}):
            if size in self.failures:
                found.append(BatchPoint(batch=size, words=self.failures[size]))
                continue
            rate, (micro, peak) = rate_interval(size, median_interval(self.seconds[size])), self.facts[size]
            found.append(
                BatchPoint(
                    batch=size,
                    samples_per_second=rate.middle,
                    low=rate.low,
                    high=rate.high,
                    confidence=rate.confidence,
                    steps=rate.repeats,
                    micro_batch=micro,
                    peak_bytes=peak,
                )
            )
        return tuple(found)

    def visit(self, size: int) -> bool:
        """Times some of its steps; False where that failed, which is written down."""
        clock, began = self.rig.clock, self.rig.clock()
        self.watched.begin(f"global batch {size}")
        try:
            self.rig.use_batch(size)
            excess = _too_much(self.rig, self.rig.predicted_bytes({}))
            if excess is not None:
                return self._fail(size, f"it would need {excess}")
            prepared = self.rig.prepare({}, seconds=max(0.1, self.budget.left))
            try:
                found = self._timed(prepared)
                peak = prepared.peak_bytes()
            finally:
                prepared.close()
        except ProbeFailedError as error:
            return self._fail(size, f"{error.kind}, {error.reason}")
        excess = _too_much(self.rig, peak)
        if excess is not None:
            return self._fail(size, f"it took {excess}")
        self.seconds.setdefault(size, []).extend(found)
        self.facts[size] = int(str(self.rig.plan.micro_batch)), peak
        self.took[size] = max(self.took.get(size, 0.0), clock() - began)
        return True

    def _timed(self, prepared: PreparedStep) -> list[float]:
        clock, began = self.rig.clock, self.rig.clock()
        ends_at = min(self.budget.end, began + max(3 * prepared.step_seconds, _VISIT_SHARE * self.budget.seconds))
        found: list[float] = []
        while not found or (
            clock() + found[-1] < ends_at
            and len(found) < _MOST_STEPS
            and (len(found) < _STEPS or clock() - began < _SECONDS)
        ):
            found.append(max(1e-9, prepared.step(len(found))))
            self.watched.again()
        return found

    def _fail(self, size: int, why: str) -> bool:
        if size not in self.seconds:
            self.failures[size] = why
        return False

    def has_time(self, size: int, *, growth: float) -> bool:
        """Whether a visit that takes so much longer than the nearest one did would still end in time."""
        if not self.took:
            return True
        nearest = min(self.took, key=lambda seen: abs(seen - size))
        return growth * self.took[nearest] <= self.budget.left


def _go_up_and_down(visits: _BatchTimings, sizes: Sequence[int], *, start: int) -> None:
    flat = 0
    for size in (size for size in sizes if size >= start):
        best = visits.best
        if not visits.has_time(size, growth=_GROWTH):
            visits.failures[size] = "no time was left"
            break
        if not visits.visit(size):
            break
        flat = flat + 1 if visits.rates[size] < _GAIN * best else 0
        if flat == _MOST_FLAT:
            break
    for size in (size for size in reversed(sizes) if size < start):
        if not visits.has_time(size, growth=1.0) or not visits.visit(size) or visits.rates[size] < _NEAR * visits.best:
            break


def _go_back(visits: _BatchTimings) -> None:
    """Once more and again, the last ones first: what may be the knee, and what a smaller batch should not beat."""
    order = list(visits.seconds)
    for _ in range(_ROUNDS):
        order.reverse()
        for size in order:
            rates = visits.rates
            is_odd = any(rates[size] < _NEAR * rate for smaller, rate in rates.items() if smaller < size)
            if (is_odd or rates[size] >= _NEAR * visits.best) and visits.has_time(size, growth=1.0):
                visits.visit(size)


def _too_much(rig: BatchStepBench, needed: int | None) -> str | None:
    limit = memory_limit(rig.plan)
    if needed is None or limit is None or needed <= limit:
        return None
    return f"{format_bytes(needed)} of {format_bytes(limit)}"


def recorded_batch_size(
    run: Path | None, *, plan: Plan | None = None, base_rates: Sequence[float] | None = None
) -> AutoBatch | None:
    """What a run that is there was started with, else what a plan was measured for; None where it must be found.

    `base_rates` are those that are given now, if they must be the same.
    """
    where = "the plan"
    if run is not None and (run / RUN_FILE).exists():
        plan, where = read_plan(open_run(run).plan, where=f"{run}/plan.json"), str(run)
    if plan is None:
        return None
    chosen, number = plan.workload.batch, plan.workload.global_batch_size
    if chosen is None:
        raise UsageError(
            f"{where} has a global batch of its own",
            got=f"global_batch_size=auto; it was made with global_batch_size={number}",
            try_=f"global_batch_size={number} to go on, or another run folder for a new run",
        )
    if base_rates is not None and tuple(base_rates) != chosen.base_rates:
        before, now = (", ".join(f"{rate:g}" for rate in said) for said in (chosen.base_rates, base_rates))
        raise UsageError(
            f"{where} was made with another lr",
            got=f"lr={now}; it was given lr={before}, and has {chosen.rates[0]:.3g} at batch {chosen.batch}",
            try_=f"lr={before} to go on, or another run folder for a new run",
        )
    return chosen
