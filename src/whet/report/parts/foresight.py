"""What did the plan foretell, and what came?"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from whet.base.record import Record
from whet.plan.trial import Trial
from whet.report.parts.evidence import setting_value
from whet.report.parts.tracks import ASIDE, Track
from whet.report.summary import Report
from whet.run.event import as_number


class Foretold(Record):
    """One figure, as it was foretold and as it came; None: nobody said, or it is not known yet."""

    name: str
    unit: Literal["seconds", "bytes", "samples/s", "steps"]
    planned: float | None
    happened: float | None
    alike: bool = True
    """Both count the same things, so that their ratio means something."""
    words: str
    """Where both come from."""


def step_seconds(trials: Sequence[Trial]) -> float | None:
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


def foretold(
    report: Report, plan: Mapping[str, Any], trials: Sequence[Trial], tracks: Sequence[Track]
) -> tuple[Foretold, ...]:
    """The figures about which anything was said before or after."""
    workload = plan.get("workload")
    workload = workload if isinstance(workload, Mapping) else {}
    planned_step, batch = step_seconds(trials), as_number(workload.get("global_batch_size"))
    steps = as_number(workload.get("num_steps"))
    spent = sum(seconds for name, seconds in report.seconds.items() if name not in ASIDE)
    prepared = max((trial.preparation_seconds or 0.0 for trial in trials if trial.setting == "plan"), default=0.0)
    is_cpu = setting_value(plan, "device") == "cpu"
    figures = (
        Foretold(
            name="speed",
            unit="samples/s",
            planned=batch / planned_step if batch and planned_step else None,
            happened=report.samples / spent if report.samples and spent > 0 else None,
            words="steps timed before the run, beside all steps of the run; evaluations and saves are not in it",
        ),
        Foretold(
            name="time of all steps",
            unit="seconds",
            planned=prepared + planned_step * steps if planned_step and steps else None,
            happened=spent if report.state == "done" and spent > 0 else None,
            words="the timed step as often as the run makes it; evaluations and saves are not in it",
        ),
        Foretold(
            name="memory of a step",
            unit="bytes",
            planned=_planned_bytes(plan, trials),
            happened=_peak_bytes(report, tracks),
            alike=not is_cpu,
            words="tensors of one step, beside "
            + ("the whole process with Python and torch in it" if is_cpu else "the most that tensors took"),
        ),
        Foretold(
            name="steps",
            unit="steps",
            planned=float(report.total_steps) if report.total_steps else None,
            happened=float(report.step) if report.step else None,
            words="as the data and your epochs ask for, and as were made",
        ),
    )
    return tuple(figure for figure in figures if figure.planned is not None or figure.happened is not None)


def _planned_bytes(plan: Mapping[str, Any], trials: Sequence[Trial]) -> float | None:
    measured = [trial.peak_bytes for trial in trials if trial.setting == "plan" and trial.peak_bytes]
    if measured:
        return float(measured[-1])
    settings = plan.get("settings")
    setting = settings.get("micro_batch") if isinstance(settings, Mapping) else None
    said = setting.get("evidence") if isinstance(setting, Mapping) else None
    return as_number(said.get("step_bytes")) if isinstance(said, Mapping) else None


def _peak_bytes(report: Report, tracks: Sequence[Track]) -> float | None:
    seen = [float(epoch.memory_bytes) for epoch in report.epochs if epoch.memory_bytes]
    for track in tracks:
        for name in ("memory/peak", "memory/allocated"):
            line = track.line(name)
            seen += [value for value in (line.high or line.mean if line else ()) if value is not None]
    return max(seen, default=None)
