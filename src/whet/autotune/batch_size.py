"""The batch size finder: the smallest global batch within 10 % of the highest throughput.

Each size is measured under the rule-based plan for that size. Only one size can be prepared at a time, so the finder
measures the sizes in increasing and then in decreasing order. A drift in machine speed then favors no size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from whet.autotune.candidates import memory_limit
from whet.autotune.statistics import median_interval, rate_interval
from whet.autotune.step_bench import (
    TIMEOUT_FACTOR,
    Budget,
    PreparedStep,
    ProbeFailedError,
    ProgressCallback,
    ProgressReporter,
    StepBench,
)
from whet.base.errors import UsageError, WhetError
from whet.base.units import format_bytes, format_percent, format_seconds
from whet.plan.plan import Plan, read_plan
from whet.plan.workload import AutoBatch, BatchPoint, Scaling
from whet.run.folder import RUN_FILE, open_run

# With fewer optimizer steps per epoch, the learning rate cannot be scaled reliably.
MIN_STEPS_PER_EPOCH = 20
# Smallest size to try: smaller batches leave most of the hardware idle.
_MIN_BATCH = 8
# A smaller batch takes more optimizer steps per epoch, which is worth up to 10 % of the throughput.
_WITHIN = 0.10
# Minimum steps, minimum seconds and maximum steps of a visit. One hiccup of the machine can cover a few quick steps.
_MIN_STEPS, _MIN_SECONDS, _MAX_STEPS = 8, 0.3, 200
# Maximum share of the budget for the timed steps of one visit.
_VISIT_SHARE = 0.1
# Additional rounds over the sizes that may win: one downward, one upward.
_EXTRA_ROUNDS = 2
# Minimum gain of a larger size over the fastest one so far. Below it, throughput counts as flat.
_MIN_GAIN = 1.05
# Stop after this many sizes in a row without a gain. A single one may be due to noise.
_MAX_FLAT = 2
# Sizes below this fraction of the best throughput cannot win and are not measured again.
_NEAR_BEST = 0.8
# Expected time of the next larger size relative to the last one: twice the samples plus a margin.
_GROWTH = 2.5

# Learning rate scaling rule by optimizer class name, in lowercase.
_SCALING: Mapping[str, Scaling] = {
    "sgd": "linear",
    **dict.fromkeys(
        ("adam", "adamw", "adam_atan2", "adamax", "nadam", "radam", "sparseadam", "adafactor", "rmsprop", "adagrad"),
        "square root",
    ),
}
_SCALING_REASON: Mapping[Scaling, str] = {
    "linear": "the mean over more samples has less noise, and SGD's step is proportional to it: Goyal et al. 2017, "
    "arXiv:1706.02677",
    "square root": "Adam-like optimizers divide by the gradient's own scale, which carries the noise as its root: "
    "Malladi et al. 2022, arXiv:2205.10287",
}


def choose_batch_size(
    bench: StepBench,
    *,
    base_rates: Sequence[float],
    scaling: Scaling,
    budget_seconds: float,
    on_progress: ProgressCallback | None = None,
) -> AutoBatch:
    """Measure batch sizes around the current one and switch the bench to the best.

    `base_rates` are the learning rates for the bench's current batch size, one per parameter group. Raise WhetError
    if no size can be measured.
    """
    budget = Budget(clock=bench.clock, start=bench.clock(), seconds=budget_seconds)
    base = bench.plan.workload.global_batch_size
    sizes = batch_sizes_to_try(base, bench.plan.workload.num_samples)
    timings = _BatchTimings(bench=bench, budget=budget, progress=ProgressReporter(on_progress, budget))
    outer, bench.ends_at = bench.ends_at, budget.start + TIMEOUT_FACTOR * budget_seconds
    bench.tick = None if on_progress is None else timings.progress.tick
    try:
        _measure_up_and_down(timings, sizes, start=max((size for size in sizes if size <= base), default=sizes[0]))
        _measure_again(timings)
        rates = timings.rates
        if not rates:
            reason = next(iter(timings.failures.values()), "no time for even one step")
            raise WhetError("no global batch size could be measured", got=reason, try_="global_batch_size=N")
        size, best = smallest_fast_batch(rates)
        bench.use_batch(size)
    except ProbeFailedError as error:
        raise WhetError(
            "no global batch size could be measured", got=error.reason, try_="global_batch_size=N"
        ) from None
    finally:
        bench.ends_at, bench.tick = outer, None
    factor = lr_factor(before=base, after=size, scaling=scaling)
    reasons = [f"{_describe_choice(size, best, rates)}; {len(rates)} measured in {format_seconds(budget.spent)}"]
    if size == sizes[-1]:
        reasons.append(f"a larger one would leave fewer than {MIN_STEPS_PER_EPOCH} steps an epoch")
    reasons += [f"{failed} was not measured: {why}" for failed, why in sorted(timings.failures.items())]
    return AutoBatch(
        batch=size,
        base_batch=base,
        base_rates=tuple(base_rates),
        rates=tuple(rate * factor for rate in base_rates),
        factor=factor,
        scaling=scaling,
        reason="; ".join(reasons),
        rate_reason=describe_scaling(tuple(base_rates), before=base, after=size, scaling=scaling),
        points=timings.points,
        spent_seconds=budget.spent,
    )


def measure_batch_sizes(
    bench: StepBench, sizes: Sequence[int], *, budget_seconds: float, on_progress: ProgressCallback | None = None
) -> tuple[BatchPoint, ...]:
    """Measure batch sizes in increasing, decreasing and again increasing order while time is left.

    The point of a size that fails or does not fit holds the reason.
    """
    budget = Budget(clock=bench.clock, start=bench.clock(), seconds=budget_seconds)
    base, order = bench.plan.workload.global_batch_size, sorted(sizes)
    timings = _BatchTimings(bench=bench, budget=budget, progress=ProgressReporter(on_progress, budget))
    bench.tick = None if on_progress is None else timings.progress.tick
    try:
        for number in range(1 + _EXTRA_ROUNDS):
            for size in order if number % 2 == 0 else order[::-1]:
                if number and size in timings.failures:
                    continue
                if timings.has_time(size, growth=1.0 if number else _GROWTH):
                    timings.visit(size)
                elif not number:
                    timings.failures[size] = "no time was left"
        bench.use_batch(base)
    finally:
        bench.tick = None
    return timings.points


def recorded_batch_size(
    run: Path | None, *, plan: Plan | None = None, base_rates: Sequence[float] | None = None
) -> AutoBatch | None:
    """Return the batch size recorded in an existing run or a plan, or None if it must be measured.

    A recorded batch size is never measured again, because a resumed run must keep it. Raise UsageError if the recorded
    batch size was fixed by the user, or if `base_rates` differ from the recorded learning rates.
    """
    where = "the plan"
    if run is not None and (run / RUN_FILE).exists():
        plan, where = read_plan(open_run(run).plan, where=f"{run}/plan.json"), str(run)
    if plan is None:
        return None
    chosen, number = plan.workload.batch, plan.workload.global_batch_size
    if chosen is None:
        raise UsageError(
            f"{where} has a fixed global batch",
            got=f"global_batch_size=auto; it was made with global_batch_size={number}",
            try_=f"global_batch_size={number} to resume, or another run folder for a new run",
        )
    if base_rates is not None and tuple(base_rates) != chosen.base_rates:
        before, now = (", ".join(f"{rate:g}" for rate in rates) for rates in (chosen.base_rates, base_rates))
        raise UsageError(
            f"{where} was made with a different lr",
            got=f"lr={now}; it was given lr={before}, scaled to {chosen.rates[0]:.3g} for batch {chosen.batch}",
            try_=f"lr={before} to resume, or another run folder for a new run",
        )
    return chosen


def batch_sizes_to_try(base: int, num_samples: int | None) -> list[int]:
    """Return the batch size together with its repeated halves and doubles that leave enough steps per epoch.

    Raise UsageError if fewer than two sizes remain.

    >>> batch_sizes_to_try(32, 5_280)
    [8, 16, 32, 64, 128, 256]
    """
    if num_samples is None:
        raise UsageError(
            "global_batch_size=auto needs data of a known length",
            got="data without a length",
            try_="global_batch_size=N",
        )
    largest = num_samples // MIN_STEPS_PER_EPOCH
    smallest = base
    while smallest % 2 == 0 and smallest // 2 >= _MIN_BATCH:
        smallest //= 2
    sizes = [smallest << shift for shift in range(21) if smallest << shift <= largest]
    if len(sizes) < 2:
        raise UsageError(
            "too few samples to choose a global batch",
            got=f"{num_samples:,} samples: {MIN_STEPS_PER_EPOCH} steps an epoch allow a batch of {largest} at most",
            try_="global_batch_size=N",
        )
    return sizes


def smallest_fast_batch(rates: Mapping[int, float]) -> tuple[int, int]:
    """Return the smallest batch size within 10 % of the best throughput, and the fastest batch size.

    `rates` maps batch sizes to samples per second.

    >>> smallest_fast_batch({8: 400.0, 16: 700.0, 32: 920.0, 64: 1000.0})
    (32, 64)
    """
    usable = {batch: rate for batch, rate in rates.items() if batch > 0 and math.isfinite(rate) and rate > 0}
    if not usable:
        raise UsageError("no batch size could be measured", got=dict(rates), try_="global_batch_size=N")
    # Prefer the smaller batch on a tie.
    best = max(usable, key=lambda batch: (usable[batch], -batch))
    return min(batch for batch, rate in usable.items() if rate >= (1 - _WITHIN) * usable[best]), best


def _describe_choice(size: int, best: int, rates: Mapping[int, float]) -> str:
    if size == best:
        return f"{size}: the fastest of those measured, and no smaller one comes within 10 % of it"
    return f"{size}: the smallest within 10 % of the fastest ({format_percent(rates[size] / rates[best])} of {best})"


# --- Learning rate ---------------------------------------------------------------------------------------------------


def lr_scaling(optimizer: str) -> Scaling:
    """Return how the learning rate of an optimizer scales with the batch size.

    Raise UsageError for an unknown optimizer.

    >>> lr_scaling("AdamW"), lr_scaling("SGD")
    ('square root', 'linear')
    """
    scaling = _SCALING.get(optimizer.lower())
    if scaling is None:
        raise UsageError(
            "there is no learning rate scaling rule for this optimizer",
            got=f"global_batch_size=auto with {optimizer}",
            try_="global_batch_size=N, with a learning rate for it",
        )
    return scaling


def lr_factor(*, before: int, after: int, scaling: Scaling) -> float:
    """Return the factor by which to multiply the learning rate when the global batch size changes."""
    return after / before if scaling == "linear" else math.sqrt(after / before)


def scale_learning_rate(rate: float, *, before: int, after: int, scaling: Scaling) -> tuple[float, str]:
    """Return the learning rate for another global batch size, and a description of how it was computed.

    >>> scale_learning_rate(0.1, before=32, after=128, scaling="square root")
    (0.2, 'lr 0.1 at batch 32 becomes 0.2 at batch 128 (times the square root of 4)')
    """
    scaled, ratio = rate * lr_factor(before=before, after=after, scaling=scaling), after / before
    times = f"times {ratio:g}" if scaling == "linear" else f"times the square root of {ratio:g}"
    return scaled, f"lr {rate:g} at batch {before} becomes {scaled:.3g} at batch {after} ({times})"


def describe_scaling(rates: tuple[float, ...], *, before: int, after: int, scaling: Scaling) -> str:
    """Describe how the learning rates are scaled to the batch size, and why."""
    if before == after:
        return f"lr stays {', '.join(f'{rate:g}' for rate in rates)}: it is meant for this batch"
    steps = [scale_learning_rate(rate, before=before, after=after, scaling=scaling)[1] for rate in dict.fromkeys(rates)]
    return f"{'; '.join(steps)}: {_SCALING_REASON[scaling]}"


# --- Measuring -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _BatchTimings:
    """Measures step times by batch size with a bench, and stores them."""

    bench: StepBench
    budget: Budget
    progress: ProgressReporter
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of each timed step, by batch size in the order of the first visit."""
    visit_seconds: dict[int, float] = field(default_factory=dict)
    """Seconds of the longest visit to each batch size, including preparation."""
    failures: dict[int, str] = field(default_factory=dict)
    facts: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    """Micro-batch size and peak bytes, by batch size."""

    @property
    def rates(self) -> dict[int, float]:
        """Samples per second by batch size."""
        return {size: size / median(seconds) for size, seconds in self.seconds.items()}

    @property
    def best_rate(self) -> float:
        """Samples per second of the fastest batch size; 0 before the first measurement."""
        return max(self.rates.values(), default=0.0)

    @property
    def points(self) -> tuple[BatchPoint, ...]:
        """The result for each batch size, including sizes that failed."""
        points = []
        for size in sorted({*self.seconds, *self.failures}):
            if size in self.failures:
                points.append(BatchPoint(batch=size, note=self.failures[size]))
                continue
            rate, (micro_batch, peak) = rate_interval(size, median_interval(self.seconds[size])), self.facts[size]
            points.append(
                BatchPoint(
                    batch=size,
                    samples_per_second=rate.median,
                    low=rate.low,
                    high=rate.high,
                    confidence=rate.confidence,
                    steps=rate.repeats,
                    micro_batch=micro_batch,
                    peak_bytes=peak,
                )
            )
        return tuple(points)

    def visit(self, size: int) -> bool:
        """Time steps of one batch size. On failure, record the reason and return False."""
        began = self.bench.clock()
        self.progress.begin(f"global batch {size}")
        try:
            self.bench.use_batch(size)
            # Check the predicted memory first: an out-of-memory error costs a restart of the bench process.
            excess = self._excess(self.bench.predicted_bytes({}))
            if excess is not None:
                return self._fail(size, f"it would need {excess}")
            prepared = self.bench.prepare({}, seconds=max(0.1, self.budget.left))
            try:
                seconds = self._time_steps(prepared)
                peak = prepared.peak_bytes()
            finally:
                prepared.close()
        except ProbeFailedError as error:
            return self._fail(size, f"{error.kind}, {error.reason}")
        excess = self._excess(peak)
        if excess is not None:
            return self._fail(size, f"it took {excess}")
        self.seconds.setdefault(size, []).extend(seconds)
        self.facts[size] = self.bench.plan.micro_batch, peak
        self.visit_seconds[size] = max(self.visit_seconds.get(size, 0.0), self.bench.clock() - began)
        return True

    def has_time(self, size: int, *, growth: float) -> bool:
        """Return whether the budget allows a visit that takes `growth` times as long as the nearest visited size."""
        if not self.visit_seconds:
            return True
        nearest = min(self.visit_seconds, key=lambda visited: abs(visited - size))
        return growth * self.visit_seconds[nearest] <= self.budget.left

    def _time_steps(self, prepared: PreparedStep) -> list[float]:
        clock, began = self.bench.clock, self.bench.clock()
        # Take at least three timings of slow steps, even if that exceeds the share of one visit.
        ends_at = min(self.budget.end, began + max(3 * prepared.step_seconds, _VISIT_SHARE * self.budget.seconds))
        seconds: list[float] = []
        while not seconds or (
            clock() + seconds[-1] < ends_at
            and len(seconds) < _MAX_STEPS
            and (len(seconds) < _MIN_STEPS or clock() - began < _MIN_SECONDS)
        ):
            seconds.append(max(1e-9, prepared.step(len(seconds))))
            self.progress.tick()
        return seconds

    def _fail(self, size: int, reason: str) -> bool:
        # Keep the times of an earlier successful visit.
        if size not in self.seconds:
            self.failures[size] = reason
        return False

    def _excess(self, needed: int | None) -> str | None:
        limit = memory_limit(self.bench.plan)
        if needed is None or limit is None or needed <= limit:
            return None
        return f"{format_bytes(needed)} of {format_bytes(limit)}"


