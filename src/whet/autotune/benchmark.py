"""Benchmark sweeps: every value of a setting timed in pairs against the plan.

Each variant first runs alone, so that its peak memory includes nothing else. It is then timed in pairs with the plan on
the same batches, so that changes in machine speed cancel out of the ratio. The order of variants alternates between
rounds (A B C, C B A), so that no variant is always last. Values close to the plan's value come first: they are the most
useful if time runs out.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from whet.autotune.candidates import device_kind, memory_limit, plan_with
from whet.autotune.memory_model import MemoryModel
from whet.autotune.paired_timing import HOPELESS
from whet.autotune.statistics import (
    StepTimings,
    median_interval,
    rate_interval,
    ratio_interval,
    scaled_interval,
    steps_per_visit,
)
from whet.autotune.step_bench import PreparedStep, ProbeFailedError, Settings, StepBench
from whet.autotune.sweeps import Variant
from whet.base.units import format_bytes, format_plural, format_seconds
from whet.machine.facts import SystemState
from whet.plan.plan import Plan
from whet.run.bench_result import BenchInterval, BenchRow, BenchSweep, RowOutcome

# Settings that each row of a sweep shows.
_SHOWN = (
    "device", "precision", "micro_batch", "lengths", "optimizer_kernels", "threads", "workers", "data_location",
    "compile", "activation_checkpointing",
)  # fmt: skip
_ROUNDS = 2
_PAIRS_PER_ROUND = 20
# Expected maximum time of a visit relative to the longest one so far. A visit that may end after the deadline is
# skipped.
_MARGIN = 1.3
# Maximum fraction of a sweep's time for the first runs. A few values with intervals are better than many without.
_FIRST_RUN_SHARE = 0.5
# With five or more pairs, the interval of a median is exact (see `statistics.estimate`).
_MIN_PAIRS = 5
# Lower bound of the preparation timeout, for plans that prepare almost instantly.
_MIN_PREPARE_SECONDS = 5.0

# Thermal pressure levels of macOS, in increasing order.
_THERMAL_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")
# Minimum number of visits in each third of the benchmark for comparing the first third with the last.
_MIN_VISITS_PER_THIRD = 4
# CPU use of other programs above which the benchmark reports them.
_BUSY_PERCENT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkContext:
    """State shared by all sweeps of one benchmark."""

    bench: StepBench
    rule_plan: Plan
    own: Settings
    """Measured settings of the plan that differ from the rule-based plan."""
    read_system_state: Callable[[], SystemState] = SystemState
    memory: MemoryModel = field(default_factory=MemoryModel)
    plan_visits: list[float] = field(default_factory=list)
    """Step times of the plan in all sweeps, in chronological order."""
    readings: list[SystemState] = field(default_factory=list)
    """Sensor readings taken between the measurements."""
    cpu_use: list[float] = field(default_factory=list)
    """CPU use before and after the measurements, in percent of all cores."""

    def plan_with(self, settings: Settings) -> Plan:
        """Return the rule-based plan with these settings applied."""
        return plan_with(self.rule_plan, settings)


@dataclass(slots=True)
class _VariantRun:
    """The measurements of one variant in a sweep."""

    variant: Variant
    plan: Plan
    outcome: RowOutcome = "no time"
    note: str = ""
    timings: StepTimings = field(default_factory=StepTimings)
    log_ratios: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    first_seconds: float | None = None
    """Step time in the first run."""
    preparation_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the first run succeeded, so that the variant can be timed in pairs."""
        return self.outcome == "measured"

    @property
    def seconds(self) -> BenchInterval | None:
        """Step time; from the first run only, if no time was left for pairs."""
        visits = self.timings.visits or ([self.first_seconds] if self.first_seconds else [])
        return median_interval(visits) if visits and self.outcome in ("measured", "far slower") else None

    @property
    def rate(self) -> BenchInterval | None:
        """Samples per second, from this variant's own step times instead of the pairs."""
        return rate_interval(self.plan.workload.global_batch_size, self.seconds) if self.seconds else None

    def fail(self, error: ProbeFailedError, *, late: RowOutcome = "failed") -> None:
        """Record a failure. A timeout is recorded as `late`."""
        outcomes: dict[str, RowOutcome] = {"oom": "does not fit", "timeout": late}
        self.outcome, self.note = outcomes.get(error.kind, "failed"), error.reason


