"""The model of a run: everything its folder says about it, as one frozen value."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.machine.facts import Machine
from whet.machine.render import machine_line
from whet.report.evaluation import ClassTable, evaluation_details
from whet.run import strict_json
from whet.run.curve import Curve, downsample_curve
from whet.run.disk import read_regular_file
from whet.run.event import EVENT_KINDS, INCIDENT_KINDS, SESSION_START_KINDS, Event, as_number
from whet.run.event_block import StatCounter
from whet.run.events import History
from whet.run.folder import Run, open_run
from whet.run.proof import proof_line, read_proof
from whet.run.prune import RunState, goal_name, run_state, total_steps
from whet.run.strict_json import StrictModel


class Provenance(FrozenModel):
    """What it takes to do a run again."""

    command: str | None
    """None: it was started from Python."""
    config: dict[str, Any]
    seed: int | None
    data: str | None
    """The fingerprint of the training data, as the newest checkpoint knows it."""
    num_samples: int | None
    versions: dict[str, str]
    machine: dict[str, Any]


def provenance(run: Run) -> Provenance:
    """From the files of the run; what is missing or unreadable is None."""
    seed = run.config.get("seed")
    data = _data_facts(run.checkpoints)
    fingerprint, count = data.get("fingerprint"), data.get("num_samples")
    return Provenance(
        command=shlex.join(word for word in run.header.command if word != "--fresh") or None,
        config=run.config,
        seed=seed if isinstance(seed, int) and not isinstance(seed, bool) else None,
        data=fingerprint if isinstance(fingerprint, str) else None,
        num_samples=count if isinstance(count, int) and not isinstance(count, bool) else None,
        versions={name: version for name, version in run.versions.items() if version is not None},
        machine=run.machine,
    )


def _data_facts(checkpoints: Path) -> dict[str, Any]:
    """What the newest checkpoint that can be read says about the data."""
    try:
        manifests = sorted(checkpoints.glob("step-*/manifest.json"), reverse=True)
    except OSError:
        return {}
    for path in manifests[:3]:
        try:
            about = strict_json.decode(read_regular_file(path)).get("about")
        except (OSError, ValueError, WhetError):
            continue
        data = about.get("data") if isinstance(about, dict) else None
        if isinstance(data, dict):
            return data
    return {}


class SavingCost(FrozenModel):
    """The checkpoints that were acknowledged, and the training time they took."""

    count: int = 0
    stall_seconds: float = 0.0
    """The training stood still."""
    slowed_seconds: float = 0.0
    """Steps took longer while a checkpoint was written beside them."""

    @property
    def cost_seconds(self) -> float:
        """Both together."""
        return self.stall_seconds + self.slowed_seconds


def saving_cost(history: History) -> SavingCost:
    """From the checkpoint events; those of an older whet say only how long a save took."""
    events = list(history.events(kinds=("checkpoint",)))
    stalls = (event.number("stall_seconds") or event.number("seconds") or 0.0 for event in events)
    slowed = (event.number("slowed_seconds") or 0.0 for event in events)
    return SavingCost(count=len(events), stall_seconds=sum(stalls), slowed_seconds=sum(slowed))


CURVE_POINTS = 400


class LossSummary(FrozenModel):
    """The training loss."""

    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    """Some step with the best loss."""
    curve: Curve


class Evaluation(FrozenModel):
    """One evaluation."""

    step: int
    time: float
    metrics: dict[str, float]


class GoalSummary(FrozenModel):
    """The metric that counts."""

    name: str
    higher_is_better: bool
    last: float | None
    best: float | None
    best_step: int | None


class EpochSummary(FrozenModel):
    """One pass over the data."""

    epoch: int
    seconds: float
    memory_bytes: int | None
    """The most that tensors took so far, or what the process holds where there is no such counter."""
    held: dict[str, int] = Field(default_factory=dict)
    """What weights, gradients and optimizer state take between steps, counted."""


class ReportSetting(FrozenModel):
    """One setting of the plan."""

    name: str
    value: Any
    reason: str
    source: str
    evidence: Any = None


class SavedCheckpoint(FrozenModel):
    """One checkpoint that is there."""

    name: str
    step: int
    size_bytes: int


class Incident(FrozenModel):
    """Something that was not a step going well."""

    kind: str
    time: float
    step: int
    details: dict[str, Any]


class RunReport(StrictModel):
    """All that a run folder says about its run."""

    path: Path
    recipe: str
    state: RunState
    created: float
    """Unix seconds, like all times here."""
    whet: str
    step: int
    total_steps: int | None
    epoch: float | None
    """Of the newest step, from 0 on."""
    samples: int | None
    wall_seconds: float
    """From the first event to the last."""
    training_seconds: float
    """The part of it in which a process was at work."""
    uptime: float | None = None
    """Training seconds over wall seconds; None before anything took time."""
    sittings: int
    loss: LossSummary
    evaluations: tuple[Evaluation, ...]
    goal: GoalSummary | None
    metrics: dict[str, float] = Field(default_factory=dict)
    """The newest value of every metric."""
    baseline: dict[str, float] = Field(default_factory=dict)
    """What the recipe compares the goal on the test part with, by name."""
    tested_step: int | None = None
    """Whose weights the test part judged, where a run says so."""
    classes: tuple[ClassTable, ...] = ()
    """Scores of each class in the newest evaluation of a part that tells them."""
    epochs: tuple[EpochSummary, ...] = ()
    settings: tuple[ReportSetting, ...]
    machine: str
    checkpoints: tuple[SavedCheckpoint, ...]
    saving: SavingCost = SavingCost()
    proof: str | None = None
    """What `whet prove` found, in one line; None where it was not asked."""
    happenings: tuple[Incident, ...]
    seconds: dict[str, float]
    """Where the time of the steps went, by name."""
    inexact_since: int | None
    """The step since which the run is not bit-exact; None: it is, as far as the run knows."""
    inexact_reason: str | None
    damaged_lines: int
    """Lines of events.jsonl that could not be read."""
    failure: str | None = None
    """Why the last sitting failed; None where it did not."""
    resume: str | None
    """The command that goes on with the run; None when it is done or running."""


def summarize(run: Run | Path | str, *, history: History | None = None) -> RunReport:
    """The report of a run, from what is in its folder now; `history` where its log was read already."""
    run = run if isinstance(run, Run) else open_run(run)
    history = history if history is not None else History(run)
    last_step = history.last("step")
    evaluations = tuple(_evaluation(event) for event in history.events(kinds=("eval",)))
    state = run_state(run, history=history)
    wall, training, sittings = _times(history)
    inexact = _first_inexact_event(history)
    return RunReport(
        path=run.path,
        recipe=run.header.recipe,
        state=state,
        created=run.header.created,
        whet=run.header.whet,
        step=last_step.step if last_step else 0,
        total_steps=total_steps(run, history=history),
        epoch=last_step.number("epoch") if last_step else None,
        samples=_whole(last_step.get("samples")) if last_step else None,
        wall_seconds=wall,
        training_seconds=training,
        uptime=training / wall if wall > 0 else None,
        sittings=sittings,
        loss=_loss(history, last_step=last_step),
        evaluations=evaluations,
        goal=_goal(history, evaluations=evaluations),
        metrics={name: value for evaluation in evaluations for name, value in evaluation.metrics.items()},
        baseline=_baseline(run),
        tested_step=_tested_step(history),
        classes=evaluation_details(history).classes,
        epochs=tuple(_epoch(event) for event in history.events(kinds=("epoch",))),
        settings=_settings(run.plan),
        machine=_machine_line(run.machine) + _processes(run.plan),
        checkpoints=_checkpoints(run.checkpoints),
        saving=saving_cost(history),
        proof=_proof(run.path),
        happenings=tuple(_incident(event) for event in history.events(kinds=INCIDENT_KINDS)),
        seconds=_seconds(history),
        inexact_since=inexact.step if inexact else None,
        inexact_reason=str(inexact.get("cure") or inexact.get("reason") or inexact.kind) if inexact else None,
        damaged_lines=history.damaged,
        failure=_failure(history) if state == "failed" else None,
        resume=None if state in ("done", "running") else resume_command(run),
    )


def _failure(history: History) -> str | None:
    end = history.last("end")
    return None if end is None else str(end.get("reason") or "") or None


def resume_command(run: Run) -> str:
    """The command that goes on with a run: the one that made it, naming the folder.

    `--fresh` is left out: it would begin anew.
    """
    words = [word for word in run.header.command if word != "--fresh"]
    if not words:
        return f"the same Python code again, with run={_relative_path(run.path)!r}"
    if not any(word == "--run" or word.startswith("--run=") for word in words):
        words += ["--run", _relative_path(run.path)]
    return shlex.join(words)


def _relative_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _loss(history: History, *, last_step: Event | None) -> LossSummary:
    first = next(history.events(kinds=("step",)), None)
    found = ((block.stat("loss"), block) for block in history.step_blocks())
    losses = ((stat.least, block) for stat, block in found if stat is not None and stat.count)
    best, best_block = min(losses, key=lambda pair: pair[0], default=(None, None))
    at_best = (event.step for event in history.read(best_block) if _has(event, best)) if best_block else iter(())
    return LossSummary(
        first=first.number("loss") if first else None,
        last=last_step.number("loss") if last_step else None,
        best=best,
        best_step=next(at_best, None),
        curve=downsample_curve(history, field="loss", points=CURVE_POINTS),
    )


def _has(event: Event, loss: float | None) -> bool:
    return event.kind == "step" and event.number("loss") == loss


def _evaluation(event: Event) -> Evaluation:
    numbers = {name: as_number(value) for name, value in event.fields.items()}
    metrics = {name: number for name, number in numbers.items() if number is not None}
    return Evaluation(step=event.step, time=event.time, metrics=metrics)


def _goal(history: History, *, evaluations: tuple[Evaluation, ...]) -> GoalSummary | None:
    name = goal_name(history)
    if name is None:
        return None
    said = (event.get("mode") for event in history.backwards(kinds=SESSION_START_KINDS))
    higher = next((word for word in said if word in ("max", "min")), "max") == "max"
    seen = [e for e in evaluations if name in e.metrics]
    comparable = [e for e in seen if e.metrics[name] == e.metrics[name]]  # NaN is no best value.
    best = (max if higher else min)(comparable, key=lambda e: e.metrics[name], default=None)
    return GoalSummary(
        name=name,
        higher_is_better=higher,
        last=seen[-1].metrics[name] if seen else None,
        best=best.metrics[name] if best else None,
        best_step=best.step if best else None,
    )


def _baseline(run: Run) -> dict[str, float]:
    said = run.kept.get("baseline")
    numbers = {name: as_number(value) for name, value in said.items()} if isinstance(said, dict) else {}
    return {name: number for name, number in numbers.items() if number is not None}


def _tested_step(history: History) -> int | None:
    said = (event.get("weights") for event in history.backwards(kinds=("eval",)))
    named = (re.fullmatch(r"step-(\d{1,18})", name) for name in said if isinstance(name, str))
    return next((int(name[1]) for name in named if name), None)


def _epoch(event: Event) -> EpochSummary:
    memory = event.get("memory")
    taken = [as_number(memory.get(name)) for name in ("peak", "allocated")] if isinstance(memory, Mapping) else []
    return EpochSummary(
        epoch=_whole(event.get("epoch")) or 0,
        seconds=event.number("epoch_seconds") or 0.0,
        memory_bytes=next((int(number) for number in taken if number), None),
        held=_state_bytes(event.get("held")),
    )


def _state_bytes(said: object) -> dict[str, int]:
    known = {str(name): as_number(value) for name, value in said.items()} if isinstance(said, Mapping) else {}
    return {name: int(value) for name, value in known.items() if value is not None and 0 <= value < float("inf")}


def _times(history: History) -> tuple[float, float, int]:
    """Wall seconds, seconds in which a process was at work, and how many processes there were, one after another."""
    sittings: list[list[float]] = []
    for block in history.layout.blocks:
        if not block.kinds:
            continue
        if not sittings or not SESSION_START_KINDS.isdisjoint(block.kinds):
            sittings.append([block.first_time, block.last_time])
        sittings[-1][1] = block.last_time
    if not sittings:
        return 0.0, 0.0, 0
    # The clock may have been set back in between.
    working = sum(max(0.0, end - start) for start, end in sittings)
    return max(0.0, sittings[-1][1] - sittings[0][0]), working, len(sittings)


def _proof(folder: Path) -> str | None:
    try:
        proof = read_proof(folder)
    except WhetError as error:
        return f"{error.what}: {error.got}"
    return None if proof is None else proof_line(proof)


def _seconds(history: History) -> dict[str, float]:
    sums: dict[str, StatCounter] = {}
    for block in history.step_blocks():
        for field in block.fields:
            if field.startswith("step/seconds/") and (stat := block.stat(field.removeprefix("step/"))) is not None:
                sums.setdefault(field.removeprefix("step/seconds/"), StatCounter()).merge(stat)
    totals = {name: counter.stat().total for name, counter in sums.items()}
    for event in history.events(kinds=("end",)):
        spent = event.get("seconds")
        for name, value in spent.items() if isinstance(spent, Mapping) else ():
            totals[name] = totals.get(name, 0.0) + (as_number(value) or 0.0)
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def _first_inexact_event(history: History) -> Event | None:
    seen = {kind for block in history.layout.blocks for kind in block.kinds} | EVENT_KINDS
    inexact = (event for event in history.events(kinds=seen - {"step", "health"}) if event.get("exact") is False)
    return min(inexact, key=lambda event: event.step, default=None)


def _incident(event: Event) -> Incident:
    return Incident(kind=event.kind, time=event.time, step=event.step, details=dict(event.fields))


def _settings(plan: Mapping[str, Any]) -> tuple[ReportSetting, ...]:
    settings = plan.get("settings")
    if not isinstance(settings, Mapping):
        return ()
    return tuple(
        ReportSetting(
            name=name,
            value=setting.get("value"),
            reason=str(setting.get("reason") or ""),
            source=str(setting.get("source") or ""),
            evidence=setting.get("evidence"),
        )
        for name, setting in settings.items()
        if isinstance(setting, Mapping)
    )


def _processes(plan: Mapping[str, Any]) -> str:
    """How many trained together, where it was more than one."""
    workload = plan.get("workload")
    count = workload.get("world_size") if isinstance(workload, Mapping) else None
    return f", {count:,} processes" if isinstance(count, int) and count > 1 else ""


def _machine_line(machine: Mapping[str, Any]) -> str:
    try:
        return machine_line(Machine.from_json(dict(machine), where="machine.json"))
    except UsageError:
        # Another version of whet may say more, or less, about a machine.
        return str(machine.get("chip") or machine.get("name") or "unknown")


def _checkpoints(folder: Path) -> tuple[SavedCheckpoint, ...]:
    found: list[SavedCheckpoint] = []
    for path in sorted(folder.glob("step-*")):
        name = re.fullmatch(r"step-(\d+)", path.name)
        if name and (path / "manifest.json").is_file():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            found.append(SavedCheckpoint(name=path.name, step=int(name[1]), size_bytes=size))
    return tuple(found)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
