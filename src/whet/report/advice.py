"""Suggestions for the next run, each based on a measurement of this run or of its plan.

A suggestion about speed must save at least 5 % of the run. There are none for a failed run, or for less than a minute
of training.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.base.model import FrozenModel
from whet.plan.render import format_value
from whet.plan.setting import TuneTrial
from whet.report.evaluation import Evaluation
from whet.report.plan_evidence import plan_setting
from whet.report.tracks import NON_STEP_PHASES, PhaseTime
from whet.run.event import as_number

if TYPE_CHECKING:
    from whet.report.run_report import RunReport

_MIN_RUN_SECONDS = 60.0
_MIN_SAVING = 0.05
# Share of step time spent waiting for data. It is higher than _MIN_SAVING, because workers rarely save all of it.
_HIGH_DATA_SHARE = 0.15
_MIN_EVALUATIONS = 3
# A model that beats a trivial model by less than this has learned little.
_SMALL_GAIN = 0.02
# Suffixes of metrics that follow the training loss. Others, such as a calibration error, may rise in a good run.
_LOSSES = ("loss", "cross_entropy", "perplexity")


class Advice(FrozenModel):
    """A suggestion, with the measurement that supports it."""

    try_: str
    measured: str
    """Measurement that supports the suggestion."""


def suggest(report: "RunReport", plan: Mapping[str, Any], trials: Sequence[TuneTrial]) -> tuple[Advice, ...]:
    """Return the suggestions, most promising first."""
    if report.state == "failed" or report.training_seconds < _MIN_RUN_SECONDS:
        return ()
    phases = {phase.name: phase for phase in report.phases}
    step_share = sum(phase.share for phase in report.phases if phase.name not in NON_STEP_PHASES)
    unused = tuple(_unused_gains(plan, trials, step_share))
    return (
        *unused,
        *(_data(phases.get("data"), trials, step_share) if not unused else ()),
        *_evaluating_and_saving(report, phases),
        *_heat(report),
        *_fallbacks(report),
        *_near_baseline(report),
        *_overfitting(report),
    )


def _unused_gains(plan: Mapping[str, Any], trials: Sequence[TuneTrial], step_share: float) -> Iterator[Advice]:
    """Yield suggestions of values that were measured to be faster than the user's override."""
    for trial in trials:
        setting, faster = plan_setting(plan, trial.setting), trial.settings.get(trial.setting)
        is_override = setting.get("source") == "you" and setting.get("value") != faster
        if trial.verdict == "faster" and trial.setting != "plan" and is_override and _saves(trial, step_share):
            used = format_value(setting.get("value"))
            text = f"{trial.setting}={format_value(faster)} instead of {used}, which you asked for"
            yield Advice(try_=text, measured=trial.note)


def _saves(trial: TuneTrial, step_share: float) -> bool:
    """Return whether faster steps would shorten the run by at least _MIN_SAVING."""
    return trial.speedup is not None and (1 - 1 / max(1.0, trial.speedup)) * step_share >= _MIN_SAVING


def _data(phase: PhaseTime | None, trials: Sequence[TuneTrial], step_share: float) -> Iterator[Advice]:
    if phase is None or phase.share < _HIGH_DATA_SHARE:
        return
    took = f"waiting for data took {100 * phase.share:.0f} % of the time of the steps"
    tried = [trial for trial in trials if trial.setting in ("workers", "data_location") and trial.interval]
    best = max(tried, key=lambda trial: trial.speedup or 0.0, default=None)
    if best is None:
        yield Advice(try_="more data workers, or less work per sample", measured=took)
    elif not _saves(best, step_share):
        yield Advice(try_="less work per sample", measured=f"{took}, and no number of workers was clearly faster")
    else:
        value = f"{best.setting}={format_value(best.settings.get(best.setting))}"
        yield Advice(try_=value, measured=f"{took}; {value} was {best.speedup:.2f}x")


