"""Set up a run: RunConfig holds the user's request, and setup() makes the live RunContext from it."""

import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.base.errors import UsageError, WhetError
from whet.base.origin import calling_script
from whet.checkpoint import store
from whet.checkpoint.snapshot import check_encodable
from whet.config.goal import GoalMode, resolve_mode
from whet.config.options import SchedulerObject
from whet.data.adapters import check_dataset_size, is_map_style
from whet.data.batch import GlobalBatch, MicroBatch
from whet.data.loader import is_rereadable_loader, with_loader_options
from whet.data.order import mix_seed
from whet.data.source import AbstractSource
from whet.data.split import RankShare
from whet.device import mps
from whet.device.abstract import AbstractDevice
from whet.device.open import current_machine
from whet.device.random_streams import RandomStreams
from whet.device.rng import seed_everything
from whet.distributed.group import RankGroup, current_group
from whet.distributed.ranks import check_not_mps, read_rank_info
from whet.distributed.strategies import ParallelStrategy
from whet.machine.pressure import ReadSystemState
from whet.plan.plan import Plan, make_plan, read_plan
from whet.plan.setting import Scalar
from whet.plan.warnings import override_notes
from whet.plan.workload import Workload
from whet.run import durable, lock
from whet.run.events import EventLog, History
from whet.run.folder import Run, check_run_name, create_run, installed_versions, open_run, rewrite_parts
from whet.step.apply_plan import (
    build_stepper,
    make_strategy,
    open_planned_device,
    open_planned_source,
    place_model,
    set_process_settings,
)
from whet.step.model_contexts import WeightLayout, deterministic, large_heads
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.optimizer_kernels import kernel_obstacle
from whet.step.optimizers import OptimizerChoice
from whet.step.step import Stepper
from whet.training import checks
from whet.training.callback import Action, Callback, CallbackList, State
from whet.training.callbacks.basic import EarlyStopping, GarbageCollection, KeepAwake
from whet.training.callbacks.checkpoint_schedule import CheckpointSchedule
from whet.training.callbacks.device_cache import DeviceCache
from whet.training.callbacks.event_log import EventHandler, Recorder
from whet.training.callbacks.health import Health
from whet.training.callbacks.progress import ProgressLine
from whet.training.callbacks.stop_signals import StopSignals
from whet.training.callbacks.thermal import ThermalPolicy
from whet.training.checkpointer import Checkpointer, load_newest
from whet.training.executor import Executor
from whet.training.gaps import GapDetector
from whet.training.keywords import SessionKeywords
from whet.training.metrics import scalar_metrics
from whet.training.optimizer_set import (
    OptimizerSet,
    RatesByName,
    as_module,
    as_optimizer_set,
    check_schedules,
    config_for_optimizer,
    parameters_of_others,
)
from whet.training.registered import RegisteredObjects
from whet.training.restore import RestoredRun, with_earlier_inexactness
from whet.training.resume import decide_resume, run_exists
from whet.training.resume_verification import ResumeVerification, find_earlier
from whet.training.schedule import LearningRates, make_schedule
from whet.training.source_code import SourceCode, model_classes
from whet.training.torch_schedule import check_plateau_goal, check_scheduler, make_learning_rates, schedule_functions
from whet.training.training_config import TrainingConfig, parse_training_config
from whet.training.weights import load_weights
from whet.training.workload import describe_workload, pad_token_id
from whet.verify.trainable import OutputFunction, adapt_outputs

