"""Benchmark sweeps: every value of a setting timed in pairs against the plan."""

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

SHOWN = (
    "device", "precision", "micro_batch", "lengths", "optimizer_kernels", "threads", "workers", "data_location", "compile",
    "activation_checkpointing",
)  # fmt: skip
_ROUNDS = 2
_PAIRS_PER_ROUND = 20
_MARGIN = 1.3
"""A visit may take this much longer than the longest before it; one that could end too late is not begun."""
_LOOK_SHARE = 0.5
"""Of a sweep's time: a few values with intervals tell more than many without."""
_LEAST_PAIRS = 5
"""For an interval that deserves the name."""
_LEAST_PATIENCE = 5.0
"""Seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkContext:
    """What all sweeps of one benchmark share."""

    rig: StepBench
    rule_plan: Plan
    own: Settings
    """What the plan has other than the rules, where it was measured."""
    watch: Callable[[], Conditions] = Conditions
    fitting: MemoryModel = field(default_factory=MemoryModel)
    plan_visits: list[float] = field(default_factory=list)
    """The plan's own step times, from the first sweep to the last."""
    readings: list[Conditions] = field(default_factory=list)
    """What sensors said in between."""
    cpu_use: list[float] = field(default_factory=list)
    """Per cent of all cores, before and after, while nothing was measured."""

    def plan_with(self, settings: Settings) -> Plan:
        return plan_with(self.rule_plan, settings)


@dataclass(slots=True)
class _VariantRun:
    """One arm on its way through a sweep."""

    arm: Variant
    plan: Plan
    outcome: RowOutcome = "no time"
    words: str = ""
    series: StepTimings = field(default_factory=StepTimings)
    log_ratios: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    look_seconds: float | None = None
    """One step, as the look at it alone showed."""
    preparation_seconds: float = 0.0

    @property
    def is_in(self) -> bool:
        return self.outcome == "measured"

    @property
    def seconds(self) -> BenchInterval | None:
        """One step; from the look alone where there was time for no more."""
        visits = self.series.visits or ([self.look_seconds] if self.look_seconds else [])
        return median_interval(visits) if visits and self.outcome in ("measured", "far slower") else None

    @property
    def rate(self) -> BenchInterval | None:
        """Samples per second by its own times alone."""
        return rate_interval(self.plan.workload.global_batch_size, self.seconds) if self.seconds else None

    def fail(self, error: ProbeFailedError, *, late: RowOutcome = "failed") -> None:
        outcomes: dict[str, RowOutcome] = {"oom": "does not fit", "timeout": late}
        self.outcome, self.words = outcomes.get(error.kind, "failed"), error.reason


def measure_sweep(table: BenchmarkContext, setting: str, arms: Sequence[Variant], *, until: float) -> BenchSweep:
    """One row for each arm, before `until` on the rig's clock; the plan's own arm is measured against all others."""
    lanes = [_VariantRun(arm=arm, plan=table.plan_with(arm.settings)) for arm in arms]
    own = next(lane for lane in lanes if lane.arm.is_plan)
    in_order, started = _own_first(lanes, own), table.rig.clock()
    looking_ends = started + _LOOK_SHARE * (until - started)
    for lane in in_order:
        now = table.rig.clock()
        if lane is own and now < until:
            _look(table, lane, seconds=until - now, late="no time")
        elif own.is_in and now + own.preparation_seconds < looking_ends:
            patience = _patience(own)
            late: RowOutcome = "far slower" if patience <= until - now else "no time"
            hopeless = HOPELESS * (own.look_seconds or math.inf)
            _look(table, lane, seconds=min(until - now, patience), late=late, hopeless=hopeless)
        table.readings.append(table.watch())
    note = ""
    if own.is_in:
        _cut_off_the_hopeless(lanes, own)
        try:
            _go_round(table, in_order[1:], own, until=until)
        except ProbeFailedError as error:
            note = f"ended early: the plan's own steps failed ({error.reason})"
    table.plan_visits.extend(own.series.visits)
    rate = own.rate
    return BenchSweep(setting=setting, rows=tuple(_row(lane, rate) for lane in lanes), note=note)


def _own_first(lanes: Sequence[_VariantRun], own: _VariantRun) -> list[_VariantRun]:
    """Then its neighbours, and the extremes last: they are the slowest, and time may run out."""
    place = lanes.index(own)
    return sorted(lanes, key=lambda lane: abs(lanes.index(lane) - place))


def _patience(own: _VariantRun) -> float:
    """Seconds for making another arm ready: one that needs longer is hopeless, and ending it costs a new process."""
    return max(_LEAST_PATIENCE, 3 * own.preparation_seconds + 2 * HOPELESS * (own.look_seconds or 0))