def _evaluating_and_saving(report: "RunReport", phases: Mapping[str, PhaseTime]) -> Iterator[Advice]:
    evaluating, saving = phases.get("evaluate"), phases.get("save")
    count = len(report.evaluations)
    if evaluating is not None and evaluating.share / 2 >= _MIN_SAVING and count >= _MIN_EVALUATIONS:
        interval = max(1, report.step // count)
        took = f"{count:,} evaluations took {100 * evaluating.share:.0f} % of the time"
        yield Advice(try_=f"eval_every={2 * interval}: half as many", measured=took)
    if saving is not None and saving.share / 2 >= _MIN_SAVING and report.saving.count > 1:
        took = f"{report.saving.count:,} saves paused training for {100 * saving.share:.0f} % of the time"
        yield Advice(try_="checkpoint_minutes or checkpoint_steps twice as large", measured=took)


def _near_baseline(report: "RunReport") -> Iterator[Advice]:
    """Yield a suggestion if a trivial model is nearly as good, or better, on the test split."""
    tested = report.metrics.get(f"test_{report.goal}")
    if tested is None or not report.baseline or report.goal_mode != "max":
        return
    name, best = max(report.baseline.items(), key=lambda pair: pair[1])
    if tested < best + _SMALL_GAIN:
        compared = f"on the test split, {name} reaches {report.goal} {best:.4g}, this model {tested:.4g}"
        yield Advice(try_="more data, a check of the data, or a pretrained model", measured=compared)


def _overfitting(report: "RunReport") -> Iterator[Advice]:
    """Yield a suggestion if evaluations got worse while the training loss kept falling."""
    first, last_loss = report.first_loss, report.loss
    if first is None or last_loss is None or not last_loss < first:
        return
    names = {name for evaluation in report.evaluations for name in evaluation.metrics if not name.startswith("test_")}
    for name in sorted(name for name in names if name.endswith(_LOSSES)):
        seen = [e for e in report.evaluations if name in e.metrics and math.isfinite(e.metrics[name])]
        if len(seen) < _MIN_EVALUATIONS:
            continue
        best, last = min(seen, key=lambda e: e.metrics[name]), seen[-1]
        since = seen[seen.index(best) + 1 :]
        if len(since) >= 2 and last.metrics[name] > 1.05 * best.metrics[name] > 0:
            lowest = f"{best.metrics[name]:.4g} at step {best.step:,}"
            rose = f"{name} was lowest, {lowest}, and is {last.metrics[name]:.4g} now, while the training loss fell"
            yield Advice(try_=_against_overfitting(report, best), measured=rose)
            return


def _against_overfitting(report: "RunReport", best: Evaluation) -> str:
    if report.goal is not None and report.best_goal_step == report.step:
        return f"more dropout, weight decay or data; not fewer steps: {report.goal} still improved"
    return f"fewer steps (about {best.step:,}), patience=2, or more dropout, weight decay or data"


def _heat(report: "RunReport") -> Iterator[Advice]:
    hot = [period for period in report.slow_periods if period.cause == "heat"]
    lost = sum((period.to_seconds - period.from_seconds) * (1 - 1 / period.factor) for period in hot)
    if lost >= _MIN_SAVING * report.training_seconds:
        yield Advice(
            try_="a cooler place, or closing other programs; then on_heat=pause if it does not help",
            measured=f"slow steps cost {100 * lost / report.training_seconds:.0f} % of the time: {hot[-1].reason}",
        )


def _fallbacks(report: "RunReport") -> Iterator[Advice]:
    for incident in report.incidents:
        operators = incident.fields.get("operators")
        if incident.kind != "fallback" or not isinstance(operators, Mapping) or not operators:
            continue
        timed = [as_number(one.get("seconds")) or 0.0 for one in operators.values() if isinstance(one, Mapping)]
        if sum(timed) * report.step >= _MIN_SAVING * report.training_seconds:
            names = ", ".join(list(operators)[:3])
            measured = incident.fields.get("reason") or f"{len(operators)} operators ran on the CPU"
            yield Advice(
                try_=f"other operators than {names} in the model (`whet check` names the lines)", measured=measured
            )
            return
