"""The loop over global batches: yields them, runs their steps and acts on requests in between.

Callbacks request a save, a rollback or a stop. The loop merges their requests, synchronizes them between ranks and
carries them out after the batch.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from whet.base.errors import DivergedError, UsageError
from whet.data.batch import GlobalBatch
from whet.device.abstract import DeviceMonitor
from whet.device.errors import is_gpu_failure, is_out_of_memory
from whet.step.loss import BatchLoss
from whet.step.rollback import release_traceback
from whet.step.step import Outcome
from whet.training import checks
from whet.training.batch_steps import MANUAL, BatchSteps
from whet.training.callback import SAVE_WHEN_IDLE, Action
from whet.training.checkpointer import Urgency
from whet.training.end_reason import stop_reason
from whet.training.executor import RollbackRequiredError
from whet.training.rank_sync import RankSync
from whet.training.run_context import RunContext
from whet.training.state_check import check_first_step, state_is_unchecked
from whet.training.tune import tune_first_step

_ALL_DONE = "all steps of this session are done"
MAX_ROLLBACKS = 40
"""Maximum number of rollbacks in one session, by the NaN guard and callbacks together.

The guard's own limit is lower.
"""


class BatchLoop:
    """The training loop of an entered session."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self.state = run.state
        self.training = run.config.training
        self.steps = BatchSteps()
        """The steps of the current batch."""
        self.has_begun = False
        """Whether the first batch has been read."""
        self._is_unchecked = state_is_unchecked(run)
        self._names: dict[tuple[str | None, int], str] = {}
        """Names of optimizers that `step` has been asked for, by its arguments."""
        self._is_tuned = False
        """Whether the first step has measured its plan, or has found that no measurement is needed."""
        self._sync = RankSync(run.group)
        self._may_have_events = type(run.device.monitor) is not DeviceMonitor or not run.source.is_in_memory
        self._first_epoch = run.state.epoch
        self._has_finished_batch = False
        self._is_in_step = False
        self._is_in_body = False
        """Whether the body of the user's loop over the batches is running."""
        self._num_rollbacks = 0

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield the remaining global batches, and carry out the requests of callbacks in between."""
        run, state = self.run, self.state
        # A loop that was left with `break` may be entered again.
        self.finish_batch()
        if not self.has_begun:
            self.has_begun = True
            run.begin_steps()
        while not state.is_finished:
            num_rollbacks, before = self._num_rollbacks, state.step
            for batch in run.batches():
                self.steps.begin(batch)
                run.callbacks.before_step(state)
                self._is_in_body = True
                yield batch
                self._is_in_body = False
                if self.steps.is_pending:
                    self.finish_batch()
                if self._has_no_request(batch, step=before + 1):
                    before += 1
                    continue
                action = self._agree(batch, step=before + 1, is_rolled_back=self._num_rollbacks != num_rollbacks)
                if action.rollback is not None:
                    self._roll_back(action.rollback)
                if self._num_rollbacks != num_rollbacks:
                    # A stop request survives a rollback. "All steps are done" does not, because some steps are
                    # repeated.
                    if action.stop not in (None, _ALL_DONE):
                        state.stop_reason = stop_reason(action)
                        return
                    break
                if state.step != before + 1:
                    raise checks.one_step_error(state.step - before)
                before += 1
                # Call on_epoch_end before the checkpoint of this step is saved, so that it has the state of callbacks.
                if batch.is_last_of_epoch:
                    run.pending |= run.callbacks.on_epoch_end(state)
                if action.save:
                    self._save("due" if action.save == SAVE_WHEN_IDLE else "now")
                if run.group.is_single_process:
                    action |= self._collect_requests()
                if action.stop is not None:
                    is_requested = bool(action.signal) or action.stop != _ALL_DONE
                    state.stop_reason = stop_reason(action) if is_requested else self._session_over_reason()
                    return
            else:
                checks.check_epoch_complete(state.position)

    def _has_no_request(self, batch: GlobalBatch, *, step: int) -> bool:
        """Return whether the loop may continue with the next batch at once, as it does after most steps.

        After the kernels of a step, little of this code is left in the processor's caches, and each call costs several
        times what it takes in a profile. So the usual case asks everything in one place.
        """
        run, state = self.run, self.state
        return (
            state.step == step
            and run.pending is Action.NONE
            and not run.requests
            and not batch.is_last_of_epoch
            and run.group.is_single_process
            and run.guard.first_non_finite is None
            and not state.is_finished
            and run.verification is None
        )

    def _agree(self, batch: GlobalBatch, *, step: int, is_rolled_back: bool) -> Action:
        """Merge the requested actions. With several ranks, synchronize them every few steps."""
        run, state = self.run, self.state
        action = self._collect_requests()
        if state.is_finished or self._is_session_over(batch):
            action |= Action(stop=_ALL_DONE, on_all_ranks=True)
        # Actions that depend only on the step are the same on every rank. All others wait for a synchronization.
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
            # Write the pending outcomes before the rollback, because their steps will be repeated.
            run.log.read()
            if run.checkpointer is None:
                # No step can be repeated. The first bad batch is no longer available, but this one shows whether the
                # data has NaN.
                assert run.guard.first_non_finite is not None
                number, how = run.guard.first_non_finite
                how = f"{run.executor.with_bad_data(batch, how)}; no run folder, so there is no checkpoint"
                run.guard.first_non_finite = number, how
                run.guard.raise_diverged()
            action |= Action.ROLLBACK(run.guard.start_rollback())
        return action

    def _collect_requests(self) -> Action:
        """Merge all requests into the pending action and return the result."""
        run = self.run
        while run.requests:
            run.pending |= run.requests.popleft()
        return run.pending

    def log_pending_events(self) -> None:
        """Log pending events of the device and the data. Raise if the device has failed without raising an error."""
        run = self.run
        for kind, fields in (*run.device.monitor.events(), *run.source.events()):
            run.log.event(kind, step=self.state.step, **fields)
        run.device.monitor.check()

    # --- steps of a batch --------------------------------------------------------------------------------------------

    def step(self, loss: BatchLoss, batch: GlobalBatch, *, optimizer: str | None, every: int) -> None:
        """Run one optimizer step. `optimizer` selects one of several by name; it steps on every `every`-th batch."""
        run, state = self.run, self.state
        name = self._checked_name(optimizer, every)
        if self.steps.is_rolled_back and batch is self.steps.batch:
            # A step of another optimizer on this batch has caused a rollback: the batch will be repeated.
            return
        self.steps.check(batch, name)
        if not self._is_tuned:
            self._is_tuned = True
            tune_first_step(run, loss.function)
        number = state.step + 1
        if not loss.is_observed and run.unsaved_state is not None:
            run.unsaved_state.add_loss(loss.function)
        if not run.model.training:
            raise checks.eval_mode_error(number)
        run.rng.enter_step()
        try:
            if run.group.is_single_process:
                outcome = self._step_optimizer(loss, batch, name, number=number, every=every)
            else:
                with self._working(number):
                    outcome = self._step_optimizer(loss, batch, name, number=number, every=every)
        except RollbackRequiredError as error:
            self._roll_back(str(error))
            self._is_in_step = False
            return
        finally:
            run.rng.leave_step()
        self._is_in_step = False
        if outcome is None:
            self.steps.skip(name)
        else:
            if not loss.is_observed:
                loss.is_observed = True
                if changes := run.sources.observe_loss(loss.function):
                    run.warn_changed_code(changes)
            run.has_users_gradients = False
            self.steps.add(name, outcome)
        # The batch is complete once every optimizer has had its turn.
        if len(run.steppers) == 1 or self.steps.has_visited(run.steppers.keys()):
            self.finish_batch()

    def _step_optimizer(
        self, loss: BatchLoss, batch: GlobalBatch, optimizer: str, *, number: int, every: int
    ) -> Outcome | None:
        """Run step `number` of an optimizer; return None if it does not step on this batch."""
        run = self.run
        run.executor.prepare(loss, batch, number=number, optimizer=optimizer)
        if number % every:
            return None
        self.state.lr = run.rates.set_for(number)
        # Set this after the checks: their errors leave the weights unchanged, so the final save is still allowed.
        self._is_in_step = True
        return run.executor.step(loss, batch, number=number, optimizer=optimizer)

    def _checked_name(self, optimizer: str | None, every: int) -> str:
        """Return the name of the optimizer to step. Raise UsageError if it is unknown or cannot step here."""
        is_plain = type(every) is int and (optimizer is None or isinstance(optimizer, str))
        known = self._names.get((optimizer, every)) if is_plain else None
        if known is None:
            known = checks.optimizer_name(self.run.config.optimizers, optimizer, every)
            checks.check_no_closure(self.run.steppers[known].optimizer)
            self._names[optimizer, every] = known
        return known

    def _working(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the stall detector expects progress. A single process waits for nobody."""
        return self.run.group.stall_detector.working(f"step {step:,}")

    @contextlib.contextmanager
    def manual(self, batch: GlobalBatch) -> Iterator[Any]:
        """Yield the data of a batch on the device, for a step performed by the user's own code."""
        run, state = self.run, self.state
        self.steps.check(batch, MANUAL)
        checks.check_manual(self.training, run.group)
        run.executor.splitting.use_whole_batches("manual steps get the whole batch")
        # Gradients computed by the user may have any layout, and fused kernels on the CPU would misread them.
        run.executor.use_own_kernels("manual steps may use gradients of any layout")
        number = state.step + 1
        state.lr = run.rates.set_for(number)
        micro = next(iter(run.source.micro_batches(batch, micro_batch=len(batch), length_mode="fixed")))
        run.executor.splitting.count_shapes(micro)
        if not run.has_users_gradients:
            # Clear the gradients of the last session.step: user code expects only gradients that it computed itself.
            for stepper in run.steppers.values():
                stepper.zero_grad()
        run.has_users_gradients = True
        self._is_in_step = True
        run.rng.enter_step()
        try:
            with self._working(number), run.device.compute_context(is_step=True):
                data = (micro if micro.is_on_device else micro.map_tensors(run.device.put)).data
                # fp16 would need the scaler of the loss, which the user's backward pass does not use.
                with run.users_autocast() if run.plan.precision == "bf16" else contextlib.nullcontext():
                    yield data
        finally:
            run.rng.leave_step()
        self._is_in_step = False
        run.executor.reset_rollback_snapshot()
        self.steps.add_manual()
        self.finish_batch()

    def log_loss(self, loss: Tensor) -> None:
        """Record the loss of a manual step."""
        if not self._is_in_step:
            raise UsageError(
                "log_loss must be called inside a manual step",
                got="a call outside `with session.manual(batch)`",
                try_="session.log_loss(loss) inside the block; session.log(name=value) logs other values",
            )
        self.steps.log_loss(loss.detach().reshape(()).to(self.run.device.torch_device))

    def finish_batch(self) -> None:
        """Count the steps of a batch as one step of the run and call the callbacks. A second call has no effect."""
        run, state, steps = self.run, self.state, self.steps
        outcome = steps.finish()
        if outcome is None:
            return
        assert steps.batch is not None
        if not self._has_finished_batch:
            self._has_finished_batch = True
            if run.unsaved_state is not None:
                run.unsaved_state.accept_hooks()
        if self._is_unchecked and not outcome.is_skipped:
            self._is_unchecked = False
            try:
                check_first_step(run)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # The state may be only partly restored. The step is repeated without checking its state again.
                problem = release_traceback(error)
                what_next = "repeats the step, and does not check its state again"
                run.log.event("oom", step=state.step + 1, reason=problem, action=what_next)
                self._roll_back(f"memory ran out while the state was checked: {problem}")
                return
        state.advance(steps.batch)
        if run.rates.advances:
            run.rates.after_step(is_last_of_epoch=steps.batch.is_last_of_epoch, stepped=steps.names)
        if run.group.is_single_process:
            self._call_after_step(outcome)
        else:
            # Callbacks may read the losses of earlier steps and so wait for the device; let the stall detector cover
            # them too.
            with self._working(state.step):
                self._call_after_step(outcome)

    def _call_after_step(self, outcome: Outcome) -> None:
        run = self.run
        action = run.callbacks.after_step(self.state, outcome)
        if action is not Action.NONE:
            run.pending |= action
        if self._may_have_events and not outcome.is_skipped:
            self.log_pending_events()

    # --- saving and rolling back -------------------------------------------------------------------------------------

    def final_save(self, error: BaseException | None) -> Exception | None:
        """Save the last state if it is consistent. Return the error if saving failed, otherwise None."""
        run = self.run
        # Skip the final save if an error or a `break` left the loop inside a step or between two steps of a batch: the
        # last checkpoint is then the newest state that an uninterrupted run would have too. Also skip it after a second
        # Ctrl-C (not an Exception), if this rank holds only a shard, and if the GPU has failed.
        is_usable = isinstance(error, Exception) and not is_gpu_failure(error)
        can_save = error is None or (is_usable and run.stepper.strategy.has_full_model)
        is_whole = can_save and not self._is_in_step and not self.steps.is_pending
        unsaved: Exception | None = None
        self._note_interruption(error)
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

    def _note_interruption(self, error: BaseException | None) -> None:
        """Record that an error interrupted a callback or the loop body, whose work for this batch is incomplete."""
        run, step = self.run, self.state.step
        if run.checkpointer is None:
            return
        if run.callbacks.failure is not None:
            name, failure = run.callbacks.failure
            run.checkpointer.note_interruption(f"{type(failure).__name__} ended the callback {name} at step {step:,}")
        elif error is not None and self._is_in_body and run.config.is_custom_loop:
            run.checkpointer.note_interruption(f"{type(error).__name__} ended the body of your loop at step {step:,}")

    def _save(self, urgency: Urgency) -> None:
        if self.run.checkpointer is not None:
            self.run.checkpointer.save(urgency)

    def _roll_back(self, reason: str) -> None:
        self._num_rollbacks += 1
        self.steps.discard()
        if self._num_rollbacks > MAX_ROLLBACKS:
            hint = "return Action.NONE from the callback if repeating the steps does not help"
            raise DivergedError(f"the run was rolled back {MAX_ROLLBACKS} times", got=reason, try_=hint)
        self.run.roll_back(reason)

    def _session_over_reason(self) -> str | None:
        """Return the reason if epochs_per_session ends this session; None if all steps are done."""
        limit = self.training.epochs_per_session
        if self.state.is_finished or limit is None:
            return None
        return f"stopped after {self.state.epoch} of {self.training.epochs} epochs: epochs_per_session={limit}"

    def _is_session_over(self, batch: GlobalBatch) -> bool:
        limit = self.training.epochs_per_session
        if self.run.verification is not None:
            # Steps that are repeated to verify a resume belong to an earlier session.
            self._first_epoch = batch.after.epoch
            return False
        return limit is not None and batch.is_last_of_epoch and batch.after.epoch - self._first_epoch >= limit
