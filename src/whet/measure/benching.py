"""How fast is every value of a setting? Each is looked at alone first, then timed in pairs against the plan, in rounds.

Alone: so its memory is its own. In pairs on the same batches: so a ratio is honest whatever the
machine does meanwhile. In rounds there and back (A B C, C B A): so that nothing is always late.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whet.base.units import show_bytes, show_seconds
from whet.machine.facts import Conditions
from whet.measure.candidates import device_kind, memory_limit, planned
from whet.measure.duel import HOPELESS
from whet.measure.fitting import Fitting
from whet.measure.rig import Prepared, ProbeFailedError, Rig, Settings
from whet.measure.series import Series, median_interval, per_second, ratio_interval, steps_at_a_time
from whet.measure.sweeps import Arm
from whet.plan.plan import Plan
from whet.run.bench_result import Outcome, Row, Sweep

SHOWN = (
    "device", "precision", "micro_batch", "lengths", "optimizer_kernels", "threads", "workers", "data_home", "compile",
    "activation_checkpointing",
)  # fmt: skip
_ROUNDS = 2
_PAIRS_PER_ROUND = 20
_MARGIN = 1.3
"""A visit may take this much longer than the longest before it; one that could end too late is not begun."""
_LEAST_PATIENCE = 5.0
"""Seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What all sweeps of one benchmark share."""

    rig: Rig
    rule_plan: Plan
    own: Settings
    """What the plan has other than the rules, where it was measured."""
    watch: Callable[[], Conditions] = Conditions
    fitting: Fitting = field(default_factory=Fitting)
    plan_visits: list[float] = field(default_factory=list)
    """The plan's own step times, from the first sweep to the last."""
    readings: list[Conditions] = field(default_factory=list)
    """What sensors said in between."""

    def plan_with(self, settings: Settings) -> Plan:
        return planned(self.rule_plan, settings)


@dataclass(slots=True)
class _Lane:
    """One arm on its way through a sweep."""

    arm: Arm
    plan: Plan
    outcome: Outcome = "no time"
    words: str = ""
    series: Series = field(default_factory=Series)
    log_ratios: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    needed_bytes: int | None = None
    look_seconds: float | None = None
    """One step, as the look at it alone showed."""
    preparation_seconds: float = 0.0

    @property
    def is_in(self) -> bool:
        return self.outcome == "measured"

    def fail(self, error: ProbeFailedError) -> None:
        kinds: dict[str, tuple[Outcome, str]] = {
            "oom": ("does not fit", error.reason),
            "timeout": ("far slower", f"stopped: {error.reason}"),
            "crash": ("failed", error.reason),
        }
        self.outcome, self.words = kinds.get(error.kind, ("failed", error.reason))


def measure_sweep(table: Table, setting: str, arms: Sequence[Arm], *, until: float) -> Sweep:
    """One row for each arm, before `until` on the rig's clock; the plan's own arm is measured against all others."""
    lanes = [_Lane(arm=arm, plan=table.plan_with(arm.settings)) for arm in arms]
    own = next(lane for lane in lanes if lane.arm.is_plan)
    for lane in _own_first(lanes, own):
        left = until - table.rig.clock()
        if left > 0:
            _look(table, lane, seconds=left if lane is own else min(left, _patience(own)))
        table.readings.append(table.watch())
    note = ""
    if own.is_in:
        _cut_off_the_hopeless(lanes, own)
        try:
            _go_round(table, lanes, own, until=until)
        except ProbeFailedError as error:
            note = f"ended early: the plan's own steps failed ({error.reason})"
    table.plan_visits.extend(own.series.visits)
    return Sweep(setting=setting, rows=tuple(_row(lane) for lane in lanes), note=note)


def _own_first(lanes: Sequence[_Lane], own: _Lane) -> list[_Lane]:
    """Then its neighbours, and the extremes last: they are the slowest, and time may run out."""
    place = lanes.index(own)
    return sorted(lanes, key=lambda lane: abs(lanes.index(lane) - place))


def _patience(own: _Lane) -> float:
    """Seconds for making another arm ready: one that needs longer is hopeless, and ending it costs a new process."""
    return max(_LEAST_PATIENCE, 3 * own.preparation_seconds + 2 * HOPELESS * (own.look_seconds or 0))