def measure_sweep(context: BenchmarkContext, setting: str, variants: Sequence[Variant], *, until: float) -> BenchSweep:
    """Measure all variants against the plan until the time `until` on the bench's clock. Return one row per variant."""
    runs = [_VariantRun(variant=variant, plan=context.plan_with(variant.settings)) for variant in variants]
    own = next(run for run in runs if run.variant.is_plan)
    # Start with the plan and its neighbors. Extreme values are the slowest, so they come last in case time runs out.
    in_order = sorted(runs, key=lambda run: abs(runs.index(run) - runs.index(own)))
    started = context.bench.clock()
    first_runs_end = started + _FIRST_RUN_SHARE * (until - started)
    for run in in_order:
        now = context.bench.clock()
        if run is own and now < until:
            _run_alone(context, run, seconds=until - now, late="no time")
        elif own.is_running and now + own.preparation_seconds < first_runs_end:
            limit = _prepare_limit(own)
            # A timeout shows that the variant is slow only if the sweep's deadline has not shortened the limit.
            late: RowOutcome = "far slower" if limit <= until - now else "no time"
            hopeless = HOPELESS * (own.first_seconds or math.inf)
            _run_alone(context, run, seconds=min(until - now, limit), late=late, hopeless=hopeless)
        context.readings.append(context.read_system_state())
    note = ""
    if own.is_running:
        _drop_hopeless(runs, own)
        try:
            _time_in_rounds(context, in_order[1:], own, until=until)
        except ProbeFailedError as error:
            note = f"ended early: the plan's own steps failed ({error.reason})"
    context.plan_visits.extend(own.timings.visits)
    plan_rate = own.rate
    return BenchSweep(setting=setting, rows=tuple(_row(run, plan_rate) for run in runs), note=note)


def _prepare_limit(own: _VariantRun) -> float:
    """Return the timeout for preparing a variant, in seconds.

    A variant that exceeds it cannot win. The timeout is generous, because killing the process costs a restart.
    """
    return max(_MIN_PREPARE_SECONDS, 3 * own.preparation_seconds + 2 * HOPELESS * (own.first_seconds or 0))


def _run_alone(
    context: BenchmarkContext, run: _VariantRun, *, seconds: float, late: RowOutcome, hopeless: float = math.inf
) -> None:
    """Run a variant alone, and record whether it fits, its peak memory, its step time and its agreement with fp32."""
    settings, micro_batch = run.variant.settings, run.plan.micro_batch
    predicted, limit = context.bench.predicted_bytes(settings), memory_limit(run.plan)
    needed = context.memory.estimate(settings, micro_batch=micro_batch, predicted=predicted)
    if needed is not None and limit is not None and needed > limit:
        run.outcome, run.needed_bytes = "does not fit", needed
        run.note = f"not tried: needs {format_bytes(needed)} of {format_bytes(limit)}"
        return
    try:
        prepared = context.bench.prepare(settings, seconds=seconds)
        try:
            run.first_seconds, run.preparation_seconds = prepared.step_seconds, prepared.preparation_seconds
            if run.first_seconds >= hopeless:
                # Time a second step, because the first may have been disturbed.
                run.first_seconds = min(run.first_seconds, prepared.step(0))
            run.peak_bytes = prepared.peak_bytes()
            run.outcome = "measured"
        finally:
            prepared.close()
        if not run.variant.is_plan and run.plan.precision != context.plan_with(context.own).precision:
            agreement = context.bench.agreement(settings, seconds=seconds)
            run.note = "agrees with fp32" if agreement.agrees else "gradients DIFFER from fp32's"
    except ProbeFailedError as error:
        run.fail(error, late=late)
        return
    context.memory.add(settings, micro_batch=micro_batch, measured=run.peak_bytes, predicted=predicted)
    if run.peak_bytes is not None and limit is not None and run.peak_bytes > limit:
        run.note = f"took more than the {format_bytes(limit)} planned for"


def _drop_hopeless(runs: Sequence[_VariantRun], own: _VariantRun) -> None:
    """Skip the paired timing of variants whose first run was far slower than the plan's."""
    for run in runs:
        if run.is_running and (run.first_seconds or 0) >= HOPELESS * (own.first_seconds or 0):
            run.outcome = "far slower"
            run.note = f"a step took {format_seconds(run.first_seconds or 0)}, stopped; {run.note}".rstrip("; ")


def _time_in_rounds(
    context: BenchmarkContext, others: Sequence[_VariantRun], own: _VariantRun, *, until: float
) -> None:
    """Time each variant against the plan in rounds. The plan stays prepared throughout."""
    clock = context.bench.clock
    baseline = context.bench.prepare(own.variant.settings, seconds=max(0.1, until - clock()))
    try:
        if not any(run.is_running for run in others):
            _time_alone(own, baseline, clock=clock, until=until)
        for number in range(_ROUNDS):
            waiting = [run for run in (others if number % 2 == 0 else others[::-1]) if run.is_running]
            for position, run in enumerate(waiting):
                turns_left = len(waiting) - position + (_ROUNDS - 1 - number) * len(waiting)
                # In the first round, reserve time for the minimum number of pairs, even if fewer variants get a turn.
                share = max((until - clock()) / turns_left, 0.0 if number else _min_turn_seconds(run, own))
                _take_turn(context, run, own, baseline, until=min(until, clock() + share))
                context.readings.append(context.read_system_state())
    finally:
        _close(baseline)


def _min_turn_seconds(run: _VariantRun, own: _VariantRun) -> float:
    a_pair = (own.first_seconds or 0) + (run.first_seconds or 0)
    return _MARGIN * (run.preparation_seconds + (_MIN_PAIRS + 1) * a_pair)


