"""Suggestions for the next run, each backed by a measurement of this run or of its plan."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_seconds
from whet.plan.render import format_value
from whet.plan.setting import TuneTrial
from whet.report.evaluation import Evaluation
from whet.report.plan_evidence import plan_setting
from whet.report.tracks import PhaseTime

if TYPE_CHECKING:
    from whet.report.run_report import RunReport

# Shares of the training time. A phase that takes more is worth a suggestion.
_HIGH_DATA_SHARE, _HIGH_EVAL_SHARE, _HIGH_SAVE_SHARE = 0.15, 0.25, 0.05
_HIGH_HEAT_SHARE = 0.2
# In a shorter run, heat and checkpoints do not matter.
_SHORT_SECONDS = 30.0
_NEARLY_FULL = 0.9
_MIN_EVALUATIONS = 3
# A trained model that is better than a trivial one by less has learned little.
_SMALL_GAIN = 0.02
# Suffixes of metrics for which lower values are better.
_LOWER_IS_BETTER = ("loss", "cross_entropy", "perplexity", "error")


class Advice(FrozenModel):
    """A suggestion, with the measurement that supports it."""

    try_: str
    measured: str
    """Measurement that supports the suggestion."""


def suggest(report: "RunReport", plan: Mapping[str, Any], trials: Sequence[TuneTrial]) -> tuple[Advice, ...]:
    """Return the suggestions, most promising first."""
    phases = {phase.name: phase for phase in report.phases}
    unused = tuple(_unused_gains(plan, trials))
    return (
        *unused,
        *(_data(phases.get("data"), trials) if not unused else ()),
        *_too_short(trials),
        *_unclear(trials),
        *_evaluating_and_saving(report, phases),
        *_near_baseline(report),
        *_overfitting(report),
        *_heat(report),
        *_memory(report),
        *_fallbacks(report),
    )


def _unused_gains(plan: Mapping[str, Any], trials: Sequence[TuneTrial]) -> Iterator[Advice]:
    """Yield values that measured faster than the user's override."""
    for trial in trials:
        setting, faster = plan_setting(plan, trial.setting), trial.settings.get(trial.setting)
        is_override = setting.get("source") == "you" and setting.get("value") != faster
        if trial.verdict == "faster" and trial.setting != "plan" and is_override:
            used = format_value(setting.get("value"))
            text = f"{trial.setting}={format_value(faster)} instead of {used}, which you asked for"
            yield Advice(try_=text, measured=trial.note)


def _data(phase: PhaseTime | None, trials: Sequence[TuneTrial]) -> Iterator[Advice]:
    if phase is None or phase.share < _HIGH_DATA_SHARE:
        return
    took = f"waiting for data took {100 * phase.share:.0f} % of the time of the steps"
    better = [t for t in trials if t.setting in ("workers", "data_location") and (t.speedup or 0) > 1 and t.interval]
    best = max(better, key=lambda trial: trial.speedup or 0.0, default=None)
    if best is None:
        yield Advice(try_="more data workers, or less work per sample", measured=took)
        return
    value = format_value(best.settings.get(best.setting))
    yield Advice(try_=f"{best.setting}={value}", measured=f"{took}; {best.setting}={value} was {best.speedup:.2f}x")


def _too_short(trials: Sequence[TuneTrial]) -> Iterator[Advice]:
    for trial in trials:
        if trial.verdict != "not worth it" or not (trial.median_seconds and trial.baseline_seconds):
            continue
        saved = trial.baseline_seconds - trial.median_seconds
        if saved <= 0 or not trial.preparation_seconds:
            continue
        value = f"{trial.setting}={format_value(trial.settings.get(trial.setting))}"
        num_steps = math.ceil(trial.preparation_seconds / saved)
        costs = f"{format_seconds(trial.preparation_seconds)} to prepare, saves {format_seconds(saved)} in each step"
        yield Advice(try_=f"{value} in a run of more than {num_steps:,} steps", measured=costs)