def _look(table: Table, lane: _Lane, *, seconds: float) -> None:
    """Its first steps, alone: does it fit, what does it take, how long is a step?"""
    settings, micro_batch = lane.arm.settings, int(str(lane.plan.value("micro_batch")))
    predicted, limit = table.rig.predicted_bytes(settings), memory_limit(lane.plan)
    needed = table.fitting.needed(settings, micro_batch=micro_batch, predicted=predicted)
    if needed is not None and limit is not None and needed > limit:
        lane.outcome, lane.needed_bytes = "does not fit", needed
        lane.words = f"not tried: needs {show_bytes(needed)} of {show_bytes(limit)}"
        return
    try:
        prepared = table.rig.prepare(settings, seconds=seconds)
        try:
            lane.look_seconds, lane.preparation_seconds = prepared.step_seconds, prepared.preparation_seconds
            lane.peak_bytes = prepared.peak_bytes()
            lane.outcome = "measured"
        finally:
            prepared.close()
        _compare_precision(table, lane, seconds=seconds)
    except ProbeFailedError as error:
        lane.fail(error)
        return
    table.fitting.learn(settings, micro_batch=micro_batch, measured=lane.peak_bytes, predicted=predicted)
    if lane.peak_bytes is not None and limit is not None and lane.peak_bytes > limit:
        lane.words = f"took more than the {show_bytes(limit)} planned for"


def _compare_precision(table: Table, lane: _Lane, *, seconds: float) -> None:
    if lane.arm.is_plan or lane.plan.value("precision") == table.plan_with(table.own).value("precision"):
        return
    agreement = table.rig.agreement(lane.arm.settings, seconds=seconds)
    lane.words = "agrees with fp32" if agreement.agrees else "gradients DIFFER from fp32's"


def _cut_off_the_hopeless(lanes: Sequence[_Lane], own: _Lane) -> None:
    for lane in lanes:
        if lane.is_in and (lane.look_seconds or 0) >= HOPELESS * (own.look_seconds or 0):
            lane.outcome = "far slower"
            lane.words = f"a step took {show_seconds(lane.look_seconds or 0)}, stopped; {lane.words}".rstrip("; ")


def _go_round(table: Table, lanes: Sequence[_Lane], own: _Lane, *, until: float) -> None:
    others = [lane for lane in lanes if lane is not own]
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
                _take_turn(table, lane, own, base, until=min(until, clock() + (until - clock()) / turns))
                table.readings.append(table.watch())
    finally:
        base.close()


def _alone(own: _Lane, base: Prepared, *, clock: Callable[[], float], until: float) -> None:
    steps = steps_at_a_time(base.step_seconds)
    for pair in range(_ROUNDS * _PAIRS_PER_ROUND):
        if clock() + _MARGIN * max(own.series.longest, steps * base.step_seconds) > until:
            return
        own.series.visit(base, first=pair * steps, steps=steps)


def _take_turn(table: Table, lane: _Lane, own: _Lane, base: Prepared, *, until: float) -> None:
    """One lane against the plan, in pairs, now one first and now the other."""
    clock = table.rig.clock
    if clock() + _MARGIN * lane.preparation_seconds > until:
        return
    try:
        rival = table.rig.prepare(lane.arm.settings, seconds=max(0.1, until - clock()))
    except ProbeFailedError as error:
        lane.fail(error)
        return
    steps = steps_at_a_time(min(base.step_seconds, rival.step_seconds))
    ready_seconds = steps * (base.step_seconds + rival.step_seconds)
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


def _visit(lane: _Lane, rival: Prepared, *, first: int, steps: int) -> float | None:
    """What one step took; None where it failed, which is the lane's own fault and not the plan's."""
    try:
        return lane.series.visit(rival, first=first, steps=steps)
    except ProbeFailedError as error:
        lane.fail(error)
        return None


def _close(rival: Prepared) -> None:
    try:
        rival.close()
    except ProbeFailedError:
        # Its process is gone, and everything with it.
        return


def _row(lane: _Lane) -> Row:
    visits = lane.series.visits
    if not visits and lane.look_seconds and lane.outcome in ("measured", "far slower"):
        visits = [lane.look_seconds]
        lane.words = "; ".join(filter(None, (lane.words, "one step only")))
    seconds = median_interval(visits) if visits and lane.outcome in ("measured", "far slower") else None
    return Row(
        value=lane.arm.value,
        is_plan=lane.arm.is_plan,
        execution=_execution(lane.plan),
        outcome=lane.outcome,
        words=lane.words or ("no time was left for it" if lane.outcome == "no time" else ""),
        step_seconds=seconds,
        samples_per_second=per_second(lane.plan.workload.global_batch_size, seconds) if seconds else None,
        speedup=ratio_interval(lane.log_ratios) if lane.log_ratios and seconds else None,
        peak_bytes=lane.peak_bytes,
        needed_bytes=lane.needed_bytes,
        slow_steps=lane.series.slow_steps if seconds else None,
        drift=lane.series.drift if seconds else None,
    )


def _execution(plan: Plan) -> dict[str, str | int | float | bool | None]:
    shown = {name: plan.value(name) for name in SHOWN if name in plan.settings}
    if device_kind(plan) != "cpu":
        shown.pop("threads", None)
    return shown
