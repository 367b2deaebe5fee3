"""Set up a run: RunConfig is what was asked for, RunContext is what was made from it."""

import dataclasses
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.checkpoint import store
from whet.data.columns import as_columns
from whet.device import mps
from whet.device.open import current_machine
from whet.distributed.group import RankGroup, current_group
from whet.distributed.ranks import check_not_mps, read_rank_info
from whet.plan.plan import Plan, make_plan, read_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run import durable, lock
from whet.run.events import EventLog, History
from whet.run.folder import Run, create_run, installed_versions, open_run, rewrite_parts
from whet.step.model_contexts import deterministic
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.optimizers import OptimizerChoice
from whet.training import checkpointer
from whet.training.building import TrainingParts, build
from whet.training.callbacks.event_log import EventHandler, Recorder
from whet.training.checkpointer import Checkpointer
from whet.training.checks import check_overrides_with_plan, parse_allow
from whet.training.executor import Executor
from whet.training.resume import find_starting_point, run_exists
from whet.training.training_config import TrainingConfig
from whet.training.weights import load_weights
from whet.training.workload import describe_workload
from whet.verify.trainable import OutputFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """A model, its data, how it is trained, and in which run."""

    model: nn.Module
    optimizer: Optimizer | OptimizerChoice
    data: Any
    training: TrainingConfig
    workload: Workload
    overrides: Mapping[str, Scalar]
    plan: Plan | None = None
    """For a new run, if it was made before."""
    path: Path | None = None
    """The run folder."""
    recipe: str = "session"
    command: list[str] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    allow: tuple[str, ...] = ()
    init_from: str | Path | None = None
    attach: Mapping[str, bytes] = field(default_factory=dict)
    """Files that a new run folder holds from the start."""
    outputs: OutputFunction | None = None
    """Given for a causal model."""


def make_run_config(
    model: nn.Module,
    optimizer: Optimizer | OptimizerChoice,
    data: Any,
    training: TrainingConfig,
    *,
    run: str | Path | None = None,
    device: str = "auto",
    overrides: Mapping[str, Scalar] | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    recipe: str = "session",
    config: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    **rest: Any,
) -> RunConfig:
    """A request with what was left out filled in; `rest` are fields of it as they are."""
    check_overrides_with_plan(plan, overrides, device)
    world = read_rank_info()
    # Before the processes have met: none of them would get further.
    check_not_mps(
        world.size, device=str((overrides or {}).get("device", device)), is_mac=mps.mps_unavailable_reason() is None
    )
    chosen = {**(plan.overrides if plan else overrides or {}), **({} if device == "auto" else {"device": device})}
    if isinstance(optimizer, Optimizer):
        chosen["optimizer_kernels"] = "your optimizer"
    return RunConfig(
        model=model,
        optimizer=optimizer,
        data=data,
        training=training,
        workload=(workload or describe_workload(model, data, training, recipe=recipe)).model_copy(
            update={"world_size": world.size, "local_size": world.local_size}
        ),
        overrides=chosen,
        plan=plan,
        path=None if run is None else Path(run),
        recipe=recipe,
        config=training.as_json() if config is None else config,
        allow=parse_allow(allow),
        **rest,
    )


def plan_from_rules(asked: RunConfig) -> Plan:
    """The plan for it on this machine, before anything is measured."""
    machine, conditions = current_machine()
    return make_plan(machine, asked.workload, overrides=asked.overrides, conditions=conditions)


def is_rereadable(data: Any) -> bool:
    """A stream is used up by whoever reads it first."""
    return as_columns(data) is not None or callable(getattr(data, "__getitem__", None))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """What a session works with."""

    parts: TrainingParts
    run: Run | None
    is_new: bool
    found: store.LoadedCheckpoint | None
    """The checkpoint to go on from."""
    changes: tuple[str, ...]
    """Why the plan or the device is another than it was, or was asked for."""
    soundness: NonFiniteGuard
    recorder: Recorder
    execution: Executor
    keeper: Checkpointer | None