def _look(
    table: BenchmarkContext, lane: _VariantRun, *, seconds: float, late: RowOutcome, hopeless: float = math.inf
) -> None:
    """Its first steps, alone: does it fit, what does it take, how long is a step?"""
    settings, micro_batch = lane.arm.settings, int(str(lane.plan.micro_batch))
    predicted, limit = table.rig.predicted_bytes(settings), memory_limit(lane.plan)
    needed = table.fitting.needed(settings, micro_batch=micro_batch, predicted=predicted)
    if needed is not None and limit is not None and needed > limit:
        lane.outcome, lane.needed_bytes = "does not fit", needed
        lane.words = f"not tried: needs {format_bytes(needed)} of {format_bytes(limit)}"
        return
    try:
        prepared = table.rig.prepare(settings, seconds=seconds)
        try:
            lane.look_seconds, lane.preparation_seconds = prepared.step_seconds, prepared.preparation_seconds
            if lane.look_seconds >= hopeless:
                # One hiccup must not condemn it.
                lane.look_seconds = min(lane.look_seconds, prepared.step(0))
            lane.peak_bytes = prepared.peak_bytes()
            lane.outcome = "measured"
        finally:
            prepared.close()
        _compare_precision(table, lane, seconds=seconds)
    except ProbeFailedError as error:
        lane.fail(error, late=late)
        return
    table.fitting.learn(settings, micro_batch=micro_batch, measured=lane.peak_bytes, predicted=predicted)
    if lane.peak_bytes is not None and limit is not None and lane.peak_bytes > limit:
        lane.words = f"took more than the {format_bytes(limit)} planned for"


def _compare_precision(table: BenchmarkContext, lane: _VariantRun, *, seconds: float) -> None:
    if lane.arm.is_plan or lane.plan.precision == table.plan_with(table.own).precision:
        return
    agreement = table.rig.agreement(lane.arm.settings, seconds=seconds)
    lane.words = "agrees with fp32" if agreement.agrees else "gradients DIFFER from fp32's"


def _cut_off_the_hopeless(lanes: Sequence[_VariantRun], own: _VariantRun) -> None:
    for lane in lanes:
        if lane.is_in and (lane.look_seconds or 0) >= HOPELESS * (own.look_seconds or 0):
            lane.outcome = "far slower"
            lane.words = f"a step took {format_seconds(lane.look_seconds or 0)}, stopped; {lane.words}".rstrip("; ")


def _go_round(table: BenchmarkContext, others: Sequence[_VariantRun], own: _VariantRun, *, until: float) -> None:
    clock = table.rig.clock
    # Making ready again, and at least one pair each; the plan stays ready all the time.
    base = table.rig.prepare(own.arm.settings, seconds=max(0.1, until - clock()))
    try:
        if not any(lane.is_in for lane in others):
            _alone(own, base, clock=clock, until=until)
        for number in range(_ROUNDS):
            waiting = [lane for lane in (others if number % 2 == 0 else others[::-1]) if lane.is_in]
            for place, lane in enumerate(waiting):
                turns = len(waiting) - place + (_ROUNDS - 1 - number) * len(waiting)
                share = max((until - clock()) / turns, 0.0 if number else _least_seconds(lane, own))
                _take_turn(table, lane, own, base, until=min(until, clock() + share))
                table.readings.append(table.watch())
    finally:
        _close(base)


def _least_seconds(lane: _VariantRun, own: _VariantRun) -> float:
    """What its first turn needs to be of use."""
    a_pair = (own.look_seconds or 0) + (lane.look_seconds or 0)
    return _MARGIN * (lane.preparation_seconds + (_LEAST_PAIRS + 1) * a_pair)


def _alone(own: _VariantRun, base: PreparedStep, *, clock: Callable[[], float], until: float) -> None:
    steps = steps_per_visit(base.step_seconds)
    for pair in range(_ROUNDS * _PAIRS_PER_ROUND):
        if clock() + _MARGIN * max(own.series.longest, steps * base.step_seconds) > until:
            return
        own.series.visit(base, first=pair * steps, steps=steps)