def _time_alone(own: _VariantRun, baseline: PreparedStep, *, clock: Callable[[], float], until: float) -> None:
    steps = steps_per_visit(baseline.step_seconds)
    for visit in range(_ROUNDS * _PAIRS_PER_ROUND):
        if clock() + _MARGIN * max(own.timings.longest, steps * baseline.step_seconds) > until:
            return
        own.timings.visit(baseline, first=visit * steps, steps=steps)


def _take_turn(
    context: BenchmarkContext, run: _VariantRun, own: _VariantRun, baseline: PreparedStep, *, until: float
) -> None:
    """Time one variant against the plan, in pairs of alternating order."""
    clock = context.bench.clock
    if clock() + _MARGIN * run.preparation_seconds > until:
        return
    try:
        prepared = context.bench.prepare(run.variant.settings, seconds=max(0.1, until - clock()))
    except ProbeFailedError as error:
        # A timeout only means that this turn was too short, not that the variant failed.
        if error.kind != "timeout":
            run.fail(error)
        return
    a_pair = baseline.step_seconds + prepared.step_seconds
    # If one side is far slower, limit the steps per visit so that the minimum number of pairs fits into the time left.
    affordable = max(1, int((until - clock()) / (_MARGIN * _MIN_PAIRS * max(a_pair, 1e-9))))
    steps = min(affordable, steps_per_visit(min(baseline.step_seconds, prepared.step_seconds)))
    try:
        for pair in range(_PAIRS_PER_ROUND):
            if clock() + _MARGIN * max(own.timings.longest + run.timings.longest, steps * a_pair) > until:
                break
            first = pair * steps
            theirs = own.timings.visit(baseline, first=first, steps=steps) if pair % 2 else None
            try:
                ours = run.timings.visit(prepared, first=first, steps=steps)
            except ProbeFailedError as error:
                # Only this variant failed. A failure of the plan propagates and ends the sweep.
                run.fail(error)
                return
            if theirs is None:
                theirs = own.timings.visit(baseline, first=first, steps=steps)
            run.log_ratios.append(math.log(ours / theirs))
    finally:
        _close(prepared)


def _close(prepared: PreparedStep) -> None:
    try:
        prepared.close()
    except ProbeFailedError:
        # The child process has ended, which released its resources.
        return


def _row(run: _VariantRun, plan_rate: BenchInterval | None) -> BenchRow:
    seconds, note = run.seconds, run.note
    if seconds is not None and seconds.repeats < _MIN_PAIRS:
        few = "one step only" if not run.timings.visits else f"{format_plural(seconds.repeats, 'repeat')} only"
        note = "; ".join(filter(None, (note, few)))
    speedup = ratio_interval(run.log_ratios) if run.log_ratios and seconds else None
    execution = {name: run.plan.settings[name].value for name in _SHOWN if name in run.plan.settings}
    if device_kind(run.plan) != "cpu":
        execution.pop("threads", None)
    return BenchRow(
        value=run.variant.value,
        is_plan=run.variant.is_plan,
        execution=execution,
        outcome=run.outcome,
        note=note or ("not measured within the time limit" if run.outcome == "no time" else ""),
        step_seconds=seconds,
        # Derived from the pairs, because a variant that ran while the machine was quiet would look too fast.
        samples_per_second=scaled_interval(speedup, plan_rate.median) if speedup and plan_rate else run.rate,
        speedup=speedup,
        peak_bytes=run.peak_bytes,
        needed_bytes=run.needed_bytes,
        slow_steps=run.timings.slow_steps if seconds else None,
        drift=run.timings.drift if seconds else None,
    )


def disturbances(context: BenchmarkContext) -> Iterator[str]:
    """Yield a description of each disturbance: throttling, other programs, memory pressure, low-power mode."""
    levels = [reading.thermal for reading in context.readings if reading.thermal is not None]
    hot = [level for level in levels if level != "nominal"]
    if hot:
        worst = max(hot, key=_THERMAL_LEVELS.index)
        yield f"throttling: thermal pressure {worst} in {len(hot)} of {len(levels)} readings"
    else:
        yield "no throttling by the sensor" if levels else "no heat sensor can be read here"
    third = len(context.plan_visits) // 3
    if third >= _MIN_VISITS_PER_THIRD:
        first, last = (median_interval(part) for part in (context.plan_visits[:third], context.plan_visits[-third:]))
        change = last.median / first.median
        # The change is significant if the confidence intervals do not overlap.
        is_significant = last.low > first.high or last.high < first.low
        cause = "heat, or other programs" if change > 1 else "other programs ended, or clocks rose"
        yield f"the plan's own steps took {change:.2f}x as long in the last third as in the first" + (
            f": {cause}" if is_significant else ", which is within the noise"
        )
    used = max(context.cpu_use, default=0.0)
    if used >= _BUSY_PERCENT:
        yield f"other programs were busy: {used:.0f} % of all cores while nothing was measured"
    if any(reading.memory_pressure in ("warn", "critical") for reading in context.readings):
        yield "memory was short"
    if any(reading.low_power_mode for reading in context.readings):
        yield "low-power mode is on, which slows the GPU"