def setup(request: RunConfig, *, show: EventHandler | None, closing: ExitStack) -> RunContext:
    """Locks, plans, builds and opens; `closing` undoes all of it in turn."""
    model, training, path = request.model, request.training, request.path
    group = current_group()
    is_new = group.share(not run_exists(path))
    if path is not None and not is_new and group.is_first:
        # Locked before it is read: two processes must not go on with one run.
        closing.enter_context(lock.acquire(path))
    start = find_starting_point(
        path,
        request.workload,
        overrides=request.overrides,
        config=request.config,
        plan=request.plan,
        allow=request.allow,
    )
    # Of several processes all go by the plan of the first; nobody writes before all have read.
    start = dataclasses.replace(start, plan=_shared_plan(start.plan, group))
    if is_new and start.run is not None:
        raise UsageError("another process has just started this run", got=str(path), try_="another run folder")
    # Which part of a checkpoint a process needs is known once the model is in parts.
    is_in_parts = not group.is_alone and start.plan.sharding == "full"
    found = None if is_in_parts else _find_checkpoint(start.run, model, group)
    has_any = is_in_parts and start.run is not None and bool(group.share(store.list_steps(start.run.checkpoints)))
    if found is None and not has_any and request.init_from is not None:
        load_weights(request.init_from, model)
    closing.enter_context(deterministic(_is_on(start.plan, "deterministic")))
    parts = build(model, request.optimizer, request.data, training, start.plan, group=group)
    if is_in_parts:
        found = _find_checkpoint(start.run, model, group)
    # Left last: what ends before may still write to standard error.
    closing.enter_context(parts.device.monitor.watch(has_fallback=_is_on(parts.plan, "mps_fallback")))
    closing.callback(parts.source.close)
    run = start.run
    if run is None and path is not None and group.is_first:
        run = _create_run(path, request, parts.plan, closing=closing)
    group.wait()
    if run is None and path is not None:
        run = open_run(path)
    for name, content in request.attach.items():
        # Also into a run that was killed between its folder and these.
        if run is not None and group.is_first and not (run.path / name).exists():
            durable.write_file(run.path / name, data=content)
    log = None if run is None or not group.is_first else closing.enter_context(EventLog(run))
    soundness = NonFiniteGuard(
        has_scaler=parts.stepper.scaler.is_enabled(),
        earlier=() if start.run is None else History(start.run).events(kinds=("skip",)),
    )
    recorder = Recorder(log, parts.device, soundness=soundness, show=show if group.is_first else None)
    keeper = None
    if run is not None:
        batch = training.global_batch_size
        keeper = Checkpointer(run, parts, recorder, global_batch_size=batch, allow=request.allow)
        closing.callback(keeper.close)

    def write_plan(plan: Plan) -> None:
        soundness.has_scaler = parts.stepper.scaler.is_enabled()
        if run is not None and group.is_first:
            rewrite_parts(run, plan=plan.as_json())

    def note_inexact(step: int, reason: str) -> None:
        if keeper is not None:
            keeper.note_inexact(step, reason)

    execution = Executor(parts, recorder, write_plan=write_plan, note_inexact=note_inexact, outputs=request.outputs)
    closing.callback(execution.close)
    return RunContext(
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


def _find_checkpoint(run: Run | None, model: nn.Module, group: RankGroup) -> store.LoadedCheckpoint | None:
    return None if run is None else checkpointer.load_newest(run.checkpoints, model, group, run_id=run.header.id)


def _shared_plan(plan: Plan, group: RankGroup) -> Plan:
    return plan if group.is_alone else read_plan(group.share(plan.as_json()), where="the plan of the first process")


def _is_on(plan: Plan, switch: str) -> bool:
    """Whether a switch is on; a plan saved by an older whet may not know it."""
    setting = plan.settings.get(switch)
    return setting is not None and setting.value == "on"


def _create_run(path: Path, request: RunConfig, plan: Plan, *, closing: ExitStack) -> Run:
    made = create_run(
        path,
        recipe=request.recipe,
        config=request.config,
        plan=plan.as_json(),
        machine=plan.machine.as_json(),
        versions=installed_versions(),
        command=request.command,
    )
    closing.enter_context(lock.acquire(made.path))
    return made
