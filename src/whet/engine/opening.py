"""From a folder and a plan to all that a session works with; what is wrong is refused before a new folder appears."""

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from whet.base.errors import UsageError
from whet.checkpoint import store
from whet.engine import loading
from whet.engine.building import Parts, build
from whet.engine.execution import Execution
from whet.engine.keeper import Keeper
from whet.engine.reading import load_weights
from whet.engine.recorder import Recorder, Show
from whet.engine.request import Request
from whet.engine.soundness import Soundness
from whet.engine.starting import exists, find_start
from whet.engine.while_training import deterministic
from whet.plan.plan import Plan, read_plan
from whet.run import durable, lock
from whet.run.events import EventLog, History
from whet.run.folder import Run, create_run, open_run, rewrite, versions
from whet.world.group import Group, here


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What a session works with."""

    parts: Parts
    run: Run | None
    is_new: bool
    found: store.Found | None
    """The checkpoint to go on from."""
    changes: tuple[str, ...]
    """Why the plan or the device is another than it was, or was asked for."""
    soundness: Soundness
    recorder: Recorder
    execution: Execution
    keeper: Keeper | None


def open_session(request: Request, *, show: Show | None, closing: ExitStack) -> Opened:
    """Locks, plans, builds and opens; `closing` undoes all of it in turn."""
    model, training, path = request.model, request.training, request.path
    group = here()
    is_new = group.share(not exists(path))
    if path is not None and not is_new and group.is_first:
        # Locked before it is read: two processes must not go on with one run.
        closing.enter_context(lock.acquire(path))
    start = find_start(
        path,
        request.workload,
        wishes=request.wishes,
        config=request.config,
        plan=request.plan,
        allow=request.allow,
    )
    # Of several processes all go by the plan of the first; nobody writes before all have read.
    start = dataclasses.replace(start, plan=_agreed(start.plan, group))
    if is_new and start.run is not None:
        raise UsageError("another process has just started this run", got=str(path), try_="another run folder")
    # Which part of a checkpoint a process needs is known once the model is in parts.
    is_in_parts = not group.is_alone and start.plan.value("sharding") == "full"
    found = None if is_in_parts else _find(start.run, model, group)
    has_any = is_in_parts and start.run is not None and bool(group.share(store.steps(start.run.checkpoints)))
    if found is None and not has_any and request.init_from is not None:
        load_weights(request.init_from, model)
    closing.enter_context(deterministic(_has(start.plan, "deterministic")))
    parts = build(model, request.optimizer, request.data, training, start.plan, group=group)
    if is_in_parts:
        found = _find(start.run, model, group)
    # Left last: what ends before may still write to standard error.
    closing.enter_context(parts.device.guard(has_fallback=_has(parts.plan, "mps_fallback")))
    closing.callback(parts.source.close)
    run = start.run
    if run is None and path is not None and group.is_first:
        run = _create(path, request, parts.plan, closing=closing)
    group.wait()
    if run is None and path is not None:
        run = open_run(path)
    for name, content in request.attach.items():
        # Also into a run that was killed between its folder and these.
        if run is not None and group.is_first and not (run.path / name).exists():
            durable.write_file(run.path / name, data=content)
    log = None if run is None or not group.is_first else closing.enter_context(EventLog(run))
    soundness = Soundness(
        has_scaler=parts.stepper.scaler.is_enabled(),
        earlier=() if start.run is None else History(start.run).events(kinds=("skip",)),
    )
    recorder = Recorder(log, parts.device, soundness=soundness, show=show if group.is_first else None)
    keeper = None
    if run is not None:
        batch = training.global_batch_size
        keeper = Keeper(run, parts, recorder, global_batch_size=batch, allow=request.allow)
        closing.callback(keeper.close)

    def write_plan(plan: Plan) -> None:
        soundness.has_scaler = parts.stepper.scaler.is_enabled()
        if run is not None and group.is_first:
            rewrite(run, plan=plan.as_json())

    def note_inexact(step: int, reason: str) -> None:
        if keeper is not None:
            keeper.note_inexact(step, reason)

    execution = Execution(parts, recorder, write_plan=write_plan, note_inexact=note_inexact, outputs=request.outputs)
    closing.callback(execution.close)
    return Opened(
        parts=parts,
        run=run,
        is_new=is_new,
        found=found,
        changes=tuple(filter(None, (start.replanned, parts.fell_back))),
        soundness=soundness,
        recorder=recorder,
        execution=execution,
        keeper=keeper,
    )


def _find(run: Run | None, model: nn.Module, group: Group) -> store.Found | None:
    return None if run is None else loading.newest(run.checkpoints, model, group, run_id=run.header.id)


def _agreed(plan: Plan, group: Group) -> Plan:
    return plan if group.is_alone else read_plan(group.share(plan.as_json()), where="the plan of the first process")


def _has(plan: Plan, switch: str) -> bool:
    """Whether a switch is on; a plan saved by an older whet may not know it."""
    setting = plan.settings.get(switch)
    return setting is not None and setting.value == "on"


def _create(path: Path, request: Request, plan: Plan, *, closing: ExitStack) -> Run:
    made = create_run(
        path,
        recipe=request.recipe,
        config=request.config,
        plan=plan.as_json(),
        machine=plan.machine.as_json(),
        versions=versions(),
        command=request.command,
    )
    closing.enter_context(lock.acquire(made.path))
    return made
