"""How fast is every global batch, and where does a larger one stop to pay? Each by the rules' own plan for it.

Only one of them can be ready at a time, so they are visited there and back: what drifts meanwhile favours none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from whet.base.errors import UsageError, WhetError
from whet.base.units import show_bytes, show_seconds
from whet.measure.budget import Budget
from whet.measure.candidates import memory_limit
from whet.measure.knee import find_knee, rate_factor, rate_words
from whet.measure.progress import Watch, Watched
from whet.measure.rig import PlannedRig, Prepared, ProbeFailedError
from whet.measure.series import median_interval, per_second
from whet.plan.chosen_batch import BatchPoint, ChosenBatch, Scaling

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
_WALL = 1.08


class BatchRig(PlannedRig, Protocol):
    """A rig whose global batch can be another one."""

    def use_batch(self, size: int) -> None:
        """From here on a step has so many samples, and `plan` is the rules' for it. Nothing prepared before may step.

        Raises ProbeFailedError.
        """


def possible_batches(base: int, num_samples: int | None) -> list[int]:
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


def choose_batch(
    rig: BatchRig,
    *,
    base_rates: Sequence[float],
    scaling: Scaling,
    budget_seconds: float,
    watch: Watch | None = None,
) -> ChosenBatch:
    """The knee among batches around the rig's own, which the learning rates are meant for; the rig is left at it."""
    budget = Budget(clock=rig.clock, start=rig.clock(), seconds=budget_seconds)
    base = rig.plan.workload.global_batch_size
    sizes = possible_batches(base, rig.plan.workload.num_samples)
    visits = _Visits(rig=rig, budget=budget, watched=Watched(watch, budget))
    outer, rig.ends_at = rig.ends_at, budget.start + _WALL * budget_seconds
    rig.tick = None if watch is None else visits.watched.again
    try:
        _go_up_and_down(visits, sizes, start=max((size for size in sizes if size <= base), default=sizes[0]))
        _go_back(visits)
        rates = visits.rates
        if not rates:
            why = next(iter(visits.failures.values()), "no time for even one step")
            raise WhetError("no global batch could be measured", got=why, try_="global_batch_size=N")
        knee = find_knee(rates)
        rig.use_batch(knee.batch)
    except ProbeFailedError as error:
        raise WhetError("no global batch could be measured", got=error.reason, try_="global_batch_size=N") from None
    finally:
        rig.ends_at, rig.tick = outer, None
    factor = rate_factor(before=base, after=knee.batch, scaling=scaling)
    told = [f"{knee.words}; {len(rates)} measured in {show_seconds(budget.spent)}"]
    if knee.batch == sizes[-1]:
        told.append(f"a larger one would leave fewer than {LEAST_STEPS} steps an epoch")
    told += [f"{size} was not measured: {why}" for size, why in sorted(visits.failures.items())]
    return ChosenBatch(
        batch=knee.batch,
        base_batch=base,
        base_rates=tuple(base_rates),
        rates=tuple(rate * factor for rate in base_rates),
        factor=factor,
        scaling=scaling,
        reason="; ".join(told),
        rate_reason=rate_words(tuple(base_rates), before=base, after=knee.batch, scaling=scaling),
        points=visits.points,
        spent_seconds=budget.spent,
    )


@dataclass(slots=True)
class _Visits:
    """What was seen of each batch so far."""

    rig: BatchRig
    budget: Budget
    watched: Watched
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
            rate, (micro, peak) = per_second(size, median_interval(self.seconds[size])), self.facts[size]
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
        self.facts[size] = int(str(self.rig.plan.value("micro_batch"))), peak
        self.took[size] = max(self.took.get(size, 0.0), clock() - began)
        return True

    def _timed(self, prepared: Prepared) -> list[float]:
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


def _go_up_and_down(visits: _Visits, sizes: Sequence[int], *, start: int) -> None:
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


def _go_back(visits: _Visits) -> None:
    """Once more and again, the last ones first: what may be the knee, and what a smaller batch should not beat."""
    order = list(visits.seconds)
    for _ in range(_ROUNDS):
        order.reverse()
        for size in order:
            rates = visits.rates
            is_odd = any(rates[size] < _NEAR * rate for smaller, rate in rates.items() if smaller < size)
            if (is_odd or rates[size] >= _NEAR * visits.best) and visits.has_time(size, growth=1.0):
                visits.visit(size)


def _too_much(rig: BatchRig, needed: int | None) -> str | None:
    limit = memory_limit(rig.plan)
    if needed is None or limit is None or needed <= limit:
        return None
    return f"{show_bytes(needed)} of {show_bytes(limit)}"
