"""Session: the live object of a run, and its training loop.

with whet.Session(model, optimizer, data, global_batch_size=32, run="runs/mine") as session:
    for batch in session:
        session.step(loss, batch)
        if session.due("evaluate"):
            session.log(accuracy=...)
"""

import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import DivergedError, UsageError, WhetError
from whet.checkpoint import store
from whet.config.keywords import TrainingKeywords
from whet.data.batch import GlobalBatch, MicroBatch
from whet.distributed.group import current_group
from whet.machine.pressure import ReadConditions
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training import checks
from whet.training.callback import SAVE_WHEN_IDLE, Action, Callback, State
from whet.training.callbacks.event_log import EventHandler
from whet.training.checkpointer import Urgency
from whet.training.evaluator import Evaluate, use_best_weights
from whet.training.executor import RollbackRequiredError
from whet.training.metrics import normalize_metrics, scalar_metrics
from whet.training.rank_sync import RankSync
from whet.training.resume import run_exists
from whet.training.setup import RunContext, make_run_config, setup
from whet.training.training_config import parse_training_config
from whet.training.tune import OpenStepBench, report_lines, tuned_plan
from whet.verify.trainable import OutputFunction

_ALL_DONE = "all steps of this session are done"
MAX_ROLLBACKS = 40
"""Maximum number of rollbacks in one session, by the NaN guard and by callbacks together. The guard stops earlier."""