_BETWEEN_STEPS = 2**32
"""Makes the seed of the code between steps differ from that of any epoch or step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The request of the user: model, data, optimizer, training options and run folder."""

    model: nn.Module
    optimizer: Optimizer | OptimizerChoice
    """The main optimizer, which is usually the only one."""
    optimizers: OptimizerSet
    data: Any
    training: TrainingConfig
    workload: Workload
    overrides: Mapping[str, Scalar]
    plan: Plan | None = None
    """The plan for a new run; None if setup() makes it."""
    measure: bool = True
    """Whether the first step of an own loop measures which plan is fastest."""
    path: Path | None = None
    """The run folder; None to write nothing."""
    goal: str | None = None
    """The metric that selects the best checkpoint."""
    mode: GoalMode = "max"
    """Whether a higher ("max") or a lower ("min") goal is better."""
    recipe: str = "session"
    script: str | None = None
    """The user's file and function that made this call; None for a recipe."""
    command: list[str] = field(default_factory=list)
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options that are written to the run folder and compared when the run resumes."""
    allow: tuple[str, ...] = ()
    """Changes that are allowed when the run resumes: "data", "batch", "lr"."""
    init_from: str | Path | None = None
    """A run or an import whose weights a new run starts with."""
    attach: Mapping[str, bytes] = field(default_factory=dict)
    """Extra files of a new run folder, by name."""
    outputs: OutputFunction | None = None
    """A function from a micro-batch to outputs, for causal models; causality is then verified."""
    callbacks: tuple[Callback, ...] = ()
    register: Mapping[str, Any] = field(default_factory=dict)
    """Objects of the user that are saved and restored with the run, by name."""
    loss: Any = None
    """The loss function of `whet.train`, which is known before the first step; None in a loop of the user."""
    is_own_loop: bool = False
    """Whether the user wrote the training loop, whose variables a session cannot see."""
    on_event: EventHandler | None = None
    read_sensors: ReadSystemState | None = None
    """A function that reads sensors; None for those of this machine."""


def make_run_config(
    model: Any,
    optimizer: Any,
    data: Any,
    keywords: SessionKeywords,
) -> RunConfig:
    """Validate the arguments of a call and fill in defaults. Several models and optimizers are dicts."""
    model, optimizers = as_module(model), as_optimizer_set(optimizer)
    training = parse_training_config(with_loader_options(data, keywords.training))
    plan, overrides, device = keywords.plan, keywords.overrides or {}, keywords.device
    checks.check_model_and_optimizer(model, optimizers)
    checks.check_overrides_with_plan(plan, overrides, device)
    check_schedules(training, optimizers)
    for name, one in {optimizers.main_name: optimizers.main, **optimizers.others}.items():
        check_scheduler(config_for_optimizer(training, name, one), one)
    mode = resolve_mode(keywords.goal, keywords.mode)
    for name, one in optimizers.torch_optimizers.items():
        check_plateau_goal(config_for_optimizer(training, name, one), goal=keywords.goal, mode=mode)
    ranks = read_rank_info()
    # Checked before the ranks connect: there is no collective for MPS tensors, so the ranks could only fail later.
    check_not_mps(ranks.size, device=str(overrides.get("device", device)), is_mac=mps.mps_unavailable_reason() is None)
    chosen = {**(plan.overrides if plan else overrides), **({} if device == "auto" else {"device": device})}
    described_optimizer = _describe_optimizer(optimizers.main, model)
    checks.check_kernels(chosen.get("optimizer_kernels"), described_optimizer)
    checks.check_several_optimizers(optimizers, training, num_ranks=ranks.size)
    if keywords.run is not None:
        check_run_name(Path(keywords.run))
    described = keywords.workload or describe_workload(model, data, training, recipe=keywords.recipe)
    return RunConfig(
        model=model,
        optimizer=optimizers.main,
        optimizers=optimizers,
        data=data,
        training=training,
        workload=described.model_copy(
            update={
                "world_size": ranks.size,
                "local_size": ranks.local_size,
                **described_optimizer,
            }
        ),
        overrides=chosen,
        plan=plan,
        measure=keywords.measure,
        path=None if keywords.run is None else Path(keywords.run),
        goal=keywords.goal,
        mode=mode,
        recipe=keywords.recipe,
        script=None if keywords.command else calling_script(),
        command=list(keywords.command),
        config=training.as_json() if keywords.config is None else keywords.config,
        allow=checks.parse_allow(keywords.allow),
        init_from=keywords.init_from,
        attach=keywords.attach,
        outputs=None if keywords.outputs is None else adapt_outputs(keywords.outputs),
        callbacks=tuple(keywords.callbacks),
        register=dict(keywords.register or {}),
        on_event=ProgressLine(epochs=training.epochs) if keywords.on_event == "line" else keywords.on_event,
        read_sensors=keywords.read_sensors,
    )


def _describe_optimizer(optimizer: Optimizer | OptimizerChoice, model: nn.Module) -> dict[str, str | None]:
    """Return what a plan needs to know about the user's optimizer object."""
    if not isinstance(optimizer, Optimizer):
        return {}
    return {"optimizer": type(optimizer).__name__, "optimizer_obstacle": kernel_obstacle(optimizer, model)}


