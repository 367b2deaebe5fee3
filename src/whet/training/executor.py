"""Run steps and evaluations as planned; recover from out-of-memory errors and skip steps that produce NaN.

The samples of a step and their weights never change; only how many go through the model at once may change, and the log
says so.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from whet.base.errors import InsufficientMemoryError, UsageError
from whet.base.process import freeze_live_objects
from whet.data.batch import GlobalBatch, MicroBatch, Shapes, micro_batch_shapes
from whet.data.order import mix_seed
from whet.device.errors import is_out_of_memory
from whet.device.rng import seed_everything
from whet.distributed.strategies import RetryStepError
from whet.plan.plan import make_plan, with_runtime_changes, with_smaller_eval_batch
from whet.plan.setting import MeasuredSetting
from whet.step.apply_plan import apply_kernels
from whet.step.loss import LossFunction
from whet.step.model_contexts import checkpoint_activations
from whet.step.rollback import StepRollback, reduce_memory, release_traceback
from whet.step.step import NonFiniteError, Outcome, WrongReplayError
from whet.training.callbacks.event_log import sample_ids
from whet.training.checks import check_own_attention, check_own_norms
from whet.training.evaluator import Evaluate, Evaluator
from whet.training.start_checks import StartChecks, uncompiled_plan
from whet.training.workload import calls_attention, measure_activation_bytes
from whet.verify.start.causality import use_explicit_masks

if TYPE_CHECKING:
    from whet.training.setup import RunContext

_MAX_SHAPES = 1000
"""Counted up to here: packed batches have a new shape each time."""


class RollbackRequiredError(Exception):
    """A step failed after it had begun to change the weights: only a checkpoint can restore them."""


class Executor:
    """Runs steps and evaluations of one run by its plan."""

    def __init__(self, run: "RunContext") -> None:
        self._run = run
        self._exit_stack = ExitStack()
        self._compiled = self._exit_stack.enter_context(ExitStack())
        """While it is open, the model is called through the compiler, if it is compiled."""
        plan, stepper = run.plan, run.stepper
        if plan.layout != "contiguous":
            # Back to the user's memory format; optimizer state follows its parameters.
            self._exit_stack.callback(run.layout.use, "contiguous", stepper.optimizer)
        self._evaluator = Evaluator(run)
        self._exit_stack.callback(self._evaluator.close)
        # From now on, not from the first step on: an evaluation may come before it.
        if plan.causal_mask == "explicit":
            self._exit_stack.enter_context(use_explicit_masks())
        self._exit_stack.enter_context(apply_kernels(plan, run.device))
        if plan.freed_memory == "kept":
            self._exit_stack.enter_context(run.device.memory.keep_freed())
        self._exit_stack.callback(lambda: stepper.release_graphs("the session is over"))
        self._checks = StartChecks(run=run, exit_stack=self._exit_stack)
        self._rollback = StepRollback(stepper.model, run.device)
        self.shapes: set[Shapes] = set()
        """Shapes that micro-batches have had so far."""
        self.moved_from: str | None = None
        """The kind of device that the run was moved from, if it was another one."""
        self._is_ready = False
        self._oom_step: int | None = None

    def close(self) -> None:
        """Leave the model as the user gave it."""
        self._exit_stack.close()

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, loss: LossFunction, batch: GlobalBatch, *, number: int) -> Outcome:
        """Run optimizer step `number`, unless the NaN guard skips it.

        Raises RollbackRequiredError if the weights are spoilt.
        """
        run, guard = self._run, self._run.guard
        if number in guard.skipped:
            return _skipped_outcome()
        # After a NaN every step up to the bad one is checked before its update.
        is_checked = number <= guard.check_until_step
        try:
            outcome = self._run_step(loss, batch, number=number, is_checked=is_checked)
        except NonFiniteError as error:
            self._skip(batch, number=number, reason=str(error))
            return _skipped_outcome()
        if is_checked:
            if not run.stepper.has_finite_weights():
                # Loss and gradient were finite and the update was not: only the checkpoint is from before it.
                reason = "the update makes weights NaN or Inf"
                self._skip(batch, number=number, reason=reason)
                raise RollbackRequiredError(f"step {number:,}: {reason}")
            if number == guard.check_until_step and not guard.found_bad_step:
                reason = "repeated from the checkpoint, every step was finite"
                run.log.event("skip", step=number, reason=reason, verdict="transient")
        return outcome

    def is_finite(self, *, check_weights: bool) -> bool:
        """Whether all losses read so far are finite; `check_weights` reads all losses and the weights first."""
        run, guard = self._run, self._run.guard
        if check_weights:
            run.log.read()
            if guard.first_non_finite is None and not run.stepper.has_finite_weights():
                guard.first_non_finite = run.state.step, "weights are NaN or Inf"
        return guard.first_non_finite is None

    def expect_changes(self) -> None:
        """Something other than a step changed the model: learn again what steps change."""
        self._rollback = StepRollback(self._run.stepper.model, self._run.device)

    def _run_step(self, loss: LossFunction, batch: GlobalBatch, *, number: int, is_checked: bool) -> Outcome:
        """Run a step; if memory runs out, again with fewer samples at once."""
        is_first = not self._is_ready
        if is_first:
            self._prepare(loss, batch, number=number)
        run, stepper, rollback = self._run, self._run.stepper, self._rollback
        if not run.group.is_single_process:
            # A pure function of the step, so that no rank has generators to save, and no two ranks draw the same.
            seed_everything(mix_seed(run.config.training.seed, number, run.group.ranks.rank) % 2**63)
        while True:
            try:
                rollback.save()
                outcome = stepper(loss, self._split(batch), num_samples=len(batch), step=number, is_checked=is_checked)
                break
            except NonFiniteError as error:
                if not self._undo():
                    raise RollbackRequiredError(f"step {number:,}: {error}") from None
                raise
            except RetryStepError as error:
                # Raised on every rank, before its update. All of them undo the step, or none continues.
                if any(run.group.all_reduce_max([float(not self._undo())])):
                    raise RollbackRequiredError(f"step {number:,}: {error}") from None
                continue
            except WrongReplayError as error:
                self._log_graph_refusal(number)
                raise RollbackRequiredError(f"step {number:,}: {error}") from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = release_traceback(error)
                self._check_single_rank(problem)
            is_undone = not stepper.is_updating and rollback.restore()
            stepper.abort()
            if run.plan.graph == "on" and stepper.graph_obstacle is None:
                stepper.release_graphs("memory ran out, and graphs hold some")
            self._log_graph_refusal(number)
            self._reduce_memory(problem, number=number, num_samples=len(batch))
            if not is_undone:
                raise RollbackRequiredError(f"step {number:,} ran out of memory while it changed the weights")
        self._log_graph_refusal(number)
        self._learn_changes()
        if is_first and run.plan.compile != "off":
            # A garbage collection over all objects of the compiler takes 0.15 s, and one is due after every epoch.
            freeze_live_objects()
        return outcome

    def _undo(self) -> bool:
        """Undo a step that failed before its update. False if something changed that cannot be undone."""
        is_undone = self._rollback.restore()
        self._run.stepper.abort()
        return is_undone

    def _learn_changes(self) -> None:
        """Learn what a step changes. The step is done; without memory to compare, everything is kept next time too."""
        try:
            self._rollback.learn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def _skip(self, batch: GlobalBatch, *, number: int, reason: str) -> None:
        samples = sample_ids(batch.ids)
        self._run.log.event("skip", step=number, reason=reason, verdict="reproducible", samples=samples)
        self._run.guard.skip(number, reason)

    def _split(self, batch: GlobalBatch) -> Iterator[MicroBatch]:
        plan = self._run.plan
        for micro in self._run.source.micro_batches(batch, micro_batch=plan.micro_batch, length_mode=plan.lengths):
            if len(self.shapes) < _MAX_SHAPES:
                self.shapes.add(micro_batch_shapes(micro))
            yield micro

    def _log_graph_refusal(self, number: int) -> None:
        """If steps that were to be captured are not: one line in the log, and the reason in the plan."""
        run, reason = self._run, self._run.stepper.graph_obstacle
        if reason is None or run.plan.graph == "off":
            return
        off = MeasuredSetting(value="off", reason=reason, evidence={"step": number})
        run.use_plan(with_runtime_changes(run.plan, {"graph": off}))
        run.log.event("plan", step=number, message=f"steps are not captured as graphs: {reason}")

    # --- evaluation --------------------------------------------------------------------------------------------------

    def evaluate(self, evaluate: Evaluate, data: Any) -> dict[str, Any]:
        """Evaluate the model as it is now; if memory runs out, again with fewer samples at once."""
        run, step = self._run, self._run.state.step
        while True:
            try:
                return self._evaluator.run(evaluate, data)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = release_traceback(error)
                self._check_single_rank(problem)
            finally:
                # Averaged weights may have been swapped in and out, buffers too.
                self.expect_changes()
            self._empty_memory()
            run.use_plan(with_smaller_eval_batch(run.plan, step=step, problem=problem))
            action = f"evaluates {run.plan.eval_batch} at once"
            run.log.event("oom", step=step, reason=problem, action=action)

    def batches(self, data: Any) -> Iterator[MicroBatch]:
        """Data in its own order, on the device, in micro-batches of the planned evaluation size."""
        return self._evaluator.batches(data)

    # --- before the first step ---------------------------------------------------------------------------------------

    def _prepare(self, loss: LossFunction, batch: GlobalBatch, *, number: int) -> None:
        """Measure the memory of a sample, verify the model, and compile it."""
        run = self._run
        is_undecided = "micro_batch" not in run.plan.overrides and run.plan.workload.activation_bytes is None
        if number == 1 and is_undecided and len(batch) >= 4:
            self._plan_micro_batch(loss, batch)
        if run.plan.overrides.get("attention", "torch") != "torch":
            self._check_attention_is_used(loss, batch)
        if run.plan.overrides.get("norms") == "own":
            check_own_norms(run.plan)
        plan = self._checks.run_checks(loss, batch, step=number - 1, moved_from=self.moved_from)
        if plan is not run.plan:
            run.use_plan(plan)
        if run.plan.activation_checkpointing == "on":
            self._exit_stack.enter_context(checkpoint_activations(run.model))
        if run.plan.compile != "off":
            plan = self._checks.use_compiled(loss, next(self._split(batch)), step=number - 1, until=self._compiled)
            if plan is not run.plan:
                run.use_plan(plan)
        self._is_ready = True

    def _check_attention_is_used(self, loss: LossFunction, batch: GlobalBatch) -> None:
        run = self._run
        if run.plan.attention == "own":
            check_own_attention(run.plan)
            return
        few = self._first_samples(batch, min(4, len(batch)))
        if not calls_attention(run.model, loss, few, device=run.device):
            raise UsageError(
                "the model does not call torch's scaled_dot_product_attention",
                got=f"attention={run.plan.attention}",
                try_="attention=torch",
            )

    def _plan_micro_batch(self, loss: LossFunction, batch: GlobalBatch) -> None:
        """Measure the memory of a sample, and plan again with it. If a few samples do not fit, the plan stays."""
        run, plan = self._run, self._run.plan
        try:
            # Two sizes, and not one sample: BatchNorm refuses that.
            small, large = (self._first_samples(batch, size) for size in (2, 4))
            needed = measure_activation_bytes(run.model, loss, small, large, device=run.device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = release_traceback(error)
            self._check_single_rank(problem)
        else:
            needed = int(run.group.all_reduce_max([float(needed)])[0])
            run.use_plan(
                make_plan(
                    plan.machine,
                    plan.workload.model_copy(update={"activation_bytes": needed}),
                    overrides=plan.overrides,
                    measured=plan.measured,
                    conditions=plan.conditions,
                    trials=plan.trials,
                )
            )
            return
        self._empty_memory()
        action = "the memory of a sample could not be measured: the planned micro-batch stays"
        run.log.event("oom", step=1, reason=problem, action=action)

    def _first_samples(self, batch: GlobalBatch, size: int) -> MicroBatch:
        run = self._run
        micro_batches = run.source.micro_batches(batch, micro_batch=size, length_mode=run.plan.lengths)
        return next(iter(micro_batches)).map_tensors(run.device.put)

    # --- out of memory -----------------------------------------------------------------------------------------------

    def _check_single_rank(self, problem: str) -> None:
        """Of several ranks all stop: the others are inside the same step and cannot split it differently."""
        group = self._run.group
        if not group.is_single_process:
            half = max(1, int(self._run.plan.micro_batch or 1) // 2)
            raise InsufficientMemoryError(
                "a step of this model needs more memory than this process may use",
                got=f"rank {group.ranks.rank}: {problem}",
                try_=f"micro_batch={half} or sharding=full in a new run",
            )

    def _reduce_memory(self, problem: str, *, number: int, num_samples: int) -> None:
        """Collect garbage, which may hold memory; if that was tried for this step, use less memory from now on."""
        self._empty_memory()
        run = self._run
        if number != self._oom_step:
            self._oom_step = number
            run.log.event("oom", step=number, reason=problem, action="garbage collected, the step is repeated")
            return
        before = run.plan
        keeps_statistics = before.workload.has_batchnorm or self._rollback.writes_buffers
        run.use_plan(
            reduce_memory(
                before,
                run.model,
                num_samples=num_samples,
                step=number,
                problem=problem,
                may_split=not keeps_statistics,
            )
        )
        action = f"micro-batch {run.plan.micro_batch} instead of {before.micro_batch}"
        if run.plan.activation_checkpointing != before.activation_checkpointing:
            action = "activations are recomputed in the backward pass"
            if run.plan.compile != "off":
                # Compiling again, with full memory and nothing compared, could fail or be wrong.
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
