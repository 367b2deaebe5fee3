"""The plan of a run in a report: settings, their measurements, and planned versus actual figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from whet.base.model import FrozenModel
from whet.plan.estimate import measured_step_seconds
from whet.plan.render import format_value
from whet.plan.setting import Scalar, TuneTrial
from whet.report.tracks import NON_STEP_PHASES
from whet.run.event import as_number

if TYPE_CHECKING:
    from whet.report.run_report import RunReport

MAX_TRIALS = 200


class ReportSetting(FrozenModel):
    """One setting of the plan, as the report shows it."""

    name: str
    value: Any
    reason: str
    source: str
    evidence: Any = None


class TrialEvidence(TuneTrial):
    """A candidate of a measurement, and whether the run used it."""

    label: str
    """Settings of the candidate, as text."""
    baseline: str
    """Settings that the candidate was timed against, as text."""
    chosen: bool


class SettingEvidence(FrozenModel):
    """All trials of one setting, or of whole plans."""

    setting: str
    value: str
    """Value that the run used, or empty for whole plans."""
    trials: tuple[TrialEvidence, ...]


class PlannedVsActual(FrozenModel):
    """A planned figure and its actual value. None means that it was not planned, or is not known yet."""

    name: str
    unit: Literal["seconds", "bytes", "samples/s", "steps"]
    planned: float | None
    actual: float | None
    is_comparable: bool = True
    """Whether both values measure the same, so that their ratio is meaningful."""
    note: str
    """How both values were obtained."""


def plan_settings(plan: Mapping[str, Any]) -> tuple[ReportSetting, ...]:
    """Return the settings of a plan.json, except malformed ones."""
    settings = plan.get("settings")
    return tuple(
        ReportSetting(
            name=name,
            value=setting.get("value"),
            reason=str(setting.get("reason") or ""),
            source=str(setting.get("source") or ""),
            evidence=setting.get("evidence"),
        )
        for name, setting in (settings.items() if isinstance(settings, Mapping) else ())
        if isinstance(setting, Mapping)
    )


def plan_setting(plan: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return one setting of a plan.json, or an empty mapping if it is missing."""
    settings = plan.get("settings")
    setting = settings.get(name) if isinstance(settings, Mapping) else None
    return setting if isinstance(setting, Mapping) else {}


def plan_trials(plan: Mapping[str, Any]) -> tuple[TuneTrial, ...]:
    """Return the trials of a plan.json, except those that this version cannot read."""
    trials: list[TuneTrial] = []
    listed = plan.get("trials")
    for entry in listed if isinstance(listed, list | tuple) else ():
        try:
            trials.append(TuneTrial.model_validate(entry))
        except ValidationError:
            continue
    return tuple(trials[:MAX_TRIALS])


def setting_evidence(plan: Mapping[str, Any], trials: Sequence[TuneTrial]) -> tuple[SettingEvidence, ...]:
    """Return the trials grouped by setting, in the order of measurement, with comparisons of whole plans last."""
    names = sorted(dict.fromkeys(trial.setting for trial in trials), key=lambda name: name == "plan")
    return tuple(
        SettingEvidence(
            setting=name,
            value="" if name == "plan" else format_value(plan_setting(plan, name).get("value")),
            trials=tuple(_trial_evidence(trial, plan) for trial in trials if trial.setting == name),
        )
        for name in names
    )


def _trial_evidence(trial: TuneTrial, plan: Mapping[str, Any]) -> TrialEvidence:
    return TrialEvidence(
        **dict(trial),
        label=_settings_text(trial.settings, first=trial.setting) or "the rules",
        baseline=_settings_text(trial.against, first=trial.setting) or "the rules",
        chosen=all(plan_setting(plan, name).get("value") == value for name, value in trial.settings.items()),
    )


def _settings_text(settings: Mapping[str, Scalar], *, first: str) -> str:
    names = sorted(settings, key=lambda name: name != first)
    return ", ".join(f"{name}={format_value(settings[name])}" for name in names)


def planned_vs_actual(
    report: "RunReport", plan: Mapping[str, Any], trials: Sequence[TuneTrial]
) -> tuple[PlannedVsActual, ...]:
    """Return the figures that were planned before the run or that are known by now."""
    workload = plan.get("workload")
    workload = workload if isinstance(workload, Mapping) else {}
    step, batch = measured_step_seconds(trials), as_number(workload.get("global_batch_size"))
    num_steps = as_number(workload.get("num_steps"))
    spent = sum(phase.seconds for phase in report.phases if phase.name not in NON_STEP_PHASES)
    prepared = max((trial.preparation_seconds or 0.0 for trial in trials if trial.setting == "plan"), default=0.0)
    is_cpu = plan_setting(plan, "device").get("value") == "cpu"
    figures = (
        PlannedVsActual(
            name="speed",
            unit="samples/s",
            planned=batch / step if batch and step else None,
            actual=report.samples / spent if report.samples and spent > 0 else None,
            note="steps timed before the run, against all steps of the run; without evaluations and saves",
        ),
        PlannedVsActual(
            name="time of all steps",
            unit="seconds",
            planned=prepared + step * num_steps if step and num_steps else None,
            actual=spent if report.state == "done" and spent > 0 else None,
            note="the timed step times the number of steps; without evaluations and saves",
        ),
        PlannedVsActual(
            name="memory of a step",
            unit="bytes",
            planned=_planned_bytes(plan, trials),
            actual=peak_memory(report),
            is_comparable=not is_cpu,
            note="tensors of one step, against "
            + ("the whole process with Python and torch" if is_cpu else "the peak memory of tensors"),
        ),
        PlannedVsActual(
            name="steps",
            unit="steps",
            planned=float(report.total_steps) if report.total_steps else None,
            actual=float(report.step) if report.step else None,
            note="from the data and the number of epochs, against the steps that were made",
        ),
    )
    return tuple(figure for figure in figures if figure.planned is not None or figure.actual is not None)


def peak_memory(report: "RunReport") -> float | None:
    """Return the peak memory in bytes of tensors, or of the process if the device has no such counter."""
    seen = [float(epoch.memory_bytes) for epoch in report.epochs if epoch.memory_bytes]
    for track in report.tracks:
        for name in ("memory/peak", "memory/allocated"):
            line = track.line(name)
            seen += [value for value in (line.high or line.mean if line else ()) if value is not None]
    return max(seen, default=None)


def _planned_bytes(plan: Mapping[str, Any], trials: Sequence[TuneTrial]) -> float | None:
    measured = [trial.peak_bytes for trial in trials if trial.setting == "plan" and trial.peak_bytes]
    if measured:
        return float(measured[-1])
    evidence = plan_setting(plan, "micro_batch").get("evidence")
    return as_number(evidence.get("step_bytes")) if isinstance(evidence, Mapping) else None
