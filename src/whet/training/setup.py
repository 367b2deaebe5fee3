"""Set up a run: RunConfig holds the user's request, and setup() makes the live RunContext from it."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.data.adapters import AbstractSource, check_dataset_size
from whet.data.batch import GlobalBatch
from whet.data.columns import as_columns
from whet.data.split import RankShare
from whet.device import mps
from whet.device.abstract import AbstractDevice
from whet.device.open import current_machine
from whet.device.rng import seed_everything
from whet.distributed.group import RankGroup, current_group
from whet.distributed.ranks import check_not_mps, read_rank_info
from whet.machine.pressure import ReadConditions
from whet.plan.plan import Plan, make_plan, read_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run import durable, lock
from whet.run.events import EventLog, History
from whet.run.folder import Run, create_run, installed_versions, open_run, rewrite_parts
from whet.step.apply_plan import build_stepper, make_strategy, open_planned_device, open_planned_source, place_model
from whet.step.model_contexts import WeightLayout, deterministic
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.optimizers import OptimizerChoice
from whet.step.step import Stepper
from whet.training import checks
from whet.training.callback import Action, Callback, CallbackList, State
from whet.training.callbacks.basic import EarlyStopping, GarbageCollection, KeepAwake
from whet.training.callbacks.checkpoint_schedule import CheckpointSchedule
from whet.training.callbacks.event_log import EventHandler, Recorder
from whet.training.callbacks.health import Health
from whet.training.callbacks.stop_signals import StopSignals
from whet.training.callbacks.thermal import ThermalPolicy
from whet.training.checkpointer import Checkpointer, load_newest
from whet.training.executor import Executor
from whet.training.restore import RestoredRun, with_earlier_inexactness
from whet.training.resume import decide_resume, run_exists
from whet.training.schedule import LearningRates, LearningRateSchedule
from whet.training.training_config import TrainingConfig
from whet.training.weights import load_weights
from whet.training.workload import describe_workload
from whet.verify.trainable import OutputFunction


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The request of the user: model, data, optimizer, training options and run folder."""

    model: nn.Module
    optimizer: Optimizer | OptimizerChoice
    data: Any
    training: TrainingConfig
    workload: Workload
    overrides: Mapping[str, Scalar]
    plan: Plan | None = None
    """The plan for a new run; None if setup() makes it."""
    path: Path | None = None
    """The run folder; None to write nothing."""
    goal: str | None = None
    """The metric that selects the best checkpoint."""
    mode: str = "max"
    """Whether a higher ("max") or a lower ("min") goal is better."""
    recipe: str = "session"
    command: list[str] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options that are written to the run folder and compared when the run resumes."""
    allow: tuple[str, ...] = ()
    """Changes that are allowed when the run resumes: "data", "batch"."""
    init_from: str | Path | None = None
    """A run or an import whose weights a new run starts with."""
    attach: Mapping[str, bytes] = field(default_factory=dict)
    """Extra files of a new run folder, by name."""
    outputs: OutputFunction | None = None
    """A function from a micro-batch to outputs, for causal models; causality is then verified."""
    callbacks: tuple[Callback, ...] = ()
    on_event: EventHandler | None = None
    read_sensors: ReadConditions | None = None
    """A function that reads sensors; None for those of this machine."""


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
    mode: str = "max",
    recipe: str = "session",
    config: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    **rest: Any,
) -> RunConfig:
    """Validate the arguments and fill in defaults. `rest` holds fields of RunConfig that are used unchanged."""
    checks.check_model_and_optimizer(model, optimizer, mode)
    checks.check_overrides_with_plan(plan, overrides, device)
    ranks = read_rank_info()
    # Checked before the ranks connect: there is no collective for MPS tensors, so the ranks could only fail later.
    check_not_mps(
        ranks.size, device=str((overrides or {}).get("device", device)), is_mac=mps.mps_unavailable_reason() is None
    )
    chosen = {**(plan.overrides if plan else overrides or {}), **({} if device == "auto" else {"device": device})}
    if isinstance(optimizer, Optimizer):
        chosen["optimizer_kernels"] = "your optimizer"
    described = workload or describe_workload(model, data, training, recipe=recipe)
    return RunConfig(
        model=model,
        optimizer=optimizer,
        data=data,
        training=training,
        workload=described.model_copy(update={"world_size": ranks.size, "local_size": ranks.local_size}),
        overrides=chosen,
        plan=plan,
        path=None if run is None else Path(run),
        mode=mode,
        recipe=recipe,
        config=training.as_json() if config is None else config,
        allow=checks.parse_allow(allow),
        **rest,
    )


def plan_from_rules(config: RunConfig) -> Plan:
    """Return the plan that rules alone make on this machine, without measurements."""
    machine, conditions = current_machine()
    return make_plan(machine, config.workload, overrides=config.overrides, conditions=conditions)


def is_rereadable(data: Any) -> bool:
    """Return whether the data can be read twice. An iterable dataset is consumed by its first reader."""
    return as_columns(data) is not None or callable(getattr(data, "__getitem__", None))


class RunContext:
    """A live run: the device, data, model, optimizer and services that a session and its callbacks share."""

    checkpointer: Checkpointer | None = None
    executor: Executor
    callbacks: CallbackList

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        *,
        device: AbstractDevice,
        group: RankGroup,
        source: AbstractSource,
        schedule: LearningRateSchedule,
        stepper: Stepper,
        base_rates: list[float],
        layout: WeightLayout,
        state: State,
        exit_stack: ExitStack,
    ) -> None:
        self.config = config
        self.plan = plan
        """The current plan. It may change during the run, for example after an out-of-memory error."""
        self.device = device
        self.group = group
        self.source = source
        self.schedule = schedule
        self.stepper = stepper
        self.layout = layout
        """Restores the original memory format of the weights."""
        self.rates = LearningRates(stepper.optimizer, schedule, base_rates)
        self.state = state
        self.exit_stack = exit_stack
        """Undoes the setup when the session ends, in reverse order."""
        self.folder: Run | None = None
        self.guard: NonFiniteGuard
        self.log: Recorder
        self.stop_signals = StopSignals()
        self.pending = Action.NONE
        """The merged actions that the loop has not performed yet."""
        self._requests: deque[Action] = deque()

    @property
    def model(self) -> nn.Module:
        return self.config.model

    @property
    def path(self) -> Path | None:
        """The run folder; None if nothing is written."""
        return None if self.folder is None else self.folder.path

    def request(self, action: Action) -> None:
        """Request an action from any thread or signal handler. The loop performs it after the current step."""
        # deque.append is atomic. A lock could deadlock: a signal handler may run between any two bytecodes.
        self._requests.append(action)

    def collect_requests(self) -> Action:
        """Merge all requests into `pending` and return it."""
        while self._requests:
            self.pending |= self._requests.popleft()
        return self.pending

    @property
    def is_stop_requested(self) -> bool:
        """Whether a stop was requested that the loop has not performed yet."""
        return self.pending.stop is not None or any(action.stop is not None for action in tuple(self._requests))

    def batches(self) -> Iterator[GlobalBatch]:
        """Return the remaining global batches of the epoch. Time spent waiting for them is logged as data time."""
        read = self.group.stall_detector.reading(self.source.batches(self.state.position))
        return self.log.timed(read)

    def use_plan(self, plan: Plan) -> None:
        """Switch to a changed plan and write it to the run folder."""
        self.plan = plan
        self.guard.has_scaler = self.stepper.scaler.is_enabled()
        if self.folder is not None and self.group.is_rank_zero:
            rewrite_parts(self.folder, plan=plan.as_json())

    def note_inexact(self, step: int, reason: str) -> None:
        """Record in all later checkpoints that the run is not bit-exact since `step`."""
        if self.checkpointer is not None:
            self.checkpointer.note_inexact(step, reason)

    def log_pending_events(self) -> None:
        """Log the events of the device and the data. Raise if the device has failed without raising an error."""
        for kind, fields in (*self.device.monitor.events(), *self.source.events()):
            self.log.event(kind, step=self.state.step, **fields)
        self.device.monitor.check()

    def log_session(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Log the start or the resume of a session."""
        goal = {"goal": self.config.goal, "mode": self.config.mode}
        self.log.event(kind, step=self.state.step, total_steps=self.state.total_steps, **goal, **fields)

    def roll_back(self, reason: str) -> None:
        """Restore the newest checkpoint. The batches since then are repeated."""
        checkpoint = None if self.checkpointer is None else self.checkpointer.newest()
        if checkpoint is None:
            raise WhetError("the run cannot be rolled back: it has no checkpoint", got=reason, try_="run=DIR")
        restored = self.restore(checkpoint)
        self.executor.expect_changes()
        self.log_session("resume", {**restored.fields, "rollback_reason": reason})
        # The non-finite step was discarded with all others since the checkpoint, so the guard starts clean.
        self.guard.first_non_finite = None

    def has_logged(self, prefix: str) -> bool:
        """Return whether the run folder holds a metric with this prefix for the newest step."""
        if self.folder is None:
            return False
        is_logged = False
        if self.group.is_rank_zero:
            newest = (e for e in History(self.folder).backwards(kinds=("eval",)) if e.step == self.state.step)
            is_logged = any(name.startswith(prefix) for event in newest for name in event.fields)
        # Rank 0 decides: the other ranks may see its writes a little later.
        return bool(self.group.broadcast(is_logged))

    def raise_callback_error(self) -> NoReturn:
        """Save a checkpoint and raise the error of a callback that failed on any rank."""
        failure = self.callbacks.failure
        if self.group.is_single_process:
            # The final checkpoint is written on the way out of the session.
            assert failure is not None
            raise failure[1]
        messages = self.group.all_gather(None if failure is None else f"{failure[0]}: {failure[1]}")
        if self.checkpointer is not None:
            self.checkpointer.save("last")
        self.group.barrier()
        if failure is not None:
            raise failure[1]
        rank, message = next((rank, text) for rank, text in enumerate(messages) if text is not None)
        raise WhetError("a callback failed on another rank", got=f"rank {rank}: {message}", try_="see its traceback")

    def restore(self, checkpoint: store.LoadedCheckpoint) -> RestoredRun:
        """Restore the run from a checkpoint, including the base learning rates."""
        assert self.checkpointer is not None
        restored = self.checkpointer.restore(checkpoint)
        self.rates.use_base(restored.base_rates)
        return restored


