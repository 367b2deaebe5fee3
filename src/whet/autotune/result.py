"""The result of a search: settings, evidence, break-even points and their descriptions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat

from whet.autotune.paired_timing import PairedTiming
from whet.autotune.statistics import SpeedupEstimate, is_slower
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_percent, format_seconds
from whet.plan.plan import Plan, make_plan
from whet.plan.render import format_value
from whet.plan.setting import Evidence, MeasuredSetting, Scalar, TuneTrial

MOST_BUDGET = 60.0
_SHARE_OF_RUN = 0.03
_UNKNOWN_STEPS = 100


def budget_seconds(run_seconds: float | None, *, most: float = MOST_BUDGET) -> float:
    """What measuring may cost: a minute, and no more than 3 % of the run it is for.

    >>> budget_seconds(600), budget_seconds(36_000), budget_seconds(None)
    (18.0, 60.0, 60.0)
    """
    return most if run_seconds is None else min(most, _SHARE_OF_RUN * run_seconds)


def finish_seconds(*, preparation: float, step: float, num_steps: int, planning: float = 0.0) -> float:
    """The time from now until the last step is made."""
    return planning + preparation + num_steps * step


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Something that costs time before the first step and saves some in each."""

    cost_seconds: float
    saved_seconds: float
    """In each step; below zero where steps became slower."""
    num_steps: int | None
    """Of this run; None when nobody knows."""

    @property
    def step(self) -> int | None:
        """After which step it has paid for itself; None for never."""
        if self.cost_seconds <= 0:
            return 0
        return math.ceil(self.cost_seconds / self.saved_seconds) if self.saved_seconds > 0 else None

    @property
    def pays(self) -> bool:
        """Whether this run ends sooner; a run of unknown length is taken for a short one."""
        num_steps = _UNKNOWN_STEPS if self.num_steps is None else self.num_steps
        return self.saved_seconds * num_steps > self.cost_seconds

    def words(self, doing: str) -> str:
        """One line.

        >>> BreakEven(cost_seconds=38, saved_seconds=0.12, num_steps=5_000).words("compile")
        '38 s to compile, saves 120 ms a step, pays after step 317 of 5,000'
        >>> BreakEven(cost_seconds=38, saved_seconds=0.03, num_steps=700).words("compile")
        '38 s to compile, would save 21 s of this run'
        """
        cost = f"{format_seconds(self.cost_seconds)} to {doing}"
        if self.step is None:
            return f"{cost}, and saves nothing"
        if self.num_steps is None:
            return f"{cost}, pays after step {self.step:,}; how many this run has is unknown"
        if self.pays:
            saved = format_seconds(self.saved_seconds)
            return f"{cost}, saves {saved} a step, pays after step {self.step:,} of {self.num_steps:,}"
        return f"{cost}, would save {format_seconds(self.saved_seconds * self.num_steps)} of this run"


_DOING = {"compile": "compile", "workers": "start workers", "data_location": "move the data", "graph": "capture"}


def show_setting(setting: str, value: Scalar) -> str:
    """A value that can be understood without its table row.

    >>> shown("precision", "bf16"), shown("compile", "on"), shown("micro_batch", 8)
    ('bf16', 'compile=on', 'micro_batch=8')
    """
    speaks = isinstance(value, str) and value not in ("on", "off")
    return str(value) if speaks else f"{setting}={format_value(value)}"


def describe_timing(name: str, duel: PairedTiming) -> str:
    """A candidate that did not win."""
    found = duel.estimate
    if found is None:
        return f"{name}: no time for even one pair of steps"
    if duel.answer == "cut off":
        return f"{name} was about {1 / found.speedup:.0f}x slower in its first step, stopped"
    quiet = "" if duel.is_quiet else "; the machine is not quiet"
    if duel.answer == "unclear":
        return f"{name}: repeats too few or too uneven to be sure ({describe_interval(found)}){quiet}"
    if not is_slower(duel.log_ratios):
        return f"{name} brings nothing here ({describe_interval(found)}){quiet}"
    return f"{name} was {_slower(found)} here ({_repeats(found)}){quiet}"


def describe_gain(found: SpeedupEstimate, before: str) -> str:
    """A candidate that won, against what was best before it."""
    return f"{found.speedup:.2f}x as fast as {before} ({_repeats(found)})"


def describe_interval(found: SpeedupEstimate) -> str:
    """A speed-up with its interval."""
    return f"{found.speedup:.2f}x, {found.low:.2f}x to {found.high:.2f}x in {_count(found)}"


def describe_break_even(setting: str, cost: BreakEven) -> str:
    """What has to be earned back, and whether this run does."""
    return cost.words(_DOING.get(setting, "prepare"))


def describe_timeout(name: str, *, seconds: float, usual: float) -> str:
    """A preparation that was stopped, with what it usually takes."""
    return f"{name} was not ready after {format_seconds(seconds)}, stopped (before: {format_seconds(usual)})"


def describe_briefly(trial: TuneTrial) -> str:
    """A trial in a few words, to stand beside others of the same setting."""
    value = trial.settings[trial.setting]
    short = format_value(value)
    if trial.verdict in ("no gain", "unclear") and trial.speedup is not None:
        return f"{short}: {trial.speedup:.2f}x"
    if trial.verdict == "cut off" and trial.speedup is not None:
        return f"{short}: about {1 / trial.speedup:.0f}x slower"
    return f"{short}: {trial.words.removeprefix(show_setting(trial.setting, value)).lstrip(' :')}"


def _slower(found: SpeedupEstimate) -> str:
    times = 1 / found.speedup
    return f"{times:.1f}x slower" if times >= 2 else f"{format_percent(times - 1)} slower"


