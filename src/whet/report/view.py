"""What is there to see of a run? One frozen value that every page, file and program shows its own way.

    view = run_view("runs/demo")
    view.track("step").line("loss").mean

Its JSON (`as_json`) is what the HTML report and the live page draw. It leaves out where on your disk the run lies.
"""

from pathlib import Path
from typing import Any

from whet.base.version import VERSION
from whet.report.parts.advice import Advice, advice
from whet.report.parts.evidence import Evidence, evidence, trials_of
from whet.report.parts.findings import Findings, findings
from whet.report.parts.foresight import Foretold, foretold
from whet.report.parts.moments import Moment, moments
from whet.report.parts.origin import Origin, origin
from whet.report.parts.phases import Phase, phases
from whet.report.parts.spells import Spell, spells
from whet.report.parts.tracks import Source, Track, tracks
from whet.report.parts.work_clock import Sitting, WorkClock, sittings
from whet.report.summary import Report, summarize
from whet.run.events import History
from whet.run.folder import Run, open_run
from whet.run.strict_json import StrictRecord
from whet.run.thin import Curve

POINTS = 600
_MOST_EVALUATIONS = 500
_MOST_HAPPENINGS = 100

FORMAT_VERSION = 1


class RunView(StrictRecord):
    """All there is to see of a run."""

    format_version: int = FORMAT_VERSION
    whet: str = VERSION
    """The version that made this view."""
    name: str
    """Of the run folder."""
    report: Report
    """The summary: its path is the name alone, what `tracks` and `findings` hold is left out, its lists have limits."""
    tracks: tuple[Track, ...]
    sittings: tuple[Sitting, ...]
    spells: tuple[Spell, ...]
    moments: tuple[Moment, ...]
    moments_left_out: int
    """Between the first and the last ones."""
    phases: tuple[Phase, ...]
    evidence: tuple[Evidence, ...]
    foretold: tuple[Foretold, ...]
    findings: Findings
    origin: Origin
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
    sat = sittings(history)
    clock = WorkClock(sat)
    drawn = tracks(history, points=points, is_growing=report.state == "running")
    trials = trials_of(run.plan)
    spent, bad_spells = phases(report.seconds), spells(history, clock)
    told, left_out = moments(history, clock)
    return RunView(
        name=run.path.name,
        report=_without_what_is_elsewhere(report),
        tracks=drawn,
        sittings=sat,
        spells=bad_spells,
        moments=told,
        moments_left_out=left_out,
        phases=spent,
        evidence=evidence(run.plan, trials),
        foretold=foretold(report, run.plan, trials, drawn),
        findings=findings(history),
        origin=origin(run),
        advice=advice(report, run.plan, trials, phases=spent, spells=bad_spells, tracks=drawn),
        cautions=_cautions(run.plan),
    )


def _without_what_is_elsewhere(report: Report) -> Report:
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
    said = plan.get("cautions")
    return tuple(str(line) for line in said) if isinstance(said, list | tuple) else ()
