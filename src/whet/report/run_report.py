"""The report of a run: the data in its folder as one frozen value, which every renderer uses.

    report = summarize("runs/demo")
    report.track("step").line("loss").mean
    report.as_json()                        # what `whet report --json` prints

Lists use the base class `RunStatus`, which is cheap to read.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.base.version import VERSION
from whet.machine.facts import Machine
from whet.machine.render import machine_line
from whet.report.advice import Advice, suggest
from whet.report.evaluation import Evaluation, EvaluationDetails, evaluation_details, read_evaluations, tested_step
from whet.report.plan_evidence import (
    PlannedVsActual,
    ReportSetting,
    SettingEvidence,
    plan_settings,
    plan_trials,
    planned_vs_actual,
    setting_evidence,
)
from whet.report.run_status import RunStatus, estimate_seconds_left, read_status
from whet.report.timeline import (
    SessionSpan,
    SlowPeriod,
    TimelineEntry,
    TrainingClock,
    session_spans,
    slow_periods,
    timeline,
)
from whet.report.tracks import CurveSource, PhaseTime, Track, phase_times, tracks
from whet.run import strict_json
from whet.run.disk import read_regular_file
from whet.run.event import EVENT_KINDS, INCIDENT_KINDS, SESSION_START_KINDS, Event, as_number
from whet.run.events import History
from whet.run.folder import Run, open_run, resume_command
from whet.run.proof import proof_line, read_proof

FORMAT_VERSION = 2
POINTS = 600
_MAX_PAGE_EVALUATIONS = 500
_MAX_PAGE_INCIDENTS = 100
_MAX_END_TEXT = 10_000


class EpochSummary(FrozenModel):
    """The duration and memory of one pass over the data."""

    epoch: int
    seconds: float
    memory_bytes: int | None
    """Peak memory of tensors so far, or the memory of the process if the device has no such counter."""
    state_bytes: dict[str, int] = Field(default_factory=dict)
    """Bytes of weights, gradients and optimizer state between steps."""


class SavedCheckpoint(FrozenModel):
    """One checkpoint on disk."""

    name: str
    step: int
    size_bytes: int


class SavingCost(FrozenModel):
    """Number of checkpoints written, and the training time that they cost."""

    count: int = 0
    stall_seconds: float = 0.0
    """Seconds for which training was blocked."""
    slowed_seconds: float = 0.0
    """Extra seconds of steps during background writes of checkpoints."""

    @property
    def cost_seconds(self) -> float:
        """The training time that saving cost: blocked seconds plus slowed seconds."""
        return self.stall_seconds + self.slowed_seconds


class Incident(FrozenModel):
    """An event other than regular progress, with all its fields."""

    kind: str
    time: float
    step: int
    fields: dict[str, Any]


class Provenance(FrozenModel):
    """The information needed to reproduce a run."""

    command: str | None
    """Command that started the run, or None if it was started from Python."""
    config: dict[str, Any]
    seed: int | None
    data: str | None
    """Fingerprint of the training data, from the newest checkpoint."""
    num_samples: int | None
    versions: dict[str, str]
    machine: dict[str, Any]


class RunReport(RunStatus):
    """All data in the folder of a run."""

    format_version: int = FORMAT_VERSION
    reported_by: str = VERSION
    """Version of whet that made this report."""
    name: str
    """Name of the run folder."""
    whet: str
    """Version of whet that created the run."""
    created: float
    """Creation time in unix seconds, like all times in the report."""

    # The progress and the results of the run.
    epoch: float | None
    """Epoch of the newest step, counted from 0, or None before the first step."""
    samples: int | None
    first_loss: float | None
    best_loss: float | None
    best_loss_step: int | None
    """First step with the best loss."""
    best_goal: float | None = None
    best_goal_step: int | None = None
    evaluations: tuple[Evaluation, ...] = ()
    metrics: dict[str, float] = Field(default_factory=dict)
    """Newest value of every metric."""
    baseline: dict[str, float] = Field(default_factory=dict)
    """Goal metric of the recipe's trivial models on the test split, by name."""
    tested_step: int | None = None
    """Step of the tested weights, or None if it is not recorded."""
    details: EvaluationDetails = EvaluationDetails()
    epochs: tuple[EpochSummary, ...] = ()
    tracks: tuple[Track, ...] = ()

    # Where the time went.
    wall_seconds: float
    """Seconds from the first event to the last."""
    training_seconds: float
    """Seconds of all sessions, without the time between them."""
    seconds_left: float | None = None
    """Seconds until a running training ends, at its recent speed."""
    sessions: tuple[SessionSpan, ...] = ()
    phases: tuple[PhaseTime, ...] = ()
    """Time of the steps by phase."""
    slow_periods: tuple[SlowPeriod, ...] = ()
    timeline: tuple[TimelineEntry, ...] = ()
    timeline_omitted: int = 0
    """Number of entries omitted from the middle of the timeline."""
    incidents: tuple[Incident, ...] = ()

    # The plan and its measurements.
    settings: tuple[ReportSetting, ...] = ()
    warnings: tuple[str, ...] = ()
    evidence: tuple[SettingEvidence, ...] = ()
    planned_vs_actual: tuple[PlannedVsActual, ...] = ()
    advice: tuple[Advice, ...] = ()

    # How far the results can be trusted: proof, exactness, damage and the reason of the end.
    machine: str
    provenance: Provenance
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    saving: SavingCost = SavingCost()
    proof: str | None = None
    """Result of `whet prove` in one line, or None if it was not run."""
    inexact_since: int | None = None
    """Step since which the run is not bit-exact, or None if no inexact step was recorded."""
    exactness: str | None = None
    """What the last resume recorded about its exactness, or None if the run was never resumed."""
    inexact_reason: str | None = None
    damaged_lines: int = 0
    """Number of lines of events.jsonl that could not be read."""
    reason: str | None = None
    """Why the last session ended, or None while it is running."""
    traceback: str | None = None
    """Traceback of a failed run, or None."""
    resume: str | None = None
    """Command that resumes the run, or None if it is done or running."""

    @property
    def uptime(self) -> float | None:
        """Fraction of the wall time that was spent in sessions, or None if no time has passed."""
        return self.training_seconds / self.wall_seconds if self.wall_seconds > 0 else None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase of the steps, longest first."""
        return {phase.name: phase.seconds for phase in sorted(self.phases, key=lambda phase: -phase.seconds)}

    def track(self, source: CurveSource) -> Track | None:
        """Return the curves of one kind of event, or None if there are none."""
        return next((track for track in self.tracks if track.source == source), None)

    def for_page(self) -> Self:
        """Return a copy for a page, limited in size, and without the path of the run."""
        update = {
            "path": Path(self.name),
            "evaluations": self.evaluations[-_MAX_PAGE_EVALUATIONS:],
            "incidents": self.incidents[-_MAX_PAGE_INCIDENTS:],
        }
        return self.model_copy(update=update)


def summarize(run: Run | Path | str, *, history: History | None = None, points: int = POINTS) -> RunReport:
    """Return the report of a run from the current content of its folder.

    Pass `history` to avoid reading the log again. Curves have at most `points` points.
    """
    run = run if isinstance(run, Run) else open_run(run)
    history = history if history is not None else History(run)
    status = read_status(run, history=history)
    trials = plan_trials(run.plan)
    drawn = tracks(history, points=points, is_growing=status.state == "running")
    report = RunReport(
        **dict(status),
        name=run.path.name,
        whet=run.header.whet,
        created=run.header.created,
        tracks=drawn,
        details=evaluation_details(history),
        epochs=tuple(_epoch(event) for event in history.events(kinds=("epoch",))),
        settings=plan_settings(run.plan),
        warnings=_plan_warnings(run.plan),
        evidence=setting_evidence(run.plan, trials),
        machine=_machine_text(run),
        provenance=_provenance(run),
        checkpoints=_checkpoints(run.checkpoints),
        saving=_saving_cost(history),
        seconds_left=estimate_seconds_left(history, status),
        proof=_proof(run.path),
        damaged_lines=history.damaged,
        **({} if status.state == "running" else _end_fields(history)),
        resume=None if status.state in ("done", "running") else resume_command(run),
        **_progress_fields(history),
        **_result_fields(run, history, status=status),
        **_time_fields(history, speeds=_speeds(drawn)),
        **_exactness_fields(history),
    )
    # Compute these fields last, because they are derived from the rest of the report.
    figures = planned_vs_actual(report, run.plan, trials)
    report = report.model_copy(update={"planned_vs_actual": figures})
    return report.model_copy(update={"advice": suggest(report, run.plan, trials)})


def _progress_fields(history: History) -> dict[str, Any]:
    first, last = next(history.events(kinds=("step",)), None), history.last("step")
    # The index contains the best loss of each block, so only one block must be read to find its step.
    stats = ((block.stat("loss"), block) for block in history.step_blocks())
    losses = ((stat.least, block) for stat, block in stats if stat is not None and stat.count)
    best, block = min(losses, key=lambda pair: pair[0], default=(None, None))
    steps = (
        (e.step for e in history.read(block) if e.kind == "step" and e.number("loss") == best) if block else iter(())
    )
    samples = last.get("samples") if last else None
    return {
        "epoch": last.number("epoch") if last else None,
        "samples": samples if type(samples) is int else None,
        "first_loss": first.number("loss") if first else None,
        "best_loss": best,
        "best_loss_step": next(steps, None),
    }


def _result_fields(run: Run, history: History, *, status: RunStatus) -> dict[str, Any]:
    evaluations, goal = read_evaluations(history), status.goal
    # `x == x` excludes NaN, which must not become the best value.
    values = [(e.metrics[goal], e) for e in evaluations if goal in e.metrics and e.metrics[goal] == e.metrics[goal]]
    best = (max if status.goal_mode == "max" else min)(values, key=lambda pair: pair[0], default=None)
    baseline = run.metadata.get("baseline")
    numbers = {name: as_number(value) for name, value in baseline.items()} if isinstance(baseline, dict) else {}
    return {
        "best_goal": best[0] if best else None,
        "best_goal_step": best[1].step if best else None,
        "evaluations": evaluations,
        "metrics": {name: value for evaluation in evaluations for name, value in evaluation.metrics.items()},
        "baseline": {name: number for name, number in numbers.items() if number is not None},
        "tested_step": tested_step(history),
    }


def _speeds(drawn: tuple[Track, ...]) -> list[tuple[float, float]]:
    """Return the points of the speed curve as pairs (training seconds, samples per second)."""
    steps = next((track for track in drawn if track.source == "step"), None)
    speed = steps.line("samples_per_second") if steps is not None else None
    if steps is None or speed is None:
        return []
    return [(at, value) for at, value in zip(steps.seconds, speed.mean, strict=True) if value is not None]


def _time_fields(history: History, *, speeds: list[tuple[float, float]]) -> dict[str, Any]:
    sessions = session_spans(history)
    clock = TrainingClock(sessions)
    entries, omitted = timeline(history, clock)
    return {
        "wall_seconds": max(0.0, sessions[-1].ended - sessions[0].started) if sessions else 0.0,
        "training_seconds": sum(max(0.0, session.ended - session.started) for session in sessions),
        "sessions": sessions,
        "phases": phase_times(history),
        "slow_periods": slow_periods(history, clock, speeds),
        "timeline": entries,
        "timeline_omitted": omitted,
        "incidents": tuple(
            Incident(kind=event.kind, time=event.time, step=event.step, fields=dict(event.fields))
            for event in history.events(kinds=INCIDENT_KINDS)
        ),
    }


def _exactness_fields(history: History) -> dict[str, Any]:
    kinds = {kind for block in history.layout.blocks for kind in block.kinds} | EVENT_KINDS
    events = list(history.events(kinds=kinds - {"step", "health"}))
    claims = [str(e.get("exactness")) for e in events if e.kind == "resume" and e.get("exactness")]
    fields = {"exactness": claims[-1]} if claims else {}
    inexact = min((e for e in events if e.get("exact") is False), key=lambda event: event.step, default=None)
    if inexact is None:
        return fields
    reason = str(inexact.get("action") or inexact.get("reason") or inexact.kind)
    return {**fields, "inexact_since": inexact.step, "inexact_reason": reason}


def _epoch(event: Event) -> EpochSummary:
    memory, state, epoch = event.get("memory"), event.get("state_bytes"), event.get("epoch")
    used = [as_number(memory.get(name)) for name in ("peak", "allocated")] if isinstance(memory, Mapping) else []
    sizes = {str(name): as_number(value) for name, value in state.items()} if isinstance(state, Mapping) else {}
    return EpochSummary(
        epoch=epoch if type(epoch) is int else 0,
        seconds=event.number("epoch_seconds") or 0.0,
        memory_bytes=next((int(number) for number in used if number), None),
        state_bytes={name: int(size) for name, size in sizes.items() if size is not None and 0 <= size < float("inf")},
    )


def _saving_cost(history: History) -> SavingCost:
    events = list(history.events(kinds=("checkpoint",)))
    stalls = (event.number("stall_seconds") or event.number("seconds") or 0.0 for event in events)
    slowed = (event.number("slowed_seconds") or 0.0 for event in events)
    return SavingCost(count=len(events), stall_seconds=sum(stalls), slowed_seconds=sum(slowed))


def _checkpoints(folder: Path) -> tuple[SavedCheckpoint, ...]:
    checkpoints: list[SavedCheckpoint] = []
    for path in sorted(folder.glob("step-*")):
        name = re.fullmatch(r"step-(\d+)", path.name)
        if name and (path / "manifest.json").is_file():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            checkpoints.append(SavedCheckpoint(name=path.name, step=int(name[1]), size_bytes=size))
    return tuple(checkpoints)


def _provenance(run: Run) -> Provenance:
    seed, data = run.config.get("seed"), _data_facts(run.checkpoints)
    fingerprint, count = data.get("fingerprint"), data.get("num_samples")
    return Provenance(
        command=shlex.join(word for word in run.header.command if word != "--fresh") or None,
        config=run.config,
        seed=seed if type(seed) is int else None,
        data=fingerprint if isinstance(fingerprint, str) else None,
        num_samples=count if type(count) is int else None,
        versions={name: version for name, version in run.versions.items() if version is not None},
        machine=run.machine,
    )


def _data_facts(checkpoints: Path) -> dict[str, Any]:
    """Return the data facts in the newest readable checkpoint."""
    try:
        manifests = sorted(checkpoints.glob("step-*/manifest.json"), reverse=True)
    except OSError:
        return {}
    for path in manifests[:3]:
        try:
            info = strict_json.decode(read_regular_file(path)).get("info")
        except (OSError, ValueError, WhetError):
            continue
        data = info.get("data") if isinstance(info, dict) else None
        if isinstance(data, dict):
            return data
    return {}


def _machine_text(run: Run) -> str:
    workload = run.plan.get("workload")
    count = workload.get("world_size") if isinstance(workload, Mapping) else None
    processes = f", {count:,} processes" if isinstance(count, int) and count > 1 else ""
    try:
        return machine_line(Machine.from_json(dict(run.machine), where="machine.json")) + processes
    except UsageError:
        # Another version of whet may record other facts about a machine.
        return str(run.machine.get("chip") or run.machine.get("name") or "unknown") + processes


def _proof(folder: Path) -> str | None:
    try:
        proof = read_proof(folder)
    except WhetError as error:
        return f"{error.what}: {error.got}"
    return None if proof is None else proof_line(proof)


def _end_fields(history: History) -> dict[str, Any]:
    last = history.last(*SESSION_START_KINDS, "end")
    if last is None:
        return {}
    if last.kind != "end":
        return {"reason": "stopped: the process died"}
    fields = {"reason": last.get("reason"), "traceback": last.get("traceback")}
    return {name: str(value)[:_MAX_END_TEXT] for name, value in fields.items() if value}


def _plan_warnings(plan: Mapping[str, Any]) -> tuple[str, ...]:
    warnings = plan.get("warnings")
    return tuple(str(line) for line in warnings) if isinstance(warnings, list | tuple) else ()