def _unclear(trials: Sequence[TuneTrial]) -> Iterator[Advice]:
    unclear = [t for t in trials if t.verdict == "unclear" and t.interval and t.interval[1] > 1.1]
    if unclear:
        names = ", ".join(dict.fromkeys(f"{t.setting}={format_value(t.settings.get(t.setting))}" for t in unclear[:3]))
        best = max(unclear, key=lambda trial: trial.interval[1] if trial.interval else 0.0)
        yield Advice(
            try_=f"measuring longer (`whet plan --measure --budget 120`): no clear result for {names}",
            measured=best.note,
        )


def _evaluating_and_saving(report: "RunReport", phases: Mapping[str, PhaseTime]) -> Iterator[Advice]:
    evaluating, saving = phases.get("evaluate"), phases.get("save")
    count = len(report.evaluations)
    if evaluating is not None and evaluating.share > _HIGH_EVAL_SHARE and count >= _MIN_EVALUATIONS:
        interval = max(1, report.step // count)
        took = f"{count:,} evaluations took {100 * evaluating.share:.0f} % of the time"
        yield Advice(try_=f"eval_every={2 * interval}: half as many", measured=took)
    is_long = report.training_seconds > _SHORT_SECONDS
    if saving is not None and saving.share > _HIGH_SAVE_SHARE and report.saving.count > 1 and is_long:
        took = f"{report.saving.count:,} saves paused training for {100 * saving.share:.0f} % of the time"
        yield Advice(try_="checkpoint_minutes or checkpoint_steps twice as large", measured=took)


def _near_baseline(report: "RunReport") -> Iterator[Advice]:
    """Yield a suggestion if a trivial model is nearly as good, or better, on the test split."""
    tested = report.metrics.get(f"test_{report.goal}")
    if tested is None or not report.baseline or report.goal_mode != "max":
        return
    name, best = max(report.baseline.items(), key=lambda pair: pair[1])
    if tested < best + _SMALL_GAIN:
        compared = f"{name} has a {report.goal} of {best:.4g} on the test split, this model {tested:.4g}"
        yield Advice(try_="more data, a check of the data, or a pretrained model", measured=compared)


def _overfitting(report: "RunReport") -> Iterator[Advice]:
    """Yield a suggestion if evaluations got worse while the training loss kept falling."""
    first, last_loss = report.first_loss, report.loss
    if first is None or last_loss is None or not last_loss < first:
        return
    names = {name for evaluation in report.evaluations for name in evaluation.metrics if not name.startswith("test_")}
    for name in sorted(name for name in names if name.endswith(_LOWER_IS_BETTER)):
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
    seconds = sum(period.to_seconds - period.from_seconds for period in hot)
    if seconds > max(_SHORT_SECONDS, _HIGH_HEAT_SHARE * report.training_seconds):
        share = 100 * seconds / report.training_seconds
        yield Advice(
            try_="a cooler place, or closing other programs; then on_heat=pause if it does not help",
            measured=f"for {share:.0f} % of the time: {hot[-1].reason}",
        )


def _memory(report: "RunReport") -> Iterator[Advice]:
    for track in report.tracks:
        limit, used = track.line("memory/limit"), track.line("memory/peak") or track.line("memory/allocated")
        if limit is None or used is None:
            continue
        pairs = [(u, m) for u, m in zip(used.high or used.mean, limit.mean, strict=True) if u and m]
        fullest = max(pairs, key=lambda pair: pair[0] / pair[1], default=None)
        if fullest is not None and fullest[0] > _NEARLY_FULL * fullest[1]:
            measured = f"{format_bytes(fullest[0])} of {format_bytes(fullest[1])} were in use"
            yield Advice(try_="a smaller micro_batch, or activation_checkpointing=on", measured=measured)
            return


def _fallbacks(report: "RunReport") -> Iterator[Advice]:
    for incident in report.incidents:
        operators = incident.fields.get("operators")
        if incident.kind == "fallback" and isinstance(operators, Mapping) and operators:
            names = ", ".join(list(operators)[:3])
            measured = incident.fields.get("reason") or f"{len(operators)} operators ran on the CPU"
            yield Advice(
                try_=f"other operators than {names} in the model (`whet check` names the lines)", measured=measured
            )
            return
