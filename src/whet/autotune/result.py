"""The result of a search: settings, evidence, break-even points, and their descriptions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field, NonNegativeFloat

from whet.autotune.paired_timing import PairedTiming
from whet.autotune.statistics import SpeedupEstimate, is_slower
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_percent, format_seconds
from whet.plan.plan import Plan, make_plan_again
from whet.plan.render import format_value
from whet.plan.setting import Evidence, MeasuredSetting, Scalar, TuneTrial

MAX_BUDGET_SECONDS = 60.0
# The first compilation takes longer than all other trials together.
_MAX_COMPILE_SECONDS = 180.0
# Maximum fraction of the run's time to spend on measuring.
_SHARE_OF_RUN = 0.03
# On a CUDA GPU, small models compile in 5 to 9 s, and a recommender became 1.25 times as fast. So shorter runs may
# compile too. These are the maximum fraction of the run for measuring and compiling together, and the shortest run.
_SHARE_OF_RUN_CUDA = 0.1
_MIN_RUN_SECONDS_CUDA = 120.0
_MIN_BUDGET_SECONDS_CUDA = 5.0
# Assumed number of steps if the length of the run is unknown. A low number rejects settings that pay off only in a long
# run.
_ASSUMED_STEPS = 100
# Maximum number of losing values to list as the reason for keeping a setting.
_MAX_LISTED = 3
# A confidence interval wider than this factor shows that the machine was busy.
_MAX_INTERVAL_RATIO = 2.0
NOT_QUIET = "the machine is not quiet: step times changed during the measurement"

# The verb phrase for the one-time cost of each setting.
_PREPARATIONS = {"compile": "compile", "workers": "start workers", "data_location": "move the data", "graph": "capture"}


class ConfirmedGain(FrozenModel):
    """Speedup over the rule-based plan in the final comparison, with its confidence interval."""

    speedup: float
    low: float
    high: float
    repeats: int


class TuningResult(FrozenModel):
    """The result of a search. `applied_to` applies it to a plan."""

    settings: Mapping[str, Scalar] = Field(default_factory=dict)
    """Settings that differ from the rule-based plan because they were better. Empty if none were."""
    measured: Mapping[str, MeasuredSetting] = Field(default_factory=dict)
    """Evidence for every setting that was tried, including those that kept their value."""
    trials: tuple[TuneTrial, ...] = ()
    spent_seconds: NonNegativeFloat = 0.0
    is_complete: bool = True
    """False if there was no time to compile the model or to check the compiled code, or no process to do it in.

    Such a result expires sooner, because a later search continues with the cached code.
    """
    gain: ConfirmedGain | None = None
    """Speedup over the rule-based plan, or None if that plan was kept."""
    step_seconds: NonNegativeFloat | None = None
    """Median seconds of one step under the resulting settings, or None if no step was measured."""
    preparation_seconds: NonNegativeFloat | None = None
    summary: tuple[str, ...] = ()
    """Summary for the user, one line per item."""

    @property
    def is_reusable(self) -> bool:
        """Whether the result may be cached.

        It may not if step times were unstable or the interval is wide, because the machine was then busy.

        >>> TuningResult(gain=ConfirmedGain(speedup=14, low=3, high=50, repeats=8)).is_reusable
        False
        """
        is_wide = self.gain is not None and self.gain.high > _MAX_INTERVAL_RATIO * self.gain.low
        return not is_wide and NOT_QUIET not in self.summary

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan with the measured settings, and with the trials as their evidence."""
        return make_plan_again(plan, measured=self.measured, trials=self.trials)


# --- Evidence --------------------------------------------------------------------------------------------------------


def measured_settings(
    plan: Plan, trials: Sequence[TuneTrial], *, reverted: str | None = None
) -> dict[str, MeasuredSetting]:
    """Return the evidence for each setting that was tried: why its value won, or why the alternatives lost.

    `reverted` is the reason for keeping the rule-based plan although some trials showed a gain, or None otherwise.
    """
    measured: dict[str, MeasuredSetting] = {}
    for name in plan.settings:
        value = plan.settings[name].value
        rejected = [trial for trial in trials if trial.setting == name and trial.settings[name] != value]
        winner = _winner(name, value, trials) if reverted is None else None
        if winner is not None:
            prefix = "" if winner.setting == name else f"together with {winner.setting}: "
            measured[name] = MeasuredSetting(value=value, reason=prefix + winner.note, evidence=_evidence(winner, name))
        elif rejected:
            has_won = any(trial.verdict in ("faster", "likely") for trial in rejected)
            reason = reverted if reverted is not None and has_won else _why_kept(rejected)
            measured[name] = MeasuredSetting(value=value, reason=reason, evidence=_evidence(_closest(rejected), name))
    return measured