def setup(config: RunConfig, state: State, exit_stack: ExitStack) -> RunContext:
    """Lock, plan, build and restore a run. `exit_stack` undoes these steps in reverse order.

    Invalid input raises before a new run folder is created.
    """
    model, path = config.model, config.path
    group = current_group()
    is_new = group.broadcast(not run_exists(path))
    if path is not None and not is_new and group.is_rank_zero:
        # Lock before reading: two processes must not resume the same run.
        exit_stack.enter_context(lock.acquire(path))
    start = decide_resume(config)
    # All ranks use the plan of rank 0. The broadcast also ensures that every rank has read the folder before a write.
    plan = _plan_of_first_rank(start.plan, group)
    if is_new and start.run is not None:
        raise UsageError("another process has just started this run", got=str(path), try_="another run folder")
    # With sharding, a rank knows which rows of the checkpoint it needs only after the model is sharded, so the
    # checkpoint is loaded after _build().
    is_sharded = not group.is_single_process and plan.sharding == "full"
    checkpoint = None if is_sharded else _find_checkpoint(start.run, model, group)
    has_any = is_sharded and start.run is not None and bool(group.broadcast(store.list_steps(start.run.checkpoints)))
    if checkpoint is None and not has_any and config.init_from is not None:
        load_weights(config.init_from, model)
    exit_stack.enter_context(deterministic(plan.deterministic == "on"))
    run, fell_back = _build(config, plan, group, state, exit_stack)
    if is_sharded:
        checkpoint = _find_checkpoint(start.run, model, group)
    # Entered before the clean-up of data and services is registered, so it is left after them: they may still write to
    # standard error.
    exit_stack.enter_context(run.device.monitor.watch(has_fallback=run.plan.mps_fallback == "on"))
    exit_stack.callback(run.source.close)
    _open_folder(run, start.run)
    _add_services(run, start.run)
    if run.folder is not None and not is_new and group.is_rank_zero:
        run.folder = rewrite_parts(run.folder, plan=run.plan.as_json(), config=config.config)
    _start_or_resume(run, checkpoint, is_new=is_new)
    for reason in filter(None, (start.replanned, fell_back)):
        run.log.event("plan", step=state.step, message=reason, exact=False, reason=reason)
    return run