def plan_from_rules(config: RunConfig) -> Plan:
    """Return the plan that rules alone make on this machine, without measurements."""
    machine, system_state = current_machine()
    return make_plan(machine, config.workload, overrides=config.overrides, system_state=system_state)


def is_rereadable(data: Any) -> bool:
    """Return whether the data can be read twice. An iterable dataset is consumed by its first reader."""
    if isinstance(data, DataLoader):
        return is_rereadable_loader(data)
    return is_map_style(data)


class RunContext:
    """A live run: the device, data, model, optimizer and services that a session and its callbacks share."""

    checkpointer: Checkpointer | None = None
    verification: ResumeVerification | None = None
    """Repeats the steps up to the newest checkpoint; None if a resume is not verified, or is already."""
    gaps: GapDetector | None = None
    """Detects state that checkpoints do not hold; None if this process writes none."""
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
        steppers: Mapping[str, Stepper],
        rates: LearningRates,
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
        self.steppers = dict(steppers)
        """The steppers by the name of their optimizer. The first one is the main stepper."""
        self.stepper = next(iter(self.steppers.values()))
        self.layout = layout
        """Restores the original memory format of the weights."""
        self.rates = rates
        self.rng = RandomStreams(device, between_seed=mix_seed(config.training.seed, _BETWEEN_STEPS) % 2**63)
        self.sources = SourceCode()
        self.registered = RegisteredObjects(config.register)
        self.state = state
        self.is_new = False
        """Whether this session has started the run."""
        self.exit_stack = exit_stack
        """Undoes the setup when the session ends, in reverse order."""
        self.folder: Run | None = None
        self.guard: NonFiniteGuard
        self.log: Recorder
        self.stop_signals = StopSignals()
        self.divides_batches = config.training.split_batch is not False
        """Whether the loss may be called with some samples of a batch, for checks before the first step."""
        self.has_users_gradients = False
        """Whether the gradients come from a manual step. Checkpoints then keep them: they may be accumulated."""
        self.pending = Action.NONE
        """The merged actions that the loop has not performed yet."""
        self._requests: deque[Action] = deque()

    @property
    def model(self) -> nn.Module:
        return self.config.model

    @property
    def other_optimizers(self) -> dict[str, tuple[Optimizer, torch.amp.GradScaler]]:
        """The optimizers besides the main one, and their loss scalers, by name."""
        _, *others = self.steppers.items()
        return {name: (stepper.optimizer, stepper.scaler) for name, stepper in others}

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

    def first_samples(self, batch: GlobalBatch, size: int) -> MicroBatch:
        """Return the first samples of a batch, or all of them if the loss needs the whole batch."""
        size = min(size, len(batch)) if self.divides_batches else len(batch)
        return next(iter(self.source.micro_batches(batch, micro_batch=size, length_mode=self.plan.lengths)))

    def use_plan(self, plan: Plan) -> None:
        """Switch to a changed plan and write it to the run folder."""
        self.plan = plan
        self.guard.has_scaler = self.stepper.scaler.is_enabled()
        self.watch_for_stalls()
        if self.folder is not None and self.group.is_rank_zero:
            rewrite_parts(self.folder, plan=plan.as_json())

    def plan_again(self, **facts: Any) -> None:
        """Plan again with more facts about the workload."""
        plan = self.plan
        self.use_plan(
            make_plan(
                plan.machine,
                plan.workload.model_copy(update=facts),
                overrides=plan.overrides,
                measured=plan.measured,
                system_state=plan.system_state,
                trials=plan.trials,
            )
        )

    def watch_for_stalls(self) -> None:
        """Tell the stall detector whether the model is compiled: it may compile again for a new shape."""
        self.group.stall_detector.is_compiled = self.plan.compile != "off"

    def replan(self, plan: Plan) -> None:
        """Apply a measured plan to a run with one optimizer that has not stepped yet. Its device and data stay."""
        self.executor.close()
        optimizer, training = self.stepper.optimizer, self.config.training
        self.layout.use(plan.layout, optimizer)
        set_process_settings(plan, self.device)
        (name,) = self.steppers
        self.stepper, _ = build_stepper(
            plan,
            self.model,
            optimizer,
            self.device,
            clip=training.clip,
            has_ema=training.ema,
            strategy=self.stepper.strategy,
        )
        self.steppers[name] = self.stepper
        self.use_plan(plan)
        self.executor = Executor(self)
        if self.checkpointer is not None:
            # The first checkpoint names the settings that later ones must match.
            self.checkpointer.save_initial_again()

    def note_inexact(self, step: int, reason: str) -> None:
        """Record in all later checkpoints that the run is not bit-exact since `step`."""
        if self.checkpointer is not None:
            self.checkpointer.note_inexact(step, reason)

    def note_gap(self, gap: str, *, is_variable: bool = False) -> None:
        """Record a gap in all later checkpoints, and warn of it once."""
        if self.checkpointer is not None and self.checkpointer.note_gap(gap, is_variable=is_variable):
            how = "session.register(name, object)" if self.config.is_own_loop else "register={name: object}"
            reason = f"checkpoints do not hold the whole state: {gap} ({how} saves an object)"
            self.log.event("warning", step=self.state.step, reason=reason, retry="never")

    def begin_steps(self) -> None:
        """Save objects that were registered after the initial state was saved, and warn of those that are missing."""
        for mismatch in self.registered.begin(is_new=self.state.step == 0):
            self.log.event("warning", step=self.state.step, reason=mismatch, exact=False, retry="never")
            self.note_inexact(self.state.step, mismatch)
        if self.checkpointer is not None and self.registered.objects.keys() - self.config.register.keys():
            self.checkpointer.save_initial_again()
        if self.gaps is not None:
            self.gaps.begin()

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
        self.verification, self.log.repeat_until = None, -1
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

    def last_metrics(self) -> dict[str, float]:
        """Return the metrics of the newest step from the run folder; empty if there are none."""
        metrics: dict[str, float] = {}
        if self.folder is not None and self.group.is_rank_zero:
            for event in History(self.folder).backwards(kinds=("eval",)):
                if event.step != self.state.step:
                    break
                metrics = {**scalar_metrics(event.fields), **metrics}
        shared: dict[str, float] = self.group.broadcast(metrics)
        return shared

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
        """Restore the run from a checkpoint. Nothing is written."""
        assert self.checkpointer is not None
        return self.checkpointer.restore(checkpoint)

    def observe_code(self) -> list[str]:
        """Record the code of the model, the schedule and a known loss. Return what has changed since the run began."""
        model, schedule = model_classes(self.model), schedule_functions(self.config.training.schedule)
        changes = self.sources.observe("model", model) + self.sources.observe("schedule", schedule)
        return changes + ([] if self.config.loss is None else self.sources.observe_loss(self.config.loss))

    def warn_changed_code(self, changes: list[str]) -> None:
        """Log that code is not what the run was started with: its results may differ from an uninterrupted run."""
        for change in changes:
            reason = f"{change} since the run was started"
            self.log.event("warning", step=self.state.step, reason=reason, exact=False, retry="never")
            self.note_inexact(self.state.step, change)


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
    newest = None if checkpoint is None else checkpoint.step
    if checkpoint is not None and config.training.verify_resume and group.is_single_process:
        assert start.run is not None
        checkpoint = find_earlier(start.run, checkpoint.step) or checkpoint
    exit_stack.enter_context(deterministic(plan.deterministic == "on"))
    run, fallback_reason = _build(config, plan, group, state, exit_stack)
    run.is_new = is_new
    if checkpoint is not None and newest is not None and checkpoint.step < newest:
        run.verification = ResumeVerification(until=newest)
    if is_sharded:
        checkpoint = _find_checkpoint(start.run, model, group)
    # Entered before the clean-up of data and services is registered, so it is left after them: they may still write to
    # standard error.
    exit_stack.enter_context(run.device.monitor.watch(has_fallback=run.plan.mps_fallback == "on"))
    exit_stack.callback(run.source.close)
    if checkpoint is None:
        run.rates.check_length(state.total_steps)
    _open_folder(run, start.run)
    _add_services(run, start.run)
    # A resume that is refused raises here, before the first write.
    restored = None if checkpoint is None or run.checkpointer is None else run.restore(checkpoint)
    if restored is not None:
        run.rates.check_length(None if state.total_steps is None else state.total_steps - state.step)
    _begin_writing(run, is_new=is_new)
    _start_or_resume(run, restored, is_new=is_new)
    for note in override_notes(run.plan):
        # The command line prints the plan and its notes, so it leaves these events out.
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

    Returns the run, and the reason if the device is a fallback for the planned one.
    """
    model, optimizer, training = config.model, config.optimizer, config.training
    checks.check_multi_rank(model, optimizer, plan, group.ranks)
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
        # Checked before the model is moved: linear and cosine need the number of steps.
        make_schedule(training.schedule, total_steps=state.total_steps)
    # An OptimizerChoice is built after the model is placed and sharded. A torch optimizer exists already, and its state
    # must follow the parameters.
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
    """Return a stepper for each optimizer, and their learning rates."""
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
    """Create the run folder if the run is new."""
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
            script=config.script,
        )
        # Registered before the lock, so that it runs after the lock is released.
        run.exit_stack.callback(_discard_if_refused, run)
        run.exit_stack.enter_context(lock.acquire(run.folder.path))
    # The other ranks open the folder only after rank 0 has created it.
    group.barrier()
    if run.folder is None and path is not None:
        run.folder = open_run(path)


def _discard_if_refused(run: RunContext) -> None:
    """Remove a new run folder if the call was refused before its first step: a corrected call would not fit it."""
    # The exit stack is closed while the error is being handled.
    error = sys.exc_info()[1]
    is_refusal = isinstance(error, UsageError) or type(error) is WhetError
    # After a disk error the same call resumes, and its subclasses (memory, NaN) are results worth keeping.
    if error is not None and is_refusal and not isinstance(error.__cause__, OSError) and run.state.step == 0:
        assert run.folder is not None
        durable.remove(run.folder.path)


def _begin_writing(run: RunContext, *, is_new: bool) -> None:
    """Open the event log, and write what the run folder lacks."""
    config, folder = run.config, run.folder
    if folder is None or not run.group.is_rank_zero:
        return
    run.log.open(run.exit_stack.enter_context(EventLog(folder)))
    assert run.checkpointer is not None
    run.checkpointer.remove_leftovers()
    for name, content in config.attach.items():
        # Also for an existing folder: the process may have been killed right after it created the folder.
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
    # Not `run.executor.close`: a measured plan replaces the executor.
    exit_stack.callback(lambda: run.executor.close())
    exit_stack.callback(run.rates.close)
    run.callbacks = CallbackList(_own_callbacks(run), run.config.callbacks)
    check_encodable({"callbacks": run.callbacks.state_dict(), "source": run.source.state(run.state.position)})
    if run.checkpointer is not None and is_rank_zero:
        run.gaps = GapDetector(run)


def _own_callbacks(run: RunContext) -> list[Callback]:
    """Return the built-in callbacks in call order."""
    training, checkpointer = run.config.training, run.checkpointer
    thermal = ThermalPolicy(run.plan, run.log, run.device, reader=run.config.read_sensors)
    return [
        run.log,
        *([run.verification] if run.verification is not None else []),
        *([CheckpointSchedule(checkpointer, run.group)] if checkpointer is not None else []),
        *([EarlyStopping(training.patience)] if training.patience is not None else []),
        GarbageCollection(),
        DeviceCache(),
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
        run.log_session("resume", with_earlier_inexactness(restored.fields, run.folder))
        run.warn_changed_code(restored.changed_code)
        return
    run.observe_code()
    # A run that was killed before its first checkpoint starts again from step 0.
    run.log_session("start" if is_new else "resume", {})
    if run.checkpointer is not None:
        # Save the initial state too: a second call with the same model object must not start from trained weights.
        run.checkpointer.save("last")


def _find_checkpoint(folder: Run | None, model: nn.Module, group: RankGroup) -> store.LoadedCheckpoint | None:
    return None if folder is None else load_newest(folder.checkpoints, model, group, run_id=folder.header.id)


def _plan_of_first_rank(plan: Plan, group: RankGroup) -> Plan:
    return plan if group.is_single_process else read_plan(group.broadcast(plan.as_json()), where="the plan of rank 0")