def _count(found: SpeedupEstimate) -> str:
    return f"{found.pairs} repeat{'' if found.pairs == 1 else 's'}"


def _repeats(found: SpeedupEstimate) -> str:
    return f"{_count(found)}, spread {format_percent(found.spread)}"


_MOST_PARTS = 3
_WIDEST = 2.0
NOT_QUIET = "the machine is not quiet: times changed while they were measured"


class ConfirmedGain(FrozenModel):
    """How much faster than the rules, confirmed by a duel of its own."""

    speedup: float
    low: float
    high: float
    repeats: int


class TuningResult(FrozenModel):
    """The result of a search; `measured` goes into `make_plan`, `trials` into the plan."""

    settings: Mapping[str, Scalar] = Field(default_factory=dict)
    """What is better than the rule-based plan; empty where nothing is."""
    measured: Mapping[str, MeasuredSetting] = Field(default_factory=dict)
    """Settings that were tried, kept ones too."""
    trials: tuple[TuneTrial, ...] = ()
    spent_seconds: NonNegativeFloat = 0.0
    gain: ConfirmedGain | None = None
    """Over the rule-based plan; None where it was kept."""
    step_seconds: NonNegativeFloat | None = None
    """The median of a step under what was found; None where none was made."""
    preparation_seconds: NonNegativeFloat | None = None
    words: tuple[str, ...] = ()

    @property
    def holds_another_day(self) -> bool:
        """Not what was seen on a busy machine: times that changed, or a gain whose interval doubles from end to end.

        >>> Found(gain=Gain(speedup=14, low=3, high=50, repeats=8)).holds_another_day
        False
        """
        is_uneven = self.gain is not None and self.gain.high > _WIDEST * self.gain.low
        return not is_uneven and NOT_QUIET not in self.words

    def applied_to(self, plan: Plan) -> Plan:
        """The plan with what was found, and the trials as evidence."""
        return make_plan(
            plan.machine,
            plan.workload,
            overrides=plan.overrides,
            measured=self.measured,
            conditions=plan.conditions,
            trials=self.trials,
        )


def measured_settings(
    plan: Plan, trials: Sequence[TuneTrial], *, reverted: str | None = None
) -> dict[str, MeasuredSetting]:
    """What was measured about each setting of the resulting plan: why it won, or why the others lost.

    `reverted` says why gains that single trials showed were given up again.
    """
    measured: dict[str, MeasuredSetting] = {}
    for name in plan.settings:
        value = plan.settings[name].value
        group = [trial for trial in trials if trial.setting == name]
        losers = [trial for trial in group if trial.settings[name] != value]
        winner = _winner(name, value, trials) if reverted is None else None
        if winner is not None:
            along = "" if winner.setting == name else f"together with {winner.setting}: "
            measured[name] = MeasuredSetting(value=value, reason=along + winner.words, evidence=_evidence(winner, name))
        elif losers:
            has_won = any(trial.verdict in ("faster", "likely") for trial in losers)
            reason = reverted if reverted is not None and has_won else _why_kept(losers)
            measured[name] = MeasuredSetting(value=value, reason=reason, evidence=_evidence(_nearest(losers), name))
    return measured


def _winner(name: str, value: Scalar, trials: Sequence[TuneTrial]) -> TuneTrial | None:
    """The trial that brought this value in, by itself or along with another setting."""
    won = (t for t in trials if t.verdict in ("faster", "likely") and name in t.settings and t.setting in t.settings)
    return next((t for t in won if t.settings[name] == value and t.against.get(name) != value), None)


def _why_kept(losers: Sequence[TuneTrial]) -> str:
    values = dict.fromkeys(trial.settings[trial.setting] for trial in losers)
    told = [_nearest([trial for trial in losers if trial.settings[trial.setting] == value]) for value in values]
    return told[0].words if len(told) == 1 else "; ".join(_parts(told))


def _parts(losers: Sequence[TuneTrial]) -> Iterator[str]:
    yield from (describe_briefly(trial) for trial in losers[:_MOST_PARTS])
    if len(losers) > _MOST_PARTS:
        yield f"and {len(losers) - _MOST_PARTS} more"


def _nearest(losers: Sequence[TuneTrial]) -> TuneTrial:
    """The loser that came closest."""
    return max(losers, key=lambda trial: trial.speedup or 0.0)


def _evidence(trial: TuneTrial, name: str) -> Evidence:
    return {
        "tried": trial.settings[name],
        "verdict": trial.verdict,
        "repeats": trial.repeats,
        "median": trial.median_seconds,
        "rival_median": trial.rival_seconds,
        "speedup": trial.speedup,
        "interval": trial.interval,
        "bytes": trial.peak_bytes,
    }


def finish_estimate(plan: Plan, found: TuningResult) -> str:
    """One line: how long all steps take under the plan, its speed, its memory."""
    step, steps = found.step_seconds, plan.workload.num_steps
    if step is None or step <= 0:
        return "no estimate of the time: no step could be measured"
    rate = plan.workload.global_batch_size / step
    speed = f"{rate:,.0f} samples/s" if round(rate) >= 1000 else f"{rate:.3g} samples/s"
    if not any(trial.repeats for trial in found.trials):
        speed += ", by the last of its first steps alone: a rough guess, not a measurement"
    peak = max((trial.peak_bytes or 0 for trial in found.trials if trial.settings == found.settings), default=0)
    memory = f", {format_bytes(peak)}" if peak else ""
    if steps is None:
        return f"{speed}{memory}; how many steps this run has is unknown"
    total = finish_seconds(preparation=found.preparation_seconds or 0.0, step=step, num_steps=steps)
    return f"{steps:,} steps take about {format_seconds(total)} at {speed}{memory}, without evaluations and saving"