def _build(
    config: RunConfig, plan: Plan, group: RankGroup, state: State, exit_stack: ExitStack
) -> tuple[RunContext, str | None]:
    """Open the device and the data, and apply the plan.

    Returns the run, and the reason if the device is a fallback for the planned one.
    """
    model, optimizer, training = config.model, config.optimizer, config.training
    checks.check_multi_rank(model, optimizer, plan, group.ranks)
    plan, device, fell_back = open_planned_device(plan, group.ranks)
    group.use_device(device)
    seed_everything(training.seed)
    source = open_planned_source(
        config.data,
        device,
        plan,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        shuffle=training.shuffle,
        share=RankShare(rank=group.ranks.rank, size=group.ranks.size),
    )
    check_dataset_size(source.num_samples, training.global_batch_size)
    checks.check_ranks_agree(group, model, optimizer, source, training)
    state.total_steps = training.total_steps(source.num_samples)
    schedule = training.make_schedule(state.total_steps)
    # An OptimizerChoice is built after the model is placed and sharded. A torch optimizer exists already, and its state
    # must follow the parameters.
    users = optimizer if isinstance(optimizer, Optimizer) else None
    layout = place_model(plan, model, device, optimizer=users)
    strategy = make_strategy(model, group, plan, device)
    stepper, base_rates = build_stepper(
        plan, model, optimizer, device, clip=training.clip, has_ema=training.ema, strategy=strategy
    )
    run = RunContext(
        config,
        plan,
        device=device,
        group=group,
        source=source,
        schedule=schedule,
        stepper=stepper,
        base_rates=base_rates,
        layout=layout,
        state=state,
        exit_stack=exit_stack,
    )
    return run, fell_back