def _measure_up_and_down(timings: _BatchTimings, sizes: Sequence[int], *, start: int) -> None:
    """Visit sizes upward from `start` until throughput is flat, then downward until it is clearly lower."""
    num_flat = 0
    for size in (size for size in sizes if size >= start):
        best = timings.best_rate
        if not timings.has_time(size, growth=_GROWTH):
            timings.failures[size] = "no time was left"
            break
        if not timings.visit(size):
            break
        num_flat = num_flat + 1 if timings.rates[size] < _MIN_GAIN * best else 0
        if num_flat == _MAX_FLAT:
            break
    for size in (size for size in reversed(sizes) if size < start):
        if not timings.has_time(size, growth=1.0) or not timings.visit(size):
            break
        if timings.rates[size] < _NEAR_BEST * timings.best_rate:
            break


def _measure_again(timings: _BatchTimings) -> None:
    """Revisit sizes that may win or whose timing is implausible, in reverse order and back."""
    order = list(timings.seconds)
    for _ in range(_EXTRA_ROUNDS):
        order.reverse()
        for size in order:
            rates = timings.rates
            # Throughput rarely falls as the batch grows, so a size slower than a smaller one was probably disturbed.
            is_odd = any(rates[size] < _NEAR_BEST * rate for smaller, rate in rates.items() if smaller < size)
            is_near = rates[size] >= _NEAR_BEST * timings.best_rate
            if (is_odd or is_near) and timings.has_time(size, growth=1.0):
                timings.visit(size)