class Session:
    """Runs optimizer steps, logs them, saves checkpoints and resumes. Enter it, iterate over it, and call `step`.

    `run` is the run folder; without one, nothing is written. `device` is auto, mps, cuda, cuda:1 or cpu. `overrides`
    fixes settings of the plan (micro_batch, precision, threads, ...; see docs/rules). `plan` is a plan for a new run,
    made by `whet.tune` or `whet.make_plan`. `goal` names the metric that selects the best checkpoint, and `mode` is
    "max" or "min". `init_from` is a run whose weights a new run starts with. `allow` names what may differ when a run
    resumes: "data", "batch". `callbacks` are instances of whet.Callback (docs/callbacks.md). `on_event` is called with
    the kind and the fields of every event. `read_sensors` is a function; the default reads the sensors of this
    machine. `outputs` is for causal models: a function from a micro-batch to the model's outputs, of shape
    (batch, length, ...); causality is then verified before the first step. All other keywords are fields of
    `TrainingConfig`: global_batch_size, epochs, max_steps, seed, shuffle, schedule, warmup_steps, clip, ema,
    eval_every, patience, epochs_per_session.

    A resumed run keeps its original options. A changed training option, override or dataset is an error that names it.
    The learning rates come from the checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | OptimizerChoice,
        data: Any,
        *,
        run: str | Path | None = None,
        device: str = "auto",
        overrides: Mapping[str, Scalar] | None = None,
        plan: Plan | None = None,
        workload: Workload | None = None,
        goal: str | None = None,
        mode: str = "max",
        recipe: str = "session",
        config: Mapping[str, Any] | None = None,
        command: list[str] | None = None,
        init_from: str | Path | None = None,
        allow: Collection[str] = (),
        attach: Mapping[str, bytes] | None = None,
        callbacks: Sequence[Callback] = (),
        on_event: EventHandler | None = None,
        read_sensors: ReadConditions | None = None,
        outputs: OutputFunction | None = None,
        **training: Unpack[TrainingKeywords],
    ) -> None:
        self.training = parse_training_config(training)
        self.model = model
        self.config = make_run_config(
            model,
            optimizer,
            data,
            self.training,
            run=run,
            device=device,
            overrides=overrides,
            plan=plan,
            workload=workload,
            goal=goal,
            mode=mode,
            recipe=recipe,
            config=config,
            allow=allow,
            command=command or [],
            init_from=init_from,
            attach=attach or {},
            callbacks=tuple(callbacks),
            on_event=on_event,
            read_sensors=read_sensors,
            outputs=outputs,
        )
        self.state = State(epochs=self.training.epochs, max_steps=self.training.max_steps)
        self._exit_stack = contextlib.ExitStack()
        self._phase = "new"
        self._batch: GlobalBatch | None = None
        self._is_in_step = False
        self._num_rollbacks = 0

    def tune(self, loss: LossFunction, *, open_bench: OpenStepBench | None = None) -> None:
        """Measure which plan is fastest. Call this before entering the session.

        Skipped for a resumed run, with a given plan, with several ranks, and if the run is too short to repay it.
        """
        group, config = current_group(), self.config
        if not group.is_single_process:
            if group.is_rank_zero:
                report_lines(config.on_event, "not measured: the steps of several ranks are planned by rules")
        elif config.plan is None and not run_exists(config.path):
            self.config = replace(config, plan=tuned_plan(config, loss, open_bench=open_bench))

    # --- entering and leaving ----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Set up the run. Invalid input raises before a new run folder is created."""
        if self._phase != "new":
            raise UsageError("a session is entered once", got="a second `with`", try_="a new Session with the same run")
        with contextlib.ExitStack() as undo:
            undo.callback(self._exit_stack.close)
            self.run = setup(self.config, self.state, self._exit_stack)
            self._sync = RankSync(self.run.group)
            self._first_epoch = self.state.epoch
            # A compiled model may compile again for a new shape, so its steps get a longer stall limit.
            self.run.group.stall_detector.is_compiled = self.run.plan.compile != "off"
            self.run.callbacks.on_start(self.run)
            self.run.log_pending_events()
            if not self.model.training:
                # Skipped if the model is in training mode already: train() would also switch submodules that the user
                # keeps in eval mode on purpose, such as a frozen BatchNorm.
                self.model.train()
            undo.pop_all()
        self._phase = "entered"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            failure = self._final_save(error) or self.run.callbacks.error
            # on_end runs after the final save, so a failing callback cannot cost the last checkpoint.
            try:
                self.run.callbacks.on_end(self.state, error or failure)
            except Exception as raised:
                failure = failure or raised
            error_to_log = error or failure
            with contextlib.suppress(Exception) if error_to_log is not None else contextlib.nullcontext():
                self.run.log.end(self.state, error_to_log)
            if error is None and failure is not None:
                raise failure
        finally:
            self._phase = "left"
            is_failing = error is not None or sys.exc_info()[0] is not None
            # Suppress errors of the clean-up if the session is failing already: the first error is the one to report.
            with contextlib.suppress(WhetError) if is_failing else contextlib.nullcontext():
                self._exit_stack.close()

    def _final_save(self, error: BaseException | None) -> Exception | None:
        """Save the last state if it is consistent. Return the error if saving failed, else None."""
        run = self.run
        # The final save is skipped in three cases: the error was raised inside a step (the weights may be half
        # updated), it is a second Ctrl-C (not an Exception), or this rank holds a shard and cannot save alone.
        is_whole = error is None or (
            isinstance(error, Exception) and not self._is_in_step and run.stepper.strategy.has_full_model
        )
        unsaved: Exception | None = None
        try:
            if is_whole and run.executor.is_finite(check_weights=True):
                self._save("last")
            elif is_whole and error is None:
                run.guard.raise_diverged()
        except Exception as failure:
            unsaved = failure
        if run.checkpointer is not None:
            run.checkpointer.close()
        return unsaved

    # --- the training loop -------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Yield the remaining global batches, and act on the requests of callbacks between steps."""
        run, state = self._entered_run(), self.state
        while not state.is_finished:
            num_rollbacks, before = self._num_rollbacks, state.step
            for batch in run.batches():
                self._batch = batch
                run.callbacks.before_step(state)
                yield batch
                action = self._agree(batch, step=before + 1, is_rolled_back=self._num_rollbacks != num_rollbacks)
                if action.rollback is not None:
                    self._roll_back(action.rollback)
                if self._num_rollbacks != num_rollbacks:
                    # A stop request survives a rollback. "All steps are done" does not: some steps are repeated.
                    if action.stop not in (None, _ALL_DONE):
                        return
                    break
                if state.step != before + 1:
                    raise checks.one_step_error(state.step - before)
                before += 1
                if action.save:
                    self._save("due" if action.save == SAVE_WHEN_IDLE else "now")
                # The checkpoint of this step comes first: on_epoch_end is documented to run after it.
                if batch.is_last_of_epoch:
                    run.pending |= run.callbacks.on_epoch_end(state)
                if action.stop is not None or (run.group.is_single_process and run.is_stop_requested):
                    return
            else:
                checks.check_epoch_complete(state.position)

    def _agree(self, batch: GlobalBatch, *, step: int, is_rolled_back: bool) -> Action:
        """Merge the requested actions. Several ranks synchronize them, every few steps."""
        run, state = self.run, self.state
        action = run.collect_requests()
        if state.is_finished or self._is_session_over(batch):
            action |= Action(stop=_ALL_DONE, on_all_ranks=True)
        # Actions that depend on the step only are the same on every rank. All others wait for a synchronization.
        is_non_finite, has_failed = False, run.callbacks.failure is not None
        if not run.group.is_single_process:
            must_sync = action.on_all_ranks or batch.is_last_of_epoch or is_rolled_back
            if not must_sync and not self._sync.is_due(step):
                return Action.NONE
            agreed = self._sync.agree(
                step, action, is_non_finite=run.guard.first_non_finite is not None, has_failed=has_failed
            )
            action, is_non_finite, has_failed = agreed.action, agreed.is_non_finite, agreed.has_failed
            run.stop_signals.signal = run.stop_signals.signal or action.signal or None
        run.pending = Action.NONE
        if has_failed:
            run.raise_callback_error()
        if action.stop not in (None, _ALL_DONE) and not action.signal:
            run.log.notify("stopping", step=state.step, message=f"stopping: {action.stop}")
        check_weights = is_non_finite or bool(action.save) or action.stop is not None
        if not is_rolled_back and not run.executor.is_finite(check_weights=check_weights):
            # Write the outcomes that are still pending before the rollback: their steps will be repeated.
            run.log.read()
            action |= Action.ROLLBACK(run.guard.start_rollback())
        return action

    def step(self, loss: LossFunction, batch: GlobalBatch) -> None:
        """Run one optimizer step on a global batch: split, forward, backward, clip, update, EMA, log."""
        run, state = self._entered_run(), self.state
        if batch is not self._batch or state.position == batch.after:
            raise checks.wrong_batch_error()
        number = state.step + 1
        state.lr = run.rates.set_for(number)
        # Set after the checks above: their errors leave the weights unchanged, so the final save may still happen.
        self._is_in_step = True
        try:
            with run.group.stall_detector.working(f"step {number:,}"):
                outcome = run.executor.step(loss, batch, number=number)
        except RollbackRequiredError as error:
            self._roll_back(str(error))
            self._is_in_step = False
            return
        self._is_in_step = False
        state.advance(batch)
        # Callbacks may read losses of earlier steps, which waits for the device, so the stall detector covers them too.
        with run.group.stall_detector.working(f"step {number:,}"):
            action = run.callbacks.after_step(state, outcome)
            if action is not Action.NONE:
                run.pending |= action
            if not outcome.is_skipped:
                run.log_pending_events()

    def due(self, what: str) -> bool:
        """Return whether an evaluation is due: every `eval_every` steps or after each epoch, and after the last step.

        `what` is "evaluate". An evaluation that was due when the run stopped is due again after a resume.
        """
        if what != "evaluate":
            raise UsageError("only an evaluation can be due", got=what, try_='session.due("evaluate")')
        state, every = self.state, self.training.eval_every
        if state.step in (0, state.evaluated_step) or (self.is_finished and self.has_logged("")):
            return False
        is_time = state.position.samples == 0 if every == "auto" else state.step % every == 0
        return is_time or self.is_finished

    def evaluate(self, evaluate: Evaluate, data: Any, *, prefix: str = "", use_best: bool = False) -> dict[str, float]:
        """Evaluate on `data`, log the metrics, and return them. Training state is unchanged afterwards.

        Uses the averaged weights if `ema` is on. With `use_best`, loads the checkpoint with the best goal metric.
        """
        run, start, goal = self.run, time.perf_counter(), self.config.goal
        fields: dict[str, Any] = {}
        if use_best:
            with use_best_weights(run) as best_step:
                returned = run.executor.evaluate(evaluate, data)
            # Loading and restoring the weights invalidates what the executor knows about the changes of a step.
            run.executor.expect_changes()
            fields["weights"] = store.checkpoint_name(best_step)
        else:
            returned = run.executor.evaluate(evaluate, data)
        values = {f"{prefix}{name}": value for name, value in returned.items()}
        metrics = scalar_metrics(values)
        run.log.spent("evaluate", time.perf_counter() - start)
        if goal is not None and not prefix and goal not in metrics:
            raise UsageError("the goal is not among the metrics", got=goal, try_=" or ".join(metrics))
        self._log(values, **fields)
        return metrics

    def batches(self, data: Any) -> Iterator[MicroBatch]:
        """Yield micro-batches of `data` in its original order, on the device, in the planned evaluation batch size."""
        return self.run.executor.batches(data)

    def log(self, **values: Any) -> None:
        """Log metrics. The goal metric selects the best checkpoint, and drives early stopping and the plateau schedule.

        `confusion` ({"labels": [...], "counts": [[...]]}) and `samples` (a list of dicts) are kept for the report.
        """
        self._log(values)

    @property
    def plan(self) -> Plan:
        """The plan of the run. It may change during the run, for example after an out-of-memory error."""
        return self.run.plan

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or early stopping ended the run."""
        return self.state.is_finished

    def has_logged(self, prefix: str) -> bool:
        """Return whether the run folder holds a metric with this prefix for the newest step."""
        return self.run.has_logged(prefix)

    @property
    def exit_code(self) -> int:
        """The exit code for the process: 0, or 128 plus the number of the signal that stopped the run."""
        return 0 if self.is_finished else self.run.stop_signals.exit_code

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _entered_run(self) -> RunContext:
        """Return the live run. Raise outside `with`, where the session has no device, data or lock."""
        if self._phase != "entered":
            got = f"a session that is {self._phase}"
            raise UsageError("a session works inside `with`", got=got, try_="with whet.Session(...) as session:")
        return self.run

    def _log(self, values: Mapping[str, Any], **fields: Any) -> None:
        checks.check_metric_names({*values})
        run, state, goal = self.run, self.state, self.config.goal
        values = normalize_metrics(values)
        metrics = scalar_metrics(values)
        state.evaluated_step = state.step
        run.log.event("eval", step=state.step, **fields, **values)
        if goal is not None and goal in metrics:
            # Scores are maximized everywhere below, so "min" metrics are negated here.
            score = metrics[goal] if self.config.mode == "max" else -metrics[goal]
            state.record_score(score)
            run.schedule.observe(score)
        run.pending |= run.callbacks.on_evaluate(state, metrics)

    def _save(self, urgency: Urgency) -> None:
        if self.run.checkpointer is not None:
            self.run.checkpointer.save(urgency)

    def _roll_back(self, reason: str) -> None:
        self._num_rollbacks += 1
        if self._num_rollbacks > MAX_ROLLBACKS:
            hint = "a callback that asks for a rollback only if repeating the steps can help"
            raise DivergedError(f"the run was rolled back {MAX_ROLLBACKS} times", got=reason, try_=hint)
        self.run.roll_back(reason)

    def _is_session_over(self, batch: GlobalBatch) -> bool:
        limit = self.training.epochs_per_session
        return limit is not None and batch.is_last_of_epoch and batch.after.epoch - self._first_epoch >= limit
