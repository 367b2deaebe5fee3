"""Run steps and evaluations as planned, recover from out-of-memory errors, and skip steps that produce NaN.

The samples of a step and their weights never change. After an out-of-memory error, the micro-batch may become smaller,
which is logged.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from whet.base.errors import InsufficientMemoryError, UsageError
from whet.base.process import freeze_live_objects
from whet.data.batch import GlobalBatch, MicroBatch, describe_non_finite
from whet.data.order import mix_seed
from whet.device.errors import is_gpu_failure, is_out_of_memory
from whet.device.rng import seed_everything
from whet.distributed.strategies import RetryStepError
from whet.plan.plan import with_runtime_changes, with_smaller_eval_batch
from whet.plan.setting import MeasuredSetting
from whet.step.apply_plan import apply_kernels
from whet.step.compilation import compiled_loss
from whet.step.loss import MicroLoss
from whet.step.model_contexts import checkpoint_activations
from whet.step.rollback import StepRollback, reduce_memory, release_traceback
from whet.step.step import NonFiniteError, Outcome, Stepper, WrongReplayError
from whet.training.callbacks.event_log import sample_ids
from whet.training.checks import check_whet_attention, check_whet_norms
from whet.training.evaluator import Evaluate, Evaluator
from whet.training.notebook import describe_held_memory, name_held_memory
from whet.training.splitting import BatchSplitting
from whet.training.start_checks import StartChecks, uncompiled_plan
from whet.training.workload import calls_attention, measure_activation_bytes, preserve_loss_modules

if TYPE_CHECKING:
    from whet.training.run_context import RunContext


class RollbackRequiredError(Exception):
    """Raised if a step failed after it began to change the weights, which only a checkpoint can restore."""


class Executor:
    """Runs the steps and evaluations of one run as the plan specifies."""

    def __init__(self, run: "RunContext") -> None:
        self._run = run
        self._exit_stack = ExitStack()
        self._compiled = self._exit_stack.enter_context(ExitStack())
        """Holds the compiled calls of the model. Closing it returns the model to eager execution."""
        plan, stepper = run.plan, run.stepper
        if plan.layout != "contiguous":
            # On close, return the weights to their original memory format. Optimizer state follows the parameters.
            for one in run.steppers.values():
                self._exit_stack.callback(run.layout.use, "contiguous", one.optimizer)
        self._evaluator = Evaluator(run)
        self._exit_stack.callback(self._evaluator.close)
        # Apply this here rather than at the first step, because an evaluation may run earlier.
        self._exit_stack.enter_context(apply_kernels(plan, run.model, run.device))
        if plan.freed_memory == "kept":
            self._exit_stack.enter_context(run.device.memory.keep_freed())
        for one in run.steppers.values():
            self._exit_stack.callback(one.use_own_kernels, "the session is over")
            self._exit_stack.callback(one.release_graphs, "the session is over")
        self._checks = StartChecks(run=run, exit_stack=self._exit_stack)
        self._rollback = StepRollback(stepper.model, run.device)
        self.splitting = BatchSplitting(run)
        self.moved_from: str | None = None
        """The kind of device before the resume; None if it has not changed."""
        self.is_ready = False
        """Whether the model has been verified and compiled, so that the plan is in force."""
        self._loss_obstacle: str | None = None
        """The reason why the loss is not compiled with the model, as far as it has been logged."""
        self._is_recompiled = False
        """Whether the loss was compiled again for known shapes, which is logged once."""
        self._has_stepped = False
        self._oom_step: int | None = None

    def close(self) -> None:
        """Undo the changes to the model that the plan required, such as layout and hooks."""
        self._exit_stack.close()

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, loss: MicroLoss, batch: GlobalBatch, *, number: int, optimizer: str | None = None) -> Outcome:
        """Run optimizer step `number`, unless the NaN guard skips it. `optimizer` selects one of several by name.

        Raise RollbackRequiredError if the weights are NaN or Inf, or only partly updated.
        """
        run, guard = self._run, self._run.guard
        if number in guard.skipped:
            return _skipped_outcome()
        # After a rollback caused by NaN, every step up to the bad one is checked before its update.
        is_checked = number <= guard.check_until_step
        stepper = run.stepper if optimizer is None else run.steppers[optimizer]
        try:
            outcome = self._run_step(loss, batch, stepper, number=number, is_checked=is_checked)
        except NonFiniteError as error:
            self._skip(batch, number=number, reason=str(error))
            if len(run.steppers) > 1:
                # Another optimizer may have stepped on this batch already. When the batch is repeated, all of them skip
                # it.
                raise RollbackRequiredError(f"step {number:,}: {error}") from None
            return _skipped_outcome()
        if is_checked:
            if not stepper.has_finite_weights():
                # Loss and gradient were finite, but the updated weights are not. Only a checkpoint holds the earlier
                # weights.
                reason = "the update makes weights NaN or Inf"
                self._skip(batch, number=number, reason=reason)
                raise RollbackRequiredError(f"step {number:,}: {reason}")
            # With several optimizers, a later one may still find that this step is bad.
            is_last = number == guard.check_until_step and len(run.steppers) == 1
            if is_last and not guard.has_bad_step:
                reason = "repeated from the checkpoint, every step was finite"
                run.log.event("skip", step=number, reason=reason, verdict="transient")
        return outcome

    def is_finite(self, *, check_weights: bool) -> bool:
        """Return whether all losses read so far are finite.

        With `check_weights`, also read the losses that are still on the device, and check the weights.
        """
        run, guard = self._run, self._run.guard
        if check_weights:
            run.log.read()
            is_finite = all(stepper.has_finite_weights() for stepper in run.steppers.values())
            if guard.first_non_finite is None and not is_finite:
                guard.first_non_finite = run.state.step, "weights are NaN or Inf"
        return guard.first_non_finite is None

    def reset_rollback_snapshot(self) -> None:
        """Reset the rollback snapshot, because code outside a step may have changed the model."""
        self._rollback = StepRollback(self._run.stepper.model, self._run.device)

    def _run_step(
        self, loss: MicroLoss, batch: GlobalBatch, stepper: Stepper, *, number: int, is_checked: bool
    ) -> Outcome:
        """Run a step. If memory runs out, retry it with a smaller micro-batch."""
        run, rollback = self._run, self._rollback
        if not run.group.is_single_process:
            # Seeding with (seed, step, rank) makes dropout differ between ranks and keeps generator state out of
            # checkpoints.
            seed_everything(mix_seed(run.config.training.seed, number, run.group.ranks.rank) % 2**63)
        while True:
            try:
                rollback.save(run.rng.torch_states)
                outcome = stepper(
                    loss,
                    self.splitting.micro_batches(batch),
                    num_samples=len(batch.ids),
                    step=number,
                    is_checked=is_checked,
                )
                break
            except NonFiniteError as error:
                if not self._undo(stepper):
                    raise RollbackRequiredError(f"step {number:,}: {error}") from None
                raise
            except RetryStepError as error:
                # This is raised on every rank before the update. If one rank cannot undo the step, all ranks roll back.
                if any(run.group.all_reduce_max([float(not self._undo(stepper))])):
                    raise RollbackRequiredError(f"step {number:,}: {error}") from None
                continue
            except WrongReplayError as error:
                self._log_graph_refusal(stepper, number)
                raise RollbackRequiredError(f"step {number:,}: {error}") from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # A GPU failure is reported late and may stem from an earlier step, so the weights cannot be trusted.
                is_late = is_gpu_failure(error)
                # The traceback keeps the frames of the failed step alive, and with them its activations.
                problem = release_traceback(error)
                self._check_single_rank(problem)
            # Do this outside the except block: the exception keeps its tensors alive until the block ends.
            is_undone = not is_late and not stepper.is_updating and rollback.restore()
            stepper.abort()
            if run.plan.graph != "off" and stepper.graph_obstacle is None:
                stepper.release_graphs("memory ran out, and graphs hold some")
            self._log_graph_refusal(stepper, number)
            self._reduce_memory(problem, loss, batch, number=number)
            if is_late:
                raise RollbackRequiredError(f"the GPU ran out of memory at step {number:,} or before: {problem}")
            if not is_undone:
                raise RollbackRequiredError(f"step {number:,} ran out of memory while it changed the weights")
        if self.splitting.unlogged is not None:
            self.splitting.log_decision()
        if stepper.graph_obstacle is not None or stepper.is_launch_bound:
            self._log_graph_refusal(stepper, number)
        if run.plan.compile == "on":
            self._check_compiled_loss(number)
        if stepper.kernel_obstacle is not None:
            # Switch all optimizers: the plan, which a resume follows, has a single setting for them.
            self.use_own_kernels(stepper.kernel_obstacle)
        if not rollback.is_learned:
            self._learn_changes()
        if not self._has_stepped:
            self._has_stepped = True
            if run.plan.compile != "off":
                # torch.compile leaves many objects behind, and collecting garbage would take 0.15 s after every epoch,
                # so exclude them from garbage collection.
                freeze_live_objects()
        return outcome

    def _undo(self, stepper: Stepper) -> bool:
        """Undo a step that failed before its update. Return False if state that was not saved has changed."""
        is_undone = self._rollback.restore()
        stepper.abort()
        return is_undone

    def _learn_changes(self) -> None:
        """Record which tensors a step changes, so that later snapshots copy only those.

        Running out of memory here is harmless: the next snapshot then copies everything again.
        """
        try:
            self._rollback.learn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def _skip(self, batch: GlobalBatch, *, number: int, reason: str) -> None:
        samples = sample_ids(batch.ids)
        reason = self.with_bad_data(batch, reason)
        self._run.log.event("skip", step=number, reason=reason, verdict="reproducible", samples=samples)
        self._run.guard.skip(number, reason)

    def with_bad_data(self, batch: GlobalBatch, reason: str) -> str:
        """Return the reason for a non-finite step, extended by the fields of its batch that contain NaN or Inf."""
        run = self._run
        whole = next(iter(run.source.micro_batches(batch, micro_batch=len(batch), length_mode=run.plan.lengths)))
        problem = describe_non_finite(whole)
        run.guard.is_data_bad = run.guard.is_data_bad or problem is not None
        return reason if problem is None else f"{reason}; {problem}"

    def _log_graph_refusal(self, stepper: Stepper, number: int) -> None:
        """If the steps cannot be captured as graphs, turn capturing off in the plan and log the reason once."""
        run, reason = self._run, stepper.graph_obstacle
        if reason is None:
            if stepper.is_launch_bound and run.plan.graph == "launch_bound":
                on = MeasuredSetting(
                    value="on", reason="the device waits for the host to launch kernels", evidence={"step": number}
                )
                run.use_plan(with_runtime_changes(run.plan, {"graph": on}))
            return
        if run.plan.graph == "off":
            return
        off = MeasuredSetting(value="off", reason=reason, evidence={"step": number})
        run.use_plan(with_runtime_changes(run.plan, {"graph": off}))
        run.log.event("plan", step=number, message=f"steps are not captured as graphs: {reason}")

    def _check_compiled_loss(self, number: int) -> None:
        """Warn if a resumed run may round differently, because its loss would be compiled differently."""
        loss = compiled_loss(self._run.model)
        if loss is None:
            return
        if loss.obstacle != self._loss_obstacle:
            self._loss_obstacle = loss.obstacle
            self._run.warn_inexact(number, f"your loss function is no longer compiled ({loss.obstacle})")
        elif loss.is_recompiled and not self._is_recompiled:
            # torch compiles the first values into the code, and later ones not. So the code depends on the step at
            # which a run begins.
            self._is_recompiled = True
            why = "it may depend on a value that changes"
            self._run.warn_inexact(number, f"your loss function was compiled again for known shapes: {why}")

    def use_own_kernels(self, reason: str) -> None:
        """Restore the kernels that the user's optimizers had before the session."""
        for stepper in self._run.steppers.values():
            stepper.use_own_kernels(reason)
            stepper.kernel_obstacle = None
        run, step = self._run, self._run.state.step
        if run.plan.optimizer_kernels == "yours":
            return
        own = MeasuredSetting(value="yours", reason=reason, evidence={"step": step})
        run.use_plan(with_runtime_changes(run.plan, {"optimizer_kernels": own}))
        run.log.event("plan", step=step, message=f"your optimizer keeps its own kernels: {reason}")

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, evaluate: Evaluate, data: Any) -> dict[str, Any]:
        """Evaluate the current model. If memory runs out, try again with a smaller evaluation batch."""
        run, step = self._run, self._run.state.step
        while True:
            try:
                return self._evaluator.run(evaluate, data)
            except Exception as error:
                # A GPU failure may stem from an earlier step, so a smaller evaluation batch would not help.
                if not is_out_of_memory(error) or is_gpu_failure(error):
                    raise
                problem = release_traceback(error)
                self._check_single_rank(problem)
            finally:
                # The evaluation may have swapped averaged weights in and out, and changed buffers.
                self.reset_rollback_snapshot()
            self._empty_memory()
            run.use_plan(with_smaller_eval_batch(run.plan, step=step, problem=problem))
            action = f"evaluates {run.plan.eval_batch} at once"
            run.log.event("oom", step=step, reason=problem, action=action)

    def batches(self, data: Any) -> Iterator[Any]:
        """Yield micro-batches of `data` on the device, in original order and with the planned evaluation batch size."""
        return self._evaluator.batches(data)

    # --- before the first step ---------------------------------------------------------------------------------------

    def prepare(self, loss: MicroLoss, batch: GlobalBatch, *, number: int, optimizer: str) -> None:
        """Run the checks that precede the first step, and the first step of each optimizer and loss."""
        is_first = not self.is_ready
        if is_first:
            with preserve_loss_modules(loss, self._run.model):
                self._prepare(loss, batch, number=number)
        if self.splitting.is_split(batch):
            self.splitting.check_step(loss, batch, number=number, optimizer=optimizer, is_first=is_first)

    def _prepare(self, loss: MicroLoss, batch: GlobalBatch, *, number: int) -> None:
        """Measure the memory per sample, verify the model, then compile it."""
        run = self._run
        # The order matters: the micro-batch determines the shapes to verify, and the compiled model is compared last.
        if (obstacle := run.source.split_obstacle(batch)) is not None:
            run.divides_batches = False
            self.splitting.keep_whole(f"the collated batch cannot be divided into samples: {obstacle}")
        is_undecided = "micro_batch" not in run.plan.overrides and run.plan.workload.activation_bytes is None
        if number == 1 and is_undecided and len(batch) >= 4 and run.divides_batches:
            self._plan_micro_batch(loss, batch)
        self.splitting.check(loss, batch)
        if run.plan.overrides.get("attention", "torch") != "torch":
            self._check_attention_is_used(loss, batch)
        if run.plan.overrides.get("norms") == "whet":
            check_whet_norms(run.plan)
        plan = self._checks.run_checks(loss, batch, step=number - 1, moved_from=self.moved_from)
        if plan is not run.plan:
            run.use_plan(plan)
        if run.plan.activation_checkpointing == "on":
            self._exit_stack.enter_context(checkpoint_activations(run.model))
        if run.plan.lengths == "unpadded":
            plan = self._checks.use_unpadded(loss, next(self.splitting.micro_batches(batch)), step=number - 1)
            if plan is not run.plan:
                run.use_plan(plan)
        if run.plan.compile != "off":
            plan = self._checks.use_compiled(
                loss, next(self.splitting.micro_batches(batch)), step=number - 1, compiled_stack=self._compiled
            )
            if plan is not run.plan:
                run.use_plan(plan)
            loss_in_use = compiled_loss(run.model)
            self._loss_obstacle = None if loss_in_use is None else loss_in_use.obstacle
        self.is_ready = True

    def _check_attention_is_used(self, loss: MicroLoss, batch: GlobalBatch) -> None:
        run = self._run
        if run.plan.attention == "whet":
            check_whet_attention(run.plan)
            return
        few = self._first_samples(batch, min(4, len(batch)))
        if not calls_attention(run.model, loss, few, device=run.device):
            raise UsageError(
                "the model does not call torch's scaled_dot_product_attention",
                got=f"attention={run.plan.attention}",
                try_="attention=torch",
            )

    def _plan_micro_batch(self, loss: MicroLoss, batch: GlobalBatch) -> None:
        """Measure the memory per sample and plan the micro-batch again, unless even a few samples do not fit."""
        run = self._run
        try:
            # The difference between two sizes cancels constant costs. Size 1 is avoided, because BatchNorm rejects it.
            small, large = (self._first_samples(batch, size) for size in (2, 4))
            needed = measure_activation_bytes(run.model, loss, small, large, device=run.device)
        except Exception as error:
            is_oom = is_out_of_memory(error)
            if not is_oom and not run.group.is_single_process:
                raise
            problem = release_traceback(error)
            if not is_oom:
                # The loss may need the whole batch. If it fails for another reason, the step will raise the error.
                run.divides_batches = False
                self.splitting.keep_whole(f"the loss fails with 2 of {len(batch)} samples: {problem}")
                return
            self._check_single_rank(problem)
        else:
            # All ranks use the largest measurement, so that they arrive at the same plan.
            needed = int(run.group.all_reduce_max([float(needed)])[0])
            run.plan_again(activation_bytes=needed)
            return
        self._empty_memory()
        action = "the memory of a sample could not be measured: the planned micro-batch stays"
        run.log.event("oom", step=1, reason=problem, action=action)

    def _first_samples(self, batch: GlobalBatch, size: int) -> MicroBatch:
        return self._run.first_samples(batch, size).map_tensors(self._run.device.put)

    # --- out of memory -----------------------------------------------------------------------------------------------

    def _check_single_rank(self, problem: str) -> None:
        """Raise if there are several ranks: the others are in the same step and cannot change its micro-batch."""
        group = self._run.group
        if not group.is_single_process:
            half = max(1, int(self._run.plan.micro_batch or 1) // 2)
            raise InsufficientMemoryError(
                "a step of this model needs more memory than this process may use",
                got=f"rank {group.ranks.rank}: {problem}",
                try_=f"micro_batch={half} or sharding=full in a new run",
            )

    def _used(self) -> tuple[object, ...]:
        """Return the objects that training needs in memory, in contrast to those that earlier notebook cells hold."""
        return self._run.model, self._run.stepper.optimizer, self._run.config.data

    def _reduce_memory(self, problem: str, loss: MicroLoss, batch: GlobalBatch, *, number: int) -> None:
        """Free memory for another attempt.

        The first attempt only collects garbage. The second one reduces the micro-batch or recomputes activations.
        """
        self._empty_memory()
        run = self._run
        if number != self._oom_step:
            self._oom_step = number
            held = describe_held_memory(self._used(), device=run.device)
            action = "garbage collected, the step is repeated" + (f"; {held}" if held else "")
            run.log.event("oom", step=number, reason=problem, action=action)
            return
        before = run.plan
        whole_reason = before.workload.whole_batch_reason
        if whole_reason is None and self._rollback.writes_buffers:
            # Buffers depend on the micro-batch, so a different split would change their statistics.
            whole_reason = "the model updates buffers in every forward pass"
        whole_reason = whole_reason or self.splitting.obstacle(loss, batch)
        try:
            plan = reduce_memory(
                before,
                run.model,
                num_samples=len(batch),
                step=number,
                problem=problem,
                whole_reason=whole_reason,
            )
        except InsufficientMemoryError as error:
            raise name_held_memory(error, self._used(), device=run.device) from None
        run.use_plan(plan)
        action = f"micro-batch {run.plan.micro_batch} instead of {before.micro_batch}"
        if run.plan.activation_checkpointing != before.activation_checkpointing:
            action = "activations are recomputed in the backward pass"
            if run.plan.compile != "off":
                # Continue eagerly: compiling again with little free memory could fail, and the result would not be
                # verified.
                self._compiled.close()
                run.use_plan(uncompiled_plan(run.plan, reason=f"{action} since step {number:,}", step=number))
                action = f"{action}, and the model is no longer compiled"
            self._exit_stack.enter_context(checkpoint_activations(run.model))
        run.log.event("oom", step=number, reason=problem, action=action, exact=False)
        run.note_inexact(number, action)

    def _empty_memory(self) -> None:
        gc.collect()
        self._run.device.memory.empty_cache()


def _skipped_outcome() -> Outcome:
    return Outcome(loss=torch.tensor(float("nan")), grad_norm=None, marks=(), is_skipped=True)
