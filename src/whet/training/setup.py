"""Set up a run: lock the folder, plan, build and restore. setup() turns a RunConfig into a live RunContext."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.checkpoint.snapshot import check_encodable
from whet.config.options import SchedulerObject
from whet.data.adapters import check_dataset_size
from whet.data.split import RankShare
from whet.device.abstract import AbstractDevice
from whet.device.rng import seed_everything
from whet.distributed.group import RankGroup, current_group
from whet.distributed.strategies import ParallelStrategy
from whet.plan.plan import Plan, read_plan
from whet.plan.warnings import override_notes
from whet.run import durable, lock
from whet.run.event import SESSION_START_KINDS
from whet.run.events import AppendOnlyFile, EventLog, History
from whet.run.folder import (
    EVENTS_FILE,
    INDEX_FILE,
    RUN_FILE,
    Run,
    create_run,
    installed_versions,
    open_run,
    rewrite_parts,
    run_title,
)
from whet.step.apply_plan import (
    build_stepper,
    make_strategy,
    open_planned_device,
    open_planned_source,
    place_model,
)
from whet.step.model_contexts import large_heads
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.optimizer_kernels import kernel_obstacle
from whet.step.step import Stepper
from whet.training import checks
from whet.training.callback import Callback, CallbackList
from whet.training.callbacks.basic import CoreContention, EarlyStopping, GarbageCollection, KeepAwake
from whet.training.callbacks.checkpoint_schedule import CheckpointSchedule
from whet.training.callbacks.device_cache import DeviceCache
from whet.training.callbacks.event_log import Recorder
from whet.training.callbacks.health import Health
from whet.training.callbacks.thermal import ThermalPolicy
from whet.training.checkpointer import Checkpointer, load_newest
from whet.training.executor import Executor
from whet.training.optimizer_set import (
    RatesByName,
    config_for_optimizer,
    parameters_of_others,
)
from whet.training.progress import State
from whet.training.restore import RestoredRun, with_earlier_inexactness
from whet.training.resume import decide_resume, run_exists
from whet.training.resume_verification import ResumeVerification, find_earlier
from whet.training.run_config import RunConfig
from whet.training.run_context import RunContext
from whet.training.schedule import LearningRates, make_schedule
from whet.training.torch_schedule import make_learning_rates
from whet.training.unsaved_state import UnsavedStateDetector
from whet.training.weights import load_weights
from whet.training.workload import pad_token_id


def setup(config: RunConfig, state: State, exit_stack: ExitStack) -> RunContext:
    """Lock the run folder, then plan, build and restore the run. `exit_stack` undoes this in reverse order.

    Invalid input raises an error before a new run folder is created.
    """
    model, path = config.model, config.path
    group = current_group()
    is_new = group.broadcast(not run_exists(path))
    if path is not None and not is_new and group.is_rank_zero:
        # Lock before reading: two processes must not resume the same run.
        exit_stack.enter_context(lock.acquire(path))
    start = decide_resume(config)
    # All ranks use the plan of rank 0. The broadcast also ensures that every rank has read the folder before it
    # changes.
    plan = _plan_of_first_rank(start.plan, group)
    if is_new and start.run is not None:
        raise UsageError("another process has just started this run", got=str(path), try_="another run folder")
    # With sharding, the rows of the checkpoint that this rank needs are not known until the model has been sharded, so
    # the checkpoint is loaded after _build().
    is_sharded = not group.is_single_process and plan.sharding == "full"
    checkpoint = None if is_sharded else _find_checkpoint(start.run, model, group)
    has_any = is_sharded and start.run is not None and bool(group.broadcast(store.list_steps(start.run.checkpoints)))
    if checkpoint is None and not has_any and config.init_from is not None:
        load_weights(config.init_from, model)
    newest = None if checkpoint is None else checkpoint.step
    if checkpoint is not None and config.training.verify_resume and group.is_single_process:
        assert start.run is not None
        checkpoint = find_earlier(start.run, checkpoint.step) or checkpoint
    run, fallback_reason = _build(config, plan, group, state, exit_stack)
    run.is_new = is_new
    if checkpoint is not None and newest is not None and checkpoint.step < newest:
        run.verification = ResumeVerification(until=newest)
    if is_sharded:
        checkpoint = _find_checkpoint(start.run, model, group)
    # Enter this before registering the cleanup of data and services, which may still write to standard error. It is
    # then left after that cleanup.
    exit_stack.enter_context(run.device.monitor.watch(has_fallback=run.plan.mps_fallback == "on"))
    exit_stack.callback(run.source.close)
    if checkpoint is None:
        run.rates.check_length(state.total_steps)
    _open_folder(run, start.run)
    _add_services(run, start.run)
    # An invalid resume raises an error here, before the first write.
    restored = None if checkpoint is None or run.checkpointer is None else run.restore(checkpoint)
    if restored is not None:
        run.rates.check_length(None if state.total_steps is None else state.total_steps - state.step)
    _begin_writing(run, is_new=is_new)
    if not state.is_finished and not _is_restart(run.folder):
        name = run_title(config.recipe, config.script)
        run.log.notify("settings", step=state.step, plan=run.plan, path=run.path, name=name)
    _start_or_resume(run, restored, is_new=is_new)
    if run.replaced is not None:
        message = f"{run.replaced} had ended before its first step; the run starts over"
        run.log.event("plan", step=state.step, message=message)
    for note in override_notes(run.plan):
        # The header of the progress line shows the notes of the plan, so it leaves out these events.
        run.log.event("plan", step=state.step, message=note, is_in_plan=True)
    if heads := large_heads(run.plan, config.model):
        message = f"{', '.join(heads)} in pieces: larger products give wrong gradients on this GPU (pytorch#177116)"
        run.log.event("plan", step=state.step, message=message)
    for reason in filter(None, (start.replanned, fallback_reason)):
        run.log.event("plan", step=state.step, message=reason, exact=False, reason=reason)
    return run


def _build(
    config: RunConfig, plan: Plan, group: RankGroup, state: State, exit_stack: ExitStack
) -> tuple[RunContext, str | None]:
    """Open the device and the data, and apply the plan.

    Return the run, and the reason if the device is a fallback for the planned one (otherwise None).
    """
    model, optimizer, training = config.model, config.optimizer, config.training
    checks.check_multi_rank(model, optimizer, plan, group.ranks)
    checks.check_micro_batch(plan, training)
    plan, device, fallback_reason = open_planned_device(plan, group.ranks)
    group.use_device(device)
    seed_everything(training.seed)
    source = open_planned_source(
        config.data,
        device,
        plan,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=training.shuffle is not False,
        share=RankShare(rank=group.ranks.rank, size=group.ranks.size),
        collate_fn=training.collate_fn,
        pad_token_id=pad_token_id(model),
    )
    check_dataset_size(source, training.global_batch_size, is_loader=isinstance(config.data, DataLoader))
    checks.check_ranks_agree(group, model, optimizer, source, training)
    state.total_steps = training.total_steps(source.num_batches)
    if not isinstance(training.schedule, SchedulerObject | dict):
        # Check this before the model is moved: linear and cosine schedules need the number of steps.
        make_schedule(training.schedule, total_steps=state.total_steps)
    # An OptimizerChoice is built after the model has been placed and sharded. A torch optimizer already exists, and its
    # state must follow the parameters.
    users = optimizer if isinstance(optimizer, Optimizer) else None
    layout = place_model(plan, model, device, optimizer=users)
    for other in config.optimizers.others.values():
        place_model(plan, model, device, optimizer=other, layout=layout)
    strategy = make_strategy(model, group, plan, device)
    steppers, rates = _build_steppers(config, plan, device, strategy, total_steps=state.total_steps)
    run = RunContext(
        config,
        plan,
        device=device,
        group=group,
        source=source,
        steppers=steppers,
        rates=rates,
        layout=layout,
        state=state,
        exit_stack=exit_stack,
    )
    return run, fallback_reason


def _build_steppers(
    config: RunConfig, plan: Plan, device: AbstractDevice, strategy: ParallelStrategy, *, total_steps: int | None
) -> tuple[dict[str, Stepper], LearningRates]:
    """Return a stepper for each optimizer, by name, and the learning rates of all optimizers."""
    model, training, optimizers = config.model, config.training, config.optimizers
    steppers: dict[str, Stepper] = {}
    rates: dict[str, LearningRates] = {}
    for name, optimizer in {optimizers.main_name: optimizers.main, **optimizers.others}.items():
        others = parameters_of_others(optimizers.torch_optimizers, name) if optimizers.others else []
        stepper, base_rates = build_stepper(
            plan,
            model,
            optimizer,
            device,
            clip=training.clip,
            has_ema=training.ema,
            strategy=strategy,
            other_parameters=others,
            # The plan describes only the main optimizer.
            keeps_kernels=name in optimizers.others and kernel_obstacle(optimizers.others[name], model) is not None,
        )
        own = config_for_optimizer(training, name, optimizer)
        steppers[name] = stepper
        rates[name] = make_learning_rates(stepper.optimizer, own, base_rates, total_steps=total_steps)
    return steppers, rates[optimizers.main_name] if not optimizers.main_name else RatesByName(rates)


def _open_folder(run: RunContext, existing: Run | None) -> None:
    """Create the run folder if the run is new; otherwise use the existing one."""
    config, group, path = run.config, run.group, run.config.path
    run.folder = existing
    if existing is None and path is not None and group.is_rank_zero:
        if (path / RUN_FILE).exists():
            # The run ended before its first step. Another process may be restarting it at the same time.
            with lock.acquire(path):
                durable.remove(path)
            run.replaced = path
        run.folder = create_run(
            path,
            recipe=config.recipe,
            config=config.config,
            plan=run.plan.as_json(),
            machine=run.plan.machine.as_json(),
            versions=installed_versions(),
            command=config.command,
            script=config.script,
        )
        # Register this before taking the lock, so that it runs after the lock is released.
        run.exit_stack.callback(_remove_if_rejected, run)
        run.exit_stack.enter_context(lock.acquire(run.folder.path))
    # The other ranks can open the folder only after rank 0 has created it.
    group.barrier()
    if run.folder is None and path is not None:
        run.folder = open_run(path)


def _remove_if_rejected(run: RunContext) -> None:
    """Remove a new run folder if the call was rejected before its first step: a corrected call would not match it."""
    if _is_rejection(sys.exc_info()[1]) and run.state.step == 0:
        assert run.folder is not None
        durable.remove(run.folder.path)


def _is_rejection(error: BaseException | None) -> bool:
    """Return whether an error means that the call was invalid. The exit stack is closed while the error is handled."""
    is_rejection = isinstance(error, UsageError) or type(error) is WhetError
    # After a disk error, the same call resumes. Subclasses of WhetError (memory, NaN) are results worth keeping.
    return error is not None and is_rejection and not isinstance(error.__cause__, OSError)


def _undo_if_rejected(run: RunContext, step: int, parts: Mapping[Path, bytes], num_bytes: int) -> None:
    """Undo the writes of a resumed session whose first step was rejected, for example because of an invalid loss."""
    if _is_rejection(sys.exc_info()[1]) and run.state.step == step:
        assert run.folder is not None
        AppendOnlyFile(run.folder.path / EVENTS_FILE, keep_bytes=num_bytes).close()
        for path, content in parts.items():
            if path.read_bytes() != content:
                durable.write_file(path, data=content)


def _has_ended(folder: Run | None) -> bool:
    """Return whether the log records the end of a finished run. A killed process may not have written it."""
    last = None if folder is None else History(folder).last(*SESSION_START_KINDS, "end")
    return last is not None and last.get("state") == "done"


def _is_restart(folder: Run | None) -> bool:
    """Return whether the supervisor has restarted the run, in which case its plan is already on the screen."""
    newest = None if folder is None else next(History(folder).backwards(), None)
    return newest is not None and newest.kind == "restart"


def _begin_writing(run: RunContext, *, is_new: bool) -> None:
    """Open the event log and write the files that the run folder lacks."""
    config, folder = run.config, run.folder
    if folder is None or not run.group.is_rank_zero:
        return
    names = (INDEX_FILE, "config.json", "plan.json")
    parts = {path: path.read_bytes() for name in names if (path := folder.path / name).exists()}
    # Opening the log removes an incomplete last line.
    log = EventLog(folder)
    if not is_new:
        # Registered before the log, so that it runs after the log is closed.
        run.exit_stack.callback(_undo_if_rejected, run, run.state.step, parts, log.path.stat().st_size)
    run.log.open(run.exit_stack.enter_context(log))
    assert run.checkpointer is not None
    run.checkpointer.remove_leftovers()
    for name, content in config.attach.items():
        # Check existing folders too: the process may have been killed right after it created the folder.
        if not (folder.path / name).exists():
            durable.write_file(folder.path / name, data=content)
    if not is_new:
        run.folder = rewrite_parts(folder, plan=run.plan.as_json(), config=config.config)


def _add_services(run: RunContext, existing: Run | None) -> None:
    """Add the recorder, NaN guard, checkpointer, executor and callbacks to a run. Nothing is written."""
    is_rank_zero, exit_stack = run.group.is_rank_zero, run.exit_stack
    run.guard = NonFiniteGuard(
        has_scaler=run.stepper.scaler.is_enabled(),
        earlier=() if existing is None else History(existing).events(kinds=("skip",)),
    )
    run.log = Recorder(None, run.device, guard=run.guard, on_event=run.config.on_event if is_rank_zero else None)
    if run.folder is not None:
        run.checkpointer = Checkpointer(run, run.folder)
        exit_stack.callback(run.checkpointer.close)
    run.executor = Executor(run)
    # Do not register `run.executor.close` itself: a measured plan replaces the executor.
    exit_stack.callback(lambda: run.executor.close())
    exit_stack.callback(run.rates.close)
    run.callbacks = CallbackList(_builtin_callbacks(run), run.config.callbacks)
    check_encodable({"callbacks": run.callbacks.state_dict(), "source": run.source.state(run.state.position)})
    if run.checkpointer is not None and is_rank_zero:
        run.unsaved_state = UnsavedStateDetector(run)


def _builtin_callbacks(run: RunContext) -> list[Callback]:
    """Return the built-in callbacks in call order."""
    training, checkpointer = run.config.training, run.checkpointer
    thermal = ThermalPolicy(run.plan, run.log, run.device, reader=run.config.read_sensors)
    return [
        run.log,
        *([run.verification] if run.verification is not None else []),
        *([CheckpointSchedule(checkpointer, run.log, run.group)] if checkpointer is not None else []),
        *([EarlyStopping(training.patience)] if training.patience is not None else []),
        GarbageCollection(),
        *([DeviceCache()] if run.plan.empty_cache == "on" else []),
        CoreContention(),
        KeepAwake(),
        run.stop_signals,
        thermal,
        Health(run.log, run.device, thermal, memory_bytes=run.plan.machine.memory_bytes),
    ]


def _start_or_resume(run: RunContext, restored: RestoredRun | None, *, is_new: bool) -> None:
    if restored is not None:
        run.executor.moved_from = restored.fields.get("moved_from")
        if run.verification is not None:
            run.verification.begin(run, restored)
            return
        if run.config.training.verify_resume:
            why = "several processes train" if not run.group.is_single_process else "there is no earlier checkpoint"
            run.log.event("plan", step=run.state.step, message=f"the resume is not verified: {why}")
        run.log.is_idle = run.state.is_finished and _has_ended(run.folder)
        run.log_session("resume", with_earlier_inexactness(restored.fields, run.folder))
        run.warn_changed_code(restored.changed_code)
        return
    run.observe_code()
    # A run that was killed before its first checkpoint starts over at step 0.
    run.log_session("start" if is_new else "resume", {})
    if run.checkpointer is not None:
        # Save the initial state too: a second call with the same model object must not start from trained weights.
        run.checkpointer.save("last")


def _find_checkpoint(folder: Run | None, model: nn.Module, group: RankGroup) -> store.LoadedCheckpoint | None:
    return None if folder is None else load_newest(folder.checkpoints, model, group, run_id=folder.header.id)


def _plan_of_first_rank(plan: Plan, group: RankGroup) -> Plan:
    return plan if group.is_single_process else read_plan(group.broadcast(plan.as_json()), where="the plan of rank 0")
