"""Measurements behind the plan of a run, and planned against actual figures."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from whet.base.model import FrozenModel
from whet.plan.render import format_value
from whet.plan.setting import Scalar, TuneTrial
from whet.report.run_report import RunReport
from whet.report.tracks import NON_STEP_PHASES, Track
from whet.run.event import as_number

MAX_TRIALS = 200


class TrialEvidence(FrozenModel):
    """One value of a setting that was timed beside another."""

    label: str
    against: str
    verdict: str
    words: str
    chosen: bool
    """The run used it."""
    repeats: int
    speedup: float | None
    low: float | None
    high: float | None
    median_seconds: float | None
    rival_seconds: float | None
    preparation_seconds: float | None
    peak_bytes: int | None


class SettingEvidence(FrozenModel):
    """All candidates of one setting."""

    setting: str
    value: str
    """What the run used."""
    candidates: tuple[TrialEvidence, ...]


def plan_trials(plan: Mapping[str, Any]) -> tuple[TuneTrial, ...]:
    """The trials of a plan.json, without those that this whet cannot read."""
    found: list[TuneTrial] = []
    listed = plan.get("trials")
    for entry in listed if isinstance(listed, list | tuple) else ():
        try:
            found.append(TuneTrial.model_validate(entry))
        except ValidationError:
            continue
    return tuple(found[:MAX_TRIALS])


def setting_evidence(plan: Mapping[str, Any], trials: tuple[TuneTrial, ...]) -> tuple[SettingEvidence, ...]:
    """The trials by setting, in the order they were made; whole plans last."""
    names = list(dict.fromkeys(trial.setting for trial in trials))
    names.sort(key=lambda name: name == "plan")
    return tuple(
        SettingEvidence(
            setting=name,
            value="" if name == "plan" else format_value(setting_value(plan, name)),
            candidates=tuple(_trial_evidence(trial, plan) for trial in trials if trial.setting == name),
        )
        for name in names
    )


def setting_value(plan: Mapping[str, Any], name: str) -> Any:
    """The value of a setting in a plan.json; None where there is none."""
    settings = plan.get("settings")
    setting = settings.get(name) if isinstance(settings, Mapping) else None
    return setting.get("value") if isinstance(setting, Mapping) else None


def _trial_evidence(trial: TuneTrial, plan: Mapping[str, Any]) -> TrialEvidence:
    low, high = trial.interval if trial.interval is not None else (None, None)
    return TrialEvidence(
        label=_format_trial_settings(trial.settings, first=trial.setting) or "the rules",
        against=_format_trial_settings(trial.against, first=trial.setting) or "the rules",
        verdict=trial.verdict,
        words=trial.words,
        chosen=all(setting_value(plan, name) == value for name, value in trial.settings.items()),
        repeats=trial.repeats,
        speedup=trial.speedup,
        low=low,
        high=high,
        median_seconds=trial.median_seconds,
        rival_seconds=trial.rival_seconds,
        preparation_seconds=trial.preparation_seconds,
        peak_bytes=trial.peak_bytes,
    )


def _format_trial_settings(settings: Mapping[str, Scalar], *, first: str) -> str:
    names = sorted(settings, key=lambda name: name != first)
    return ", ".join(f"{name}={format_value(settings[name])}" for name in names)


class PlannedVsActual(FrozenModel):
    """One figure, as it was foretold and as it came; None: nobody said, or it is not known yet."""

    name: str
    unit: Literal["seconds", "bytes", "samples/s", "steps"]
    planned: float | None
    happened: float | None
    alike: bool = True
    """Both count the same things, so that their ratio means something."""
    words: str
    """Where both come from."""


def step_seconds(trials: Sequence[TuneTrial]) -> float | None:
    """The time of one step under the plan that was taken, as measured before the run; None where nothing was."""
    whole = [trial for trial in trials if trial.setting == "plan" and trial.median_seconds]
    if whole:
        last = whole[-1]
        return last.median_seconds if last.verdict == "faster" else last.rival_seconds
    won = [trial for trial in trials if trial.verdict in ("faster", "likely") and trial.median_seconds]
    if won:
        return won[-1].median_seconds
    by_rules = [trial.rival_seconds for trial in trials if not trial.against and trial.rival_seconds]
    return median(by_rules) if by_rules else None


def planned_vs_actual(
    report: RunReport, plan: Mapping[str, Any], trials: Sequence[TuneTrial], tracks: Sequence[Track]
) -> tuple[PlannedVsActual, ...]:
    """The figures about which anything was said before or after."""
    workload = plan.get("workload")
    workload = workload if isinstance(workload, Mapping) else {}
    planned_step, batch = step_seconds(trials), as_number(workload.get("global_batch_size"))
    steps = as_number(workload.get("num_steps"))
    spent = sum(seconds for name, seconds in report.seconds.items() if name not in NON_STEP_PHASES)
    prepared = max((trial.preparation_seconds or 0.0 for trial in trials if trial.setting == "plan"), default=0.0)
    is_cpu = setting_value(plan, "device") == "cpu"
    figures = (
        PlannedVsActual(
            name="speed",
            unit="samples/s",
            planned=batch / planned_step if batch and planned_step else None,
            happened=report.samples / spent if report.samples and spent > 0 else None,
            words="steps timed before the run, beside all steps of the run; evaluations and saves are not in it",
        ),
        PlannedVsActual(
            name="time of all steps",
            unit="seconds",
            planned=prepared + planned_step * steps if planned_step and steps else None,
            happened=spent if report.state == "done" and spent > 0 else None,
            words="the timed step as often as the run makes it; evaluations and saves are not in it",
        ),
        PlannedVsActual(
            name="memory of a step",
            unit="bytes",
            planned=_planned_bytes(plan, trials),
            happened=_peak_bytes(report, tracks),
            alike=not is_cpu,
            words="tensors of one step, beside "
            + ("the whole process with Python and torch in it" if is_cpu else "the most that tensors took"),
        ),
        PlannedVsActual(
            name="steps",
            unit="steps",
            planned=float(report.total_steps) if report.total_steps else None,
            happened=float(report.step) if report.step else None,
            words="as the data and your epochs ask for, and as were made",
        ),
    )
    return tuple(figure for figure in figures if figure.planned is not None or figure.happened is not None)


def _planned_bytes(plan: Mapping[str, Any], trials: Sequence[TuneTrial]) -> float | None:
    measured = [trial.peak_bytes for trial in trials if trial.setting == "plan" and trial.peak_bytes]
    if measured:
        return float(measured[-1])
    settings = plan.get("settings")
    setting = settings.get("micro_batch") if isinstance(settings, Mapping) else None
    said = setting.get("evidence") if isinstance(setting, Mapping) else None
    return as_number(said.get("step_bytes")) if isinstance(said, Mapping) else None


def _peak_bytes(report: RunReport, tracks: Sequence[Track]) -> float | None:
    seen = [float(epoch.memory_bytes) for epoch in report.epochs if epoch.memory_bytes]
    for track in tracks:
        for name in ("memory/peak", "memory/allocated"):
            line = track.line(name)
            seen += [value for value in (line.high or line.mean if line else ()) if value is not None]
    return max(seen, default=None)