def _take_turn(
    table: BenchmarkContext, lane: _VariantRun, own: _VariantRun, base: PreparedStep, *, until: float
) -> None:
    """One lane against the plan, in pairs, now one first and now the other."""
    clock = table.rig.clock
    if clock() + _MARGIN * lane.preparation_seconds > until:
        return
    try:
        rival = table.rig.prepare(lane.arm.settings, seconds=max(0.1, until - clock()))
    except ProbeFailedError as error:
        if error.kind != "timeout":
            lane.fail(error)
        return
    a_pair = base.step_seconds + rival.step_seconds
    # Where one is far slower than the other, many steps of both would leave no time for pairs.
    affordable = max(1, int((until - clock()) / (_MARGIN * _LEAST_PAIRS * max(a_pair, 1e-9))))
    steps = min(affordable, steps_per_visit(min(base.step_seconds, rival.step_seconds)))
    ready_seconds = steps * a_pair
    try:
        for pair in range(_PAIRS_PER_ROUND):
            if clock() + _MARGIN * max(own.series.longest + lane.series.longest, ready_seconds) > until:
                break
            first = pair * steps
            if pair % 2:
                theirs = own.series.visit(base, first=first, steps=steps)
                ours = _visit(lane, rival, first=first, steps=steps)
            else:
                ours = _visit(lane, rival, first=first, steps=steps)
                theirs = own.series.visit(base, first=first, steps=steps) if ours is not None else 0.0
            if ours is None:
                return
            lane.log_ratios.append(math.log(ours / theirs))
    finally:
        _close(rival)


def _visit(lane: _VariantRun, rival: PreparedStep, *, first: int, steps: int) -> float | None:
    """What one step took; None where it failed, which is the lane's own fault and not the plan's."""
    try:
        return lane.series.visit(rival, first=first, steps=steps)
    except ProbeFailedError as error:
        lane.fail(error)
        return None


def _close(rival: PreparedStep) -> None:
    try:
        rival.close()
    except ProbeFailedError:
        # Its process is gone, and everything with it.
        return


def _row(lane: _VariantRun, plan_rate: BenchInterval | None) -> BenchRow:
    seconds, words = lane.seconds, lane.words
    if seconds is not None and seconds.repeats < _LEAST_PAIRS:
        few = "one step only" if not lane.series.visits else f"{seconds.repeats} repeats only"
        words = "; ".join(filter(None, (words, few)))
    speedup = ratio_interval(lane.log_ratios) if lane.log_ratios and seconds else None
    return BenchRow(
        value=lane.arm.value,
        is_plan=lane.arm.is_plan,
        execution=_execution(lane.plan),
        outcome=lane.outcome,
        words=words or ("not measured in the time there was" if lane.outcome == "no time" else ""),
        step_seconds=seconds,
        # A value that had the quiet minutes would look too good by its own times: pairs are what counts.
        samples_per_second=scaled_interval(speedup, plan_rate.middle) if speedup and plan_rate else lane.rate,
        speedup=speedup,
        peak_bytes=lane.peak_bytes,
        needed_bytes=lane.needed_bytes,
        slow_steps=lane.series.slow_steps if seconds else None,
        drift=lane.series.drift if seconds else None,
    )


def _execution(plan: Plan) -> dict[str, str | int | float | bool | None]:
    shown = {name: plan.settings[name].value for name in SHOWN if name in plan.settings}
    if device_kind(plan) != "cpu":
        shown.pop("threads", None)
    return shown


_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_LEAST_VISITS = 4
_BUSY_PERCENT = 20.0


def disturbances(table: BenchmarkContext) -> Iterator[str]:
    """What disturbed the measurement, in words."""
    levels = [reading.thermal for reading in table.readings if reading.thermal is not None]
    hot = [level for level in levels if level != "nominal"]
    if hot:
        yield f"throttling seen: thermal pressure {max(hot, key=_LEVELS.index)} in {len(hot)} of {len(levels)} readings"
    else:
        yield "no throttling by the sensor" if levels else "no heat sensor can be read here"
    third = len(table.plan_visits) // 3
    if third >= _LEAST_VISITS:
        first, last = (median_interval(part) for part in (table.plan_visits[:third], table.plan_visits[-third:]))
        change = last.middle / first.middle
        moved = last.low > first.high or last.high < first.low
        told = "heat, or other programs" if change > 1 else "other programs ended, or clocks rose"
        yield f"the plan's own steps took {change:.2f}x as long in the last third as in the first" + (
            f": {told}" if moved else ", which is inside the noise"
        )
    used = max(table.cpu_use, default=0.0)
    if used >= _BUSY_PERCENT:
        yield f"other programs were at work: {used:.0f} % of all cores while nothing was measured"
    if any(reading.memory_pressure in ("warn", "critical") for reading in table.readings):
        yield "memory was short"
    if any(reading.low_power_mode for reading in table.readings):
        yield "low-power mode is on, which slows the GPU"
