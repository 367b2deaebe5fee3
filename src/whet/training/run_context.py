"""A live run, shared by the session and its callbacks."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from whet.base.errors import WhetError
from whet.checkpoint import store
from whet.checkpoint.snapshot import REGISTERED
from whet.data.batch import GlobalBatch, MicroBatch
from whet.data.order import mix_seed
from whet.data.source import AbstractSource
from whet.device.abstract import AbstractDevice
from whet.device.random_streams import RandomStreams
from whet.distributed.group import RankGroup
from whet.plan.plan import Plan, keep_runtime_changes, with_more_facts
from whet.run.events import History
from whet.run.folder import PYTHON_RECIPE, Run, rewrite_parts
from whet.step.apply_plan import (
    build_stepper,
    set_process_settings,
)
from whet.step.model_contexts import WeightLayout
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.step import Stepper
from whet.training.callback import Action, CallbackList
from whet.training.callbacks.event_log import Recorder
from whet.training.callbacks.stop_signals import StopSignals
from whet.training.checkpointer import Checkpointer
from whet.training.executor import Executor
from whet.training.metrics import scalar_metrics
from whet.training.progress import State
from whet.training.registered import RegisteredObjects
from whet.training.restore import RestoredRun
from whet.training.resume_verification import ResumeVerification
from whet.training.run_config import RunConfig
from whet.training.schedule import LearningRates
from whet.training.source_code import SourceCode, model_classes
from whet.training.torch_schedule import schedule_functions
from whet.training.unsaved_state import UnsavedStateDetector

_BETWEEN_STEPS = 2**32
"""Distinguishes the seed of code between steps from the seeds of all epochs and steps."""


class RunContext:
    """A live run: the device, data, model, optimizer and services that a session and its callbacks share."""

    checkpointer: Checkpointer | None = None
    verification: ResumeVerification | None = None
    """Repeats the steps up to the newest checkpoint; None if a resume is not verified or already has been."""
    unsaved_state: UnsavedStateDetector | None = None
    """Detects state that checkpoints do not hold; None if this process writes no checkpoints."""
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
        self.model = config.model
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
        self.replaced: Path | None = None
        """The folder of a failed attempt that this run has replaced; None if there was none."""
        self.exit_stack = exit_stack
        """Undoes the setup in reverse order when the session ends."""
        self.folder: Run | None = None
        self.guard: NonFiniteGuard
        self.log: Recorder
        self.stop_signals = StopSignals()
        self.divides_batches = config.training.split_batch is not False
        """Whether the loss may be called with only some samples of a batch in the checks before the first step."""
        self.has_users_gradients = False
        """Whether a manual step produced the gradients, which may be accumulated. Checkpoints then save them."""
        self.pending = Action.NONE
        """The merged actions that the loop has not carried out yet."""
        self.requests: deque[Action] = deque()
        """Actions that other threads and signal handlers have requested since the last step."""

    @property
    def other_optimizers(self) -> dict[str, tuple[Optimizer, torch.amp.GradScaler]]:
        """All optimizers except the main one, by name, each with its loss scaler."""
        _, *others = self.steppers.items()
        return {name: (stepper.optimizer, stepper.scaler) for name, stepper in others}

    @property
    def path(self) -> Path | None:
        """The run folder; None if nothing is written."""
        return None if self.folder is None else self.folder.path

    def request(self, action: Action) -> None:
        """Request an action from any thread or signal handler. The loop carries it out after the current step."""
        # deque.append is atomic. A lock could deadlock, because a signal handler may run between any two bytecodes.
        self.requests.append(action)

    @property
    def is_stop_requested(self) -> bool:
        """Whether a stop has been requested that the loop has not carried out yet."""
        return self.pending.stop is not None or any(action.stop is not None for action in tuple(self.requests))

    def batches(self) -> Iterator[GlobalBatch]:
        """Return the remaining global batches of the epoch. Time spent waiting for them is logged as data time."""
        read = self.group.stall_detector.reading(self.source.batches(self.state.position))
        return self.log.timed(read)

    def users_autocast(self) -> AbstractContextManager[object]:
        """Return the context of the user's evaluation and manual steps: autocast if the user has set `precision`.

        Converted weights are not kept: the user's code may change weights, or use them without gradients first.

        A measured precision was compared with float32 only for the loss and gradients of training. Recipes evaluate in
        the dtype of their weights.
        """
        is_set = "precision" in self.plan.overrides and self.config.recipe == PYTHON_RECIPE
        return self.device.autocast(self.plan.precision if is_set else "fp32", keeps_weights=False)

    def first_samples(self, batch: GlobalBatch, size: int) -> MicroBatch:
        """Return the first `size` samples of a batch, or all of them if the loss needs the whole batch."""
        size = min(size, len(batch)) if self.divides_batches else len(batch)
        return next(iter(self.source.micro_batches(batch, micro_batch=size, length_mode=self.plan.lengths)))

    def use_plan(self, plan: Plan) -> None:
        """Replace the run's plan, and write the new plan to the run folder."""
        self.plan = plan
        self.guard.has_scaler = self.stepper.scaler.is_enabled()
        self.watch_for_stalls()
        if self.unsaved_state is not None:
            self.unsaved_state.follow_plan()
        if self.folder is not None and self.group.is_rank_zero:
            rewrite_parts(self.folder, plan=plan.as_json())

    def plan_again(self, **facts: Any) -> None:
        """Make a new plan from additional facts about the workload. Settings that are in force stay as they are."""
        self.use_plan(with_more_facts(self.plan, facts, is_started=self.executor.is_ready))

    def watch_for_stalls(self) -> None:
        """Inform the stall detector whether the model is compiled, since a new shape may then trigger a compilation."""
        self.group.stall_detector.is_compiled = self.plan.compile != "off"

    def replan(self, plan: Plan) -> None:
        """Apply a measured plan to a run with one optimizer, before its first step. Device and data stay the same."""
        self.executor.close()
        plan = keep_runtime_changes(plan, earlier=self.plan)
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
        if self.unsaved_state is not None:
            # The executor selects the attention kernels, which are settings of the process.
            self.unsaved_state.follow_plan()
        if self.checkpointer is not None:
            # The first checkpoint records the settings that later ones must match.
            self.checkpointer.save_initial_again()

    def note_inexact(self, step: int, reason: str) -> None:
        """Record in all later checkpoints that the run has not been bit-exact since `step`."""
        if self.checkpointer is not None:
            self.checkpointer.note_inexact(step, reason)

    def warn_inexact(self, step: int, reason: str) -> None:
        """Log a warning, and record that the run has not been bit-exact since `step`."""
        self.log.event("warning", step=step, reason=reason, exact=False, retry="never")
        self.note_inexact(step, reason)

    def record_unsaved_state(self, gap: str, *, is_variable: bool = False) -> None:
        """Record a gap in all later checkpoints and log one warning about it."""
        if self.checkpointer is not None and self.checkpointer.record_unsaved_state(gap, is_variable=is_variable):
            how = "session.register(name, object)" if self.config.is_custom_loop else "register={name: object}"
            hint = "" if gap.startswith(REGISTERED) else f" ({how} saves an object)"
            reason = f"checkpoints do not hold the whole state: {gap}{hint}"
            if is_variable:
                reason = f"{gap} and is not saved with the run ({how}, if training reads it)"
            self.log.event("warning", step=self.state.step, reason=reason, retry="never")

    def begin_steps(self) -> None:
        """Save objects that were registered late, and warn about registered names that differ from the checkpoint."""
        for mismatch in self.registered.begin(is_new=self.state.step == 0):
            self.warn_inexact(self.state.step, mismatch)
        if self.checkpointer is not None and self.registered.objects.keys() - self.config.register.keys():
            self.checkpointer.save_initial_again()
        if self.unsaved_state is not None:
            self.unsaved_state.begin()

    def log_session(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Log a `start` or `resume` event for the session."""
        goal: dict[str, Any] = {"goal": self.config.goal, "mode": self.config.mode}
        if len(self.steppers) > 1:
            goal["optimizers"] = list(self.steppers)
        log = self.log.notify if self.log.is_idle else self.log.event
        log(kind, step=self.state.step, total_steps=self.state.total_steps, **goal, **fields)

    def roll_back(self, reason: str) -> None:
        """Restore the newest checkpoint. The batches since then are repeated."""
        checkpoint = None if self.checkpointer is None else self.checkpointer.newest()
        if checkpoint is None:
            raise WhetError("the run cannot be rolled back: it has no checkpoint", got=reason, try_="run=DIR")
        restored = self.restore(checkpoint)
        self.executor.reset_rollback_snapshot()
        self.verification, self.log.repeat_until = None, -1
        self.log_session("resume", {**restored.fields, "rollback_reason": reason})
        # The non-finite step was discarded with all others since the checkpoint, so the guard starts over.
        self.guard.first_non_finite = None

    def has_logged(self, prefix: str) -> bool:
        """Return whether the run folder holds a metric with this prefix for the newest step."""
        if self.folder is None:
            return False
        is_logged = False
        if self.group.is_rank_zero:
            newest = (e for e in History(self.folder).backwards(kinds=("eval",)) if e.step == self.state.step)
            is_logged = any(name.startswith(prefix) for event in newest for name in event.fields)
        # Use the answer of rank 0, because other ranks may see its writes slightly later.
        return bool(self.group.broadcast(is_logged))

    def last_metrics(self) -> dict[str, float]:
        """Return the metrics that were logged at the newest step; empty if there are none."""
        metrics: dict[str, float] = {}
        if self.folder is not None and self.group.is_rank_zero:
            for event in History(self.folder).backwards(kinds=("eval",)):
                if event.step != self.state.step:
                    break
                metrics = {**scalar_metrics(event.fields), **metrics}
        shared: dict[str, float] = self.group.broadcast(metrics)
        return shared

    def raise_callback_error(self) -> NoReturn:
        """Save a checkpoint, then raise the error of a callback that failed on any rank."""
        failure = self.callbacks.failure
        if self.group.is_single_process:
            # The final checkpoint is written when the session is left.
            assert failure is not None
            raise failure[1]
        messages = self.group.all_gather(None if failure is None else f"{failure[0]}: {failure[1]}")
        if self.checkpointer is not None:
            self.checkpointer.save("last")
        self.group.barrier()
        if failure is not None:
            raise failure[1]
        rank, message = next((rank, text) for rank, text in enumerate(messages) if text is not None)
        raise WhetError(
            "a callback failed on another rank", got=f"rank {rank}: {message}", try_="see the traceback on that rank"
        )

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
        """Log a warning for each change of code since the run began: results may differ from an uninterrupted run."""
        for change in changes:
            reason = f"{change} since the run was started"
            self.log.event("warning", step=self.state.step, reason=reason, exact=False, retry="never")
            self.note_inexact(self.state.step, change)