def _winner(name: str, value: Scalar, trials: Sequence[TuneTrial]) -> TuneTrial | None:
    """Return the trial that introduced this value, alone or combined with another setting, or None."""
    won = (t for t in trials if t.verdict in ("faster", "likely") and name in t.settings and t.setting in t.settings)
    return next((t for t in won if t.settings[name] == value and t.against.get(name) != value), None)


def _why_kept(rejected: Sequence[TuneTrial]) -> str:
    values = dict.fromkeys(trial.settings[trial.setting] for trial in rejected)
    closest = [_closest([trial for trial in rejected if trial.settings[trial.setting] == value]) for value in values]
    if len(closest) == 1:
        return closest[0].note
    listed = [_describe_briefly(trial) for trial in closest[:_MAX_LISTED]]
    num_more = len(closest) - len(listed)
    return "; ".join([*listed, f"and {num_more} more"] if num_more else listed)


def _closest(rejected: Sequence[TuneTrial]) -> TuneTrial:
    """Return the rejected trial with the highest speedup, which came closest to winning."""
    return max(rejected, key=lambda trial: trial.speedup or 0.0)


def _evidence(trial: TuneTrial, name: str) -> Evidence:
    return {
        "tried": trial.settings[name],
        "verdict": trial.verdict,
        "repeats": trial.repeats,
        "median": trial.median_seconds,
        "baseline_median": trial.baseline_seconds,
        "speedup": trial.speedup,
        "interval": trial.interval,
        "bytes": trial.peak_bytes,
    }


# --- Costs -----------------------------------------------------------------------------------------------------------


def budget_seconds(run_seconds: float | None, *, most: float = MAX_BUDGET_SECONDS) -> float:
    """Return the time budget for measuring: one minute, but at most 3 % of the run's time.

    >>> budget_seconds(600), budget_seconds(36_000), budget_seconds(None)
    (18.0, 60.0, 60.0)
    """
    return most if run_seconds is None else min(most, _SHARE_OF_RUN * run_seconds)


def compile_budget_seconds(run_seconds: float) -> float:
    """Return how many seconds compilation may take beyond the budget: 3 % of the run, but at most three minutes.

    >>> compile_budget_seconds(600), compile_budget_seconds(36_000)
    (18.0, 180.0)
    """
    return min(_MAX_COMPILE_SECONDS, _SHARE_OF_RUN * run_seconds)


def cuda_budget_seconds(run_seconds: float) -> tuple[float, float]:
    """Return the time budget for measuring on a CUDA GPU, and how many seconds compilation may take beyond it.

    Together they are at most 10 % of a run of two minutes or more.

    >>> cuda_budget_seconds(100), cuda_budget_seconds(200), cuda_budget_seconds(36_000)
    ((3.0, 0.0), (6.0, 14.0), (60.0, 180.0))
    """
    budget = budget_seconds(run_seconds)
    if run_seconds < _MIN_RUN_SECONDS_CUDA:
        return budget, 0.0
    budget = max(budget, _MIN_BUDGET_SECONDS_CUDA)
    return budget, min(_MAX_COMPILE_SECONDS, _SHARE_OF_RUN_CUDA * run_seconds - budget)


def finish_seconds(*, preparation: float, step: float, num_steps: int) -> float:
    """Return the seconds from now until the end of the last step, including preparation."""
    return preparation + num_steps * step


