"""The report of a run with everything a page shows."""

from pathlib import Path
from typing import Any

from whet.base.version import VERSION
from whet.report.advice import Advice, suggest
from whet.report.evaluation import EvaluationDetails, evaluation_details
from whet.report.plan_evidence import PlannedVsActual, SettingEvidence, plan_trials, planned_vs_actual, setting_evidence
from whet.report.run_report import Provenance, RunReport, provenance, summarize
from whet.report.timeline import (
    SessionSpan,
    SlowPeriod,
    TimelineEntry,
    TrainingClock,
    session_spans,
    slow_periods,
    timeline,
)
from whet.report.tracks import PhaseTime, Source, Track, phase_times, tracks
from whet.run.curve import Curve
from whet.run.events import History
from whet.run.folder import Run, open_run
from whet.run.strict_json import StrictModel

POINTS = 600
_MOST_EVALUATIONS = 500
_MOST_HAPPENINGS = 100

FORMAT_VERSION = 1


class RunView(StrictModel):
    """All there is to see of a run."""

    format_version: int = FORMAT_VERSION
    whet: str = VERSION
    """The version that made this view."""
    name: str
    """Of the run folder."""
    report: RunReport
    """The summary: its path is the name alone, what `tracks` and `evaluation_details` hold is left out, its lists have limits."""
    tracks: tuple[Track, ...]
    sittings: tuple[SessionSpan, ...]
    spells: tuple[SlowPeriod, ...]
    moments: tuple[TimelineEntry, ...]
    moments_left_out: int
    """Between the first and the last ones."""
    phases: tuple[PhaseTime, ...]
    evidence: tuple[SettingEvidence, ...]
    foretold: tuple[PlannedVsActual, ...]
    findings: EvaluationDetails
    origin: Provenance
    advice: tuple[Advice, ...]
    cautions: tuple[str, ...]
    """What the plan said to beware of."""

    def track(self, source: Source) -> Track | None:
        """The curves of events of one kind; None where there are none."""
        return next((track for track in self.tracks if track.source == source), None)


def run_view(run: Run | Path | str, *, history: History | None = None, points: int = POINTS) -> RunView:
    """The view of a run as its folder is now; curves have at most `points` points.

    `history` saves reading the log again where it was read already.
    """
    run = run if isinstance(run, Run) else open_run(run)
    history = history if history is not None else History(run)
    report = summarize(run, history=history)
    sat = session_spans(history)
    clock = TrainingClock(sat)
    drawn = tracks(history, points=points, is_growing=report.state == "running")
    trials = plan_trials(run.plan)
    spent, bad_spells = phase_times(report.seconds), slow_periods(history, clock)
    told, left_out = timeline(history, clock)
    return RunView(
        name=run.path.name,
        report=_without_what_is_elsewhere(report),
        tracks=drawn,
        sittings=sat,
        spells=bad_spells,
        moments=told,
        moments_left_out=left_out,
        phases=spent,
        evidence=setting_evidence(run.plan, trials),
        foretold=planned_vs_actual(report, run.plan, trials, drawn),
        findings=evaluation_details(history),
        origin=provenance(run),
        advice=suggest(report, run.plan, trials, phases=spent, spells=bad_spells, tracks=drawn),
        cautions=_cautions(run.plan),
    )


def _without_what_is_elsewhere(report: RunReport) -> RunReport:
    curve = Curve(field="loss", points=(), last_step=report.loss.curve.last_step)
    return report.model_copy(
        update={
            "path": Path(report.path.name),
            "classes": (),
            "loss": report.loss.model_copy(update={"curve": curve}),
            "evaluations": report.evaluations[-_MOST_EVALUATIONS:],
            "happenings": report.happenings[-_MOST_HAPPENINGS:],
        }
    )


def _cautions(plan: dict[str, Any]) -> tuple[str, ...]:
    said = plan.get("warnings")
    return tuple(str(line) for line in said) if isinstance(said, list | tuple) else ()
