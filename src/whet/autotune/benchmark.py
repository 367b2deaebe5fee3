"""Benchmark sweeps: every value of a setting timed in pairs against the plan.

Each variant runs alone first, so that its peak memory is its own. It is then timed in pairs with the plan on the same
batches, so that the ratio holds whatever the machine does meanwhile. Rounds go there and back (A B C, C B A), so that
no variant is always last; the plan's neighbors come first, because they benefit most from limited time.
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
from whet.base.units import format_bytes, format_seconds
from whet.machine.facts import Conditions
from whet.plan.plan import Plan
from whet.run.bench_result import BenchInterval, BenchRow, BenchSweep, RowOutcome

_SHOWN = (
    "device", "precision", "micro_batch", "lengths", "optimizer_kernels", "threads", "workers", "data_location",
    "compile", "activation_checkpointing",
)  # fmt: skip
_ROUNDS = 2
_PAIRS_PER_ROUND = 20
# A visit may take this much longer than the longest before it; one that could end too late is not begun.
_MARGIN = 1.3
# Of a sweep's time, for the first run of each variant: a few values with intervals are better than many without.
_FIRST_RUN_SHARE = 0.5
# For a meaningful interval.
_MIN_PAIRS = 5
_MIN_PREPARE_SECONDS = 5.0

_THERMAL_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_MIN_VISITS_PER_THIRD = 4
_BUSY_PERCENT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkContext:
    """What all sweeps of one benchmark share."""

    bench: StepBench
    rule_plan: Plan
    own: Settings
    """The measured settings of the plan that differ from the rules."""
    read_conditions: Callable[[], Conditions] = Conditions
    memory: MemoryModel = field(default_factory=MemoryModel)
    plan_visits: list[float] = field(default_factory=list)
    """The plan's own step times, from the first sweep to the last."""
    readings: list[Conditions] = field(default_factory=list)
    """Sensor readings in between."""
    cpu_use: list[float] = field(default_factory=list)
    """Percent of all cores, before and after, while nothing was measured."""

    def plan_with(self, settings: Settings) -> Plan:
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
    """One step of the first run."""
    preparation_seconds: float = 0.0

    @property
    def is_running(self) -> bool:
        return self.outcome == "measured"

    @property
    def seconds(self) -> BenchInterval | None:
        """One step; from the first run alone if there was no time for more."""
        visits = self.timings.visits or ([self.first_seconds] if self.first_seconds else [])
        return median_interval(visits) if visits and self.outcome in ("measured", "far slower") else None

    @property
    def rate(self) -> BenchInterval | None:
        """Samples per second by its own times alone."""
        return rate_interval(self.plan.workload.global_batch_size, self.seconds) if self.seconds else None

    def fail(self, error: ProbeFailedError, *, late: RowOutcome = "failed") -> None:
        outcomes: dict[str, RowOutcome] = {"oom": "does not fit", "timeout": late}
        self.outcome, self.note = outcomes.get(error.kind, "failed"), error.reason


def measure_sweep(context: BenchmarkContext, setting: str, variants: Sequence[Variant], *, until: float) -> BenchSweep:
    """Return one row for each variant, before `until` on the bench's clock; the plan's own is the baseline."""
    runs = [_VariantRun(variant=variant, plan=context.plan_with(variant.settings)) for variant in variants]
    own = next(run for run in runs if run.variant.is_plan)
    # The plan, then its neighbors; the extremes are the slowest, and time may run out.
    in_order = sorted(runs, key=lambda run: abs(runs.index(run) - runs.index(own)))
    started = context.bench.clock()
    first_runs_end = started + _FIRST_RUN_SHARE * (until - started)
    for run in in_order:
        now = context.bench.clock()
        if run is own and now < until:
            _run_alone(context, run, seconds=until - now, late="no time")
        elif own.is_running and now + own.preparation_seconds < first_runs_end:
            limit = _prepare_limit(own)
            late: RowOutcome = "far slower" if limit <= until - now else "no time"
            hopeless = HOPELESS * (own.first_seconds or math.inf)
            _run_alone(context, run, seconds=min(until - now, limit), late=late, hopeless=hopeless)
        context.readings.append(context.read_conditions())
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
    """Return the seconds for preparing a variant: one that needs longer is hopeless, and killing it costs a restart."""
    return max(_MIN_PREPARE_SECONDS, 3 * own.preparation_seconds + 2 * HOPELESS * (own.first_seconds or 0))


def _run_alone(
    context: BenchmarkContext, run: _VariantRun, *, seconds: float, late: RowOutcome, hopeless: float = math.inf
) -> None:
    """Prepare a variant alone: whether it fits, its peak memory, the time of a step and its agreement with fp32."""
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
                # A second try, because one hiccup must not decide.
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
    for run in runs:
        if run.is_running and (run.first_seconds or 0) >= HOPELESS * (own.first_seconds or 0):
            run.outcome = "far slower"
            run.note = f"a step took {format_seconds(run.first_seconds or 0)}, stopped; {run.note}".rstrip("; ")


def _time_in_rounds(
    context: BenchmarkContext, others: Sequence[_VariantRun], own: _VariantRun, *, until: float
) -> None:
    """Time each variant against the plan, which stays prepared throughout."""
    clock = context.bench.clock
    baseline = context.bench.prepare(own.variant.settings, seconds=max(0.1, until - clock()))
    try:
        if not any(run.is_running for run in others):
            _time_alone(own, baseline, clock=clock, until=until)
        for number in range(_ROUNDS):
            waiting = [run for run in (others if number % 2 == 0 else others[::-1]) if run.is_running]
            for position, run in enumerate(waiting):
                turns_left = len(waiting) - position + (_ROUNDS - 1 - number) * len(waiting)
                share = max((until - clock()) / turns_left, 0.0 if number else _min_turn_seconds(run, own))
                _take_turn(context, run, own, baseline, until=min(until, clock() + share))
                context.readings.append(context.read_conditions())
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
    """Time one variant against the plan in pairs, in alternating order."""
    clock = context.bench.clock
    if clock() + _MARGIN * run.preparation_seconds > until:
        return
    try:
        prepared = context.bench.prepare(run.variant.settings, seconds=max(0.1, until - clock()))
    except ProbeFailedError as error:
        if error.kind != "timeout":
            run.fail(error)
        return
    a_pair = baseline.step_seconds + prepared.step_seconds
    # If one side is far slower, visits of many steps would leave no time for enough pairs.
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
                # The variant's own failure; one of the plan ends the sweep.
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
        # Its process has ended, and has released everything.
        return


def _row(run: _VariantRun, plan_rate: BenchInterval | None) -> BenchRow:
    seconds, note = run.seconds, run.note
    if seconds is not None and seconds.repeats < _MIN_PAIRS:
        few = "one step only" if not run.timings.visits else f"{seconds.repeats} repeats only"
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
        # From the pairs: a variant that ran in quiet minutes would look too good by its own times.
        samples_per_second=scaled_interval(speedup, plan_rate.median) if speedup and plan_rate else run.rate,
        speedup=speedup,
        peak_bytes=run.peak_bytes,
        needed_bytes=run.needed_bytes,
        slow_steps=run.timings.slow_steps if seconds else None,
        drift=run.timings.drift if seconds else None,
    )


def disturbances(context: BenchmarkContext) -> Iterator[str]:
    """Describe what disturbed the benchmark: heat, other programs, short memory."""
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