def finish_estimate(plan: Plan, result: TuningResult) -> str:
    """Describe the total time, throughput and memory of a run with this plan in one line."""
    step, steps = result.step_seconds, plan.workload.num_steps
    if step is None or step <= 0:
        return "no time estimate: no step could be measured"
    rate = plan.workload.global_batch_size / step
    speed = f"{rate:,.0f} samples/s" if round(rate) >= 1000 else f"{rate:.3g} samples/s"
    if not any(trial.repeats for trial in result.trials):
        speed += ", from a single warm-up step: a rough guess, not a measurement"
    peak = max((trial.peak_bytes or 0 for trial in result.trials if trial.settings == result.settings), default=0)
    memory = f", {format_bytes(peak)}" if peak else ""
    if steps is None:
        return f"{speed}{memory}; the number of steps is unknown"
    total = finish_seconds(preparation=result.preparation_seconds or 0.0, step=step, num_steps=steps)
    return f"{steps:,} steps take about {format_seconds(total)} at {speed}{memory}, without evaluations and saving"


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """A one-time cost before the first step, weighed against the time saved in each step."""

    cost_seconds: float
    saved_seconds: float
    """Seconds saved per step. Negative if steps became slower."""
    num_steps: int | None
    """Number of steps of this run, or None if unknown."""

    @property
    def step(self) -> int | None:
        """The step after which the cost is recovered, or None if it never is."""
        if self.cost_seconds <= 0:
            return 0
        return math.ceil(self.cost_seconds / self.saved_seconds) if self.saved_seconds > 0 else None

    @property
    def pays(self) -> bool:
        """Whether the setting makes this run finish sooner."""
        num_steps = _ASSUMED_STEPS if self.num_steps is None else self.num_steps
        return self.saved_seconds * num_steps > self.cost_seconds

    def describe(self, setting: str) -> str:
        """Describe the cost of a setting and the step after which it pays off.

        >>> BreakEven(cost_seconds=38, saved_seconds=0.12, num_steps=5_000).describe("compile")
        '38 s to compile, saves 120 ms a step, pays after step 317 of 5,000'
        >>> BreakEven(cost_seconds=38, saved_seconds=0.03, num_steps=700).describe("compile")
        '38 s to compile, would save 21 s of this run'
        """
        cost = f"{format_seconds(self.cost_seconds)} to {_PREPARATIONS.get(setting, 'prepare')}"
        if self.step is None:
            return f"{cost}, and saves nothing"
        if self.num_steps is None:
            return f"{cost}, pays after step {self.step:,}; the number of steps is unknown"
        if self.pays:
            saved = format_seconds(self.saved_seconds)
            return f"{cost}, saves {saved} a step, pays after step {self.step:,} of {self.num_steps:,}"
        return f"{cost}, would save {format_seconds(self.saved_seconds * self.num_steps)} of this run"


# --- Descriptions ----------------------------------------------------------------------------------------------------


def show_setting(setting: str, value: Scalar) -> str:
    """Format a setting's value for running text, with the setting's name unless the value is self-explanatory.

    >>> show_setting("precision", "bf16"), show_setting("compile", "on"), show_setting("micro_batch", 8)
    ('bf16', 'compile=on', 'micro_batch=8')
    """
    is_descriptive = isinstance(value, str) and value not in ("on", "off")
    return str(value) if is_descriptive else f"{setting}={format_value(value)}"


def describe_timing(name: str, timing: PairedTiming) -> str:
    """Describe the timing of a candidate that did not win."""
    result = timing.estimate
    if result is None:
        return f"{name}: no time for even one pair of steps"
    if timing.outcome == "cut off":
        return f"{name} was about {1 / result.speedup:.0f}x slower in its first step, stopped"
    note = "" if timing.is_stable else "; the machine is not quiet"
    if timing.outcome == "unclear":
        return f"{name}: too few or too noisy repeats to be sure ({describe_interval(result)}){note}"
    if not is_slower(timing.log_ratios):
        return f"{name} brings no gain here ({describe_interval(result)}){note}"
    times = 1 / result.speedup
    slower = f"{times:.1f}x slower" if times >= 2 else f"{format_percent(times - 1)} slower"
    return f"{name} was {slower} here ({_repeats(result)}){note}"


def describe_gain(result: SpeedupEstimate, before: str) -> str:
    """Describe a candidate that was faster than the previous best value."""
    return f"{result.speedup:.2f}x as fast as {before} ({_repeats(result)})"


def describe_interval(result: SpeedupEstimate) -> str:
    """Describe a speedup with its confidence interval."""
    return f"{result.speedup:.2f}x, {result.low:.2f}x to {result.high:.2f}x in {_count(result)}"


def describe_timeout(name: str, *, seconds: float, usual: float) -> str:
    """Describe a candidate whose preparation exceeded its timeout."""
    return f"{name} was not ready after {format_seconds(seconds)}, stopped (baseline: {format_seconds(usual)})"


def _describe_briefly(trial: TuneTrial) -> str:
    """Describe a trial in a few words, for a list of trials of one setting."""
    value = trial.settings[trial.setting]
    short = format_value(value)
    if trial.verdict in ("no gain", "unclear") and trial.speedup is not None:
        return f"{short}: {trial.speedup:.2f}x"
    if trial.verdict == "cut off" and trial.speedup is not None:
        return f"{short}: about {1 / trial.speedup:.0f}x slower"
    return f"{short}: {trial.note.removeprefix(show_setting(trial.setting, value)).lstrip(' :')}"


def _count(result: SpeedupEstimate) -> str:
    return f"{result.pairs} repeat{'' if result.pairs == 1 else 's'}"


def _repeats(result: SpeedupEstimate) -> str:
    return f"{_count(result)}, spread {format_percent(result.spread)}"