def _open_folder(run: RunContext, existing: Run | None) -> None:
    """Create the run folder if the run is new, and write the attached files."""
    config, group, path = run.config, run.group, run.config.path
    run.folder = existing
    if existing is None and path is not None and group.is_rank_zero:
        run.folder = create_run(
            path,
            recipe=config.recipe,
            config=config.config,
            plan=run.plan.as_json(),
            machine=run.plan.machine.as_json(),
            versions=installed_versions(),
            command=config.command,
        )
        run.exit_stack.enter_context(lock.acquire(run.folder.path))
    # The other ranks open the folder only after rank 0 has created it.
    group.barrier()
    if run.folder is None and path is not None:
        run.folder = open_run(path)
    for name, content in config.attach.items():
        # Also for an existing folder: the process may have been killed right after it created the folder.
        if run.folder is not None and group.is_rank_zero and not (run.folder.path / name).exists():
            durable.write_file(run.folder.path / name, data=content)


def _add_services(run: RunContext, existing: Run | None) -> None:
    """Add the event log, NaN guard, checkpointer, executor and callbacks to a run."""
    is_rank_zero, exit_stack = run.group.is_rank_zero, run.exit_stack
    log = None if run.folder is None or not is_rank_zero else exit_stack.enter_context(EventLog(run.folder))
    run.guard = NonFiniteGuard(
        has_scaler=run.stepper.scaler.is_enabled(),
        earlier=() if existing is None else History(existing).events(kinds=("skip",)),
    )
    run.log = Recorder(log, run.device, guard=run.guard, on_event=run.config.on_event if is_rank_zero else None)
    if run.folder is not None:
        run.checkpointer = Checkpointer(run, run.folder)
        exit_stack.callback(run.checkpointer.close)
    run.executor = Executor(run)
    exit_stack.callback(run.executor.close)
    exit_stack.callback(run.rates.restore)
    run.callbacks = CallbackList(_own_callbacks(run), run.config.callbacks)


def _own_callbacks(run: RunContext) -> list[Callback]:
    """Return the built-in callbacks in call order."""
    training, checkpointer = run.config.training, run.checkpointer
    thermal = ThermalPolicy(run.plan, run.log, run.device, reader=run.config.read_sensors)
    return [
        run.log,
        *([CheckpointSchedule(checkpointer, run.group)] if checkpointer is not None else []),
        *([EarlyStopping(training.patience)] if training.patience is not None else []),
        GarbageCollection(),
        KeepAwake(),
        run.stop_signals,
        thermal,
        Health(run.log, run.device, thermal, memory_bytes=run.plan.machine.memory_bytes),
    ]


def _start_or_resume(run: RunContext, checkpoint: store.LoadedCheckpoint | None, *, is_new: bool) -> None:
    if checkpoint is not None and run.checkpointer is not None:
        restored = run.restore(checkpoint)
        run.executor.moved_from = restored.fields.get("moved_from")
        run.log_session("resume", with_earlier_inexactness(restored.fields, run.folder))
        return
    # A run that was killed before its first checkpoint starts again from step 0.
    run.log_session("start" if is_new else "resume", {})
    if run.checkpointer is not None:
        # Save the initial state too: a second call with the same model object must not start from trained weights.
        run.checkpointer.save("last")


def _find_checkpoint(folder: Run | None, model: nn.Module, group: RankGroup) -> store.LoadedCheckpoint | None:
    return None if folder is None else load_newest(folder.checkpoints, model, group, run_id=folder.header.id)


def _plan_of_first_rank(plan: Plan, group: RankGroup) -> Plan:
    return plan if group.is_single_process else read_plan(group.broadcast(plan.as_json()), where="the plan of rank 0")
