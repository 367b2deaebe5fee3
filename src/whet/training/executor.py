"""Run steps and evaluations as planned; recover from out-of-memory errors."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from whet.base.errors import InsufficientMemoryError, UsageError
from whet.base.process import freeze_live_objects
from whet.data.batch import GlobalBatch, MicroBatch, Shapes, micro_batch_shapes
from whet.data.order import mix_seed
from whet.data.split import LengthMode
from whet.device.errors import is_out_of_memory
from whet.device.rng import seed_everything
from whet.distributed.strategies import RetryStepError
from whet.plan.plan import Plan, make_plan, with_runtime_changes, with_smaller_eval_batch
from whet.plan.setting import MeasuredSetting
from whet.step.apply_plan import apply_kernels
from whet.step.loss import LossFunction
from whet.step.model_contexts import checkpoint_activations
from whet.step.non_finite_guard import NonFiniteGuard
from whet.step.rollback import StepRollback, reduce_memory, release_traceback
from whet.step.step import NonFiniteError, Outcome, Stepper, WrongReplayError
from whet.training.building import TrainingParts
from whet.training.callbacks.event_log import Recorder, sample_ids
from whet.training.checks import check_own_attention, check_own_norms
from whet.training.evaluator import Evaluate, Evaluator
from whet.training.start_checks import StartChecks, uncompiled_plan
from whet.training.workload import calls_attention, measure_activation_bytes
from whet.verify.start.causality import use_explicit_masks
from whet.verify.trainable import OutputFunction

_MAX_SHAPES = 1000
"""Counted up to here: packed batches have a new one each time."""


class CannotUndoError(Exception):
    """A step failed after it had begun to change the weights: only a checkpoint can bring them back."""


class Executor:
    """Makes steps and evaluations as the plan says.

    `write_plan` is told of a plan that changed; `note_inexact` since which step the run is not bit-exact, and why.
    """

    def __init__(
        self,
        parts: TrainingParts,
        recorder: Recorder,
        *,
        write_plan: Callable[[Plan], None],
        note_inexact: Callable[[int, str], None],
        outputs: OutputFunction | None = None,
    ) -> None:
        self.plan = parts.plan
        self._parts = parts
        self._recorder = recorder
        self._write_plan = write_plan
        self._note_inexact = note_inexact
        self._closing = ExitStack()
        self._compiled = self._closing.enter_context(ExitStack())
        """While it is open, the model is called through the compiler, if at all."""
        if self.plan.layout != "contiguous":
            # As the weights were found; what the optimizer keeps for them goes along.
            self._closing.callback(parts.layout.use, "contiguous", parts.stepper.optimizer)
        self._evaluator = Evaluator(parts)
        self._closing.callback(self._evaluator.close)
        if "causal_mask" in self.plan.settings and self.plan.causal_mask == "explicit":
            # From now on: an evaluation may come before the first step.
            self._closing.enter_context(use_explicit_masks())
        self._closing.enter_context(apply_kernels(self.plan, parts.device))
        if self.plan.freed_memory == "kept":
            self._closing.enter_context(parts.device.memory.keep_freed())
        self._checks = StartChecks(
            parts=parts, recorder=recorder, outputs=outputs, closing=self._closing, note_inexact=note_inexact
        )
        self._closing.callback(lambda: parts.stepper.release_graphs("the session is over"))
        self._guard = StepRollback(parts.stepper.model, parts.device)
        self.shapes: set[Shapes] = set()
        """Those that micro-batches have had so far."""
        self.moved_from: str | None = None
        """The kind of device that the run came from, if it was another one."""
        self._is_ready = False
        self._ran_out_at: int | None = None

    def step(self, loss: LossFunction, batch: GlobalBatch, *, number: int, is_checked: bool = False) -> Outcome:
        """Makes optimizer step `number`; if memory runs out, once more with fewer samples at once.

        A careful step raises NonFiniteError instead of an update with such numbers, and leaves everything as it was.
        """
        is_first = not self._is_ready
        if is_first:
            self._prepare(loss, batch, number=number)
        stepper, group = self._parts.stepper, self._parts.group
        if not group.is_alone:
            # A pure function, so that no process has generators to save, and none draws what another draws.
            seed_everything(mix_seed(self._parts.seed, number, group.world.rank) % 2**63)
        while True:
            try:
                self._guard.save()
                outcome = stepper(loss, self._cut(batch), num_samples=len(batch), step=number, is_checked=is_checked)
                break
            except NonFiniteError as error:
                is_undone = self._guard.restore()
                stepper.abort()
                if not is_undone:
                    raise CannotUndoError(f"step {number:,}: {error}") from None
                raise
            except RetryStepError as error:
                self._undo_in_all(error, number=number)
                continue
            except WrongReplayError as error:
                self._tell_refusal(number)
                raise CannotUndoError(f"step {number:,}: {error}") from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = release_traceback(error)
                self._refuse_oom_of_one(problem)
            is_undone = not stepper.is_updating and self._guard.restore()
            stepper.abort()
            if self.plan.graph == "on" and stepper.graph_obstacle is None:
                stepper.release_graphs("memory ran out, and graphs hold some")
            self._tell_refusal(number)
            self._free_memory(problem, number=number, num_samples=len(batch))
            if not is_undone:
                raise CannotUndoError(f"step {number:,} ran out of memory while it changed the weights")
        self._tell_refusal(number)
        self._learn()
        if is_first and self.plan.compile != "off":
            # A pass over all that the compiler keeps takes 0.15 s, and one is due at the end of every epoch.
            freeze_live_objects()
        return outcome

    def _undo_in_all(self, error: RetryStepError, *, number: int) -> None:
        """Every process has this error, before its update; what one cannot undo, none does."""
        is_undone = self._guard.restore()
        self._parts.stepper.abort()
        if any(self._parts.group.most([float(not is_undone)])):
            raise CannotUndoError(f"step {number:,}: {error}")

    def _tell_refusal(self, number: int) -> None:
        """Steps that were to be captured and are not: one line, and the plan says why."""
        reason = self._parts.stepper.graph_obstacle
        if reason is None or self.plan.graph == "off":
            return
        self._use(
            with_runtime_changes(
                self.plan, {"graph": MeasuredSetting(value="off", reason=reason, evidence={"step": number})}
            )
        )
        self._recorder.event("plan", step=number, message=f"steps are not captured as graphs: {reason}")

    def _learn(self) -> None:
        """The step is done, whatever happens here: without memory to compare with, all is kept next time too."""
        try:
            self._guard.learn()
        except Exception as error:
            if not is_out_of_memory(error):
                raise

    def evaluate(self, evaluate: Evaluate, data: Any, *, step: int) -> dict[str, Any]:
        """The metrics, and what else was found, of the model as it is after `step`."""
        while True:
            try:
                return self._evaluator.run(evaluate, data, plan=self.plan)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = release_traceback(error)
                self._refuse_oom_of_one(problem)
            finally:
                # The averaged weights may have been put in and out again, buffers too.
                self.expect_changes()
            self._empty_memory()
            self._use(with_smaller_eval_batch(self.plan, step=step, problem=problem))
            cure = f"evaluates {self.plan.eval_batch} at once"
            self._recorder.event("oom", step=step, reason=problem, action=cure)

    def batches(self, data: Any) -> Iterator[MicroBatch]:
        """Data in its own order, on the device, as much at once as the plan evaluates."""
        return self._evaluator.batches(data, plan=self.plan)

    def expect_changes(self) -> None:
        """Something else than a step changed the model: what steps change is learnt anew."""
        self._guard = StepRollback(self._parts.stepper.model, self._parts.device)

    def close(self) -> None:
        """Leaves the model as it was found."""
        self._closing.close()

    # --- before the first step ---------------------------------------------------------------------------------------

    def _prepare(self, loss: LossFunction, batch: GlobalBatch, *, number: int) -> None:
        """How much a sample needs is measured before anything is done to the model."""
        is_open = "micro_batch" not in self.plan.overrides and self.plan.workload.activation_bytes is None
        if number == 1 and is_open and len(batch) >= 4:
            self._try_to_plan_micro_batch(loss, batch)
        if self.plan.overrides.get("attention", "torch") != "torch":
            self._refuse_no_attention(loss, batch)
        if self.plan.overrides.get("norms") == "own":
            check_own_norms(self.plan)
        plan = self._checks.run(
            loss, batch, self.plan, length_mode=self._length_mode, step=number - 1, moved_from=self.moved_from
        )
        if plan is not self.plan:
            self._use(plan)
        model = self._parts.stepper.model
        if self.plan.activation_checkpointing == "on":
            self._closing.enter_context(checkpoint_activations(model))
        if self.plan.compile != "off":
            plan = self._checks.use_compiled(
                loss, next(self._cut(batch)), self.plan, step=number - 1, until=self._compiled
            )
            if plan is not self.plan:
                self._use(plan)
        self._is_ready = True

    def _refuse_no_attention(self, loss: LossFunction, batch: GlobalBatch) -> None:
        parts = self._parts
        if self.plan.attention == "own":
            check_own_attention(self.plan)
            return
        few = next(
            iter(parts.source.micro_batches(batch, micro_batch=min(4, len(batch)), length_mode=self._length_mode))
        )
        if not calls_attention(parts.stepper.model, loss, few.map_tensors(parts.device.put), device=parts.device):
            raise UsageError(
                "the model does not call torch's scaled_dot_product_attention",
                got=f"attention={self.plan.attention}",
                try_="attention=torch",
            )

    def _try_to_plan_micro_batch(self, loss: LossFunction, batch: GlobalBatch) -> None:
        """Where not even a few samples fit, the careful start of the plan stays."""
        try:
            self._plan_micro_batch(loss, batch)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            problem = release_traceback(error)
            self._refuse_oom_of_one(problem)
        self._empty_memory()
        cure = "what a sample needs could not be measured: the plan's careful start stays"
        self._recorder.event("oom", step=1, reason=problem, action=cure)

    def _plan_micro_batch(self, loss: LossFunction, batch: GlobalBatch) -> None:
        parts, plan = self._parts, self.plan
        # Two points, and not of one sample: BatchNorm refuses it.
        small, large = (
            next(iter(parts.source.micro_batches(batch, micro_batch=size, length_mode=self._length_mode))).map_tensors(
                parts.device.put
            )
            for size in (2, 4)
        )
        needed = measure_activation_bytes(parts.stepper.model, loss, small, large, device=parts.device)
        needed = int(parts.group.most([float(needed)])[0])
        workload = plan.workload.model_copy(update={"activation_bytes": needed})
        self._use(
            make_plan(
                plan.machine,
                workload,
                overrides=plan.overrides,
                measured=plan.measured,
                conditions=plan.conditions,
                trials=plan.trials,
            )
        )

    # --- the parts ---------------------------------------------------------------------------------------------------

    @property
    def _length_mode(self) -> LengthMode:
        return self.plan.lengths

    def _cut(self, batch: GlobalBatch) -> Iterator[MicroBatch]:
        micro_batch = self.plan.micro_batch
        assert isinstance(micro_batch, int)
        for micro in self._parts.source.micro_batches(batch, micro_batch=micro_batch, length_mode=self._length_mode):
            if len(self.shapes) < _MAX_SHAPES:
                self.shapes.add(micro_batch_shapes(micro))
            yield micro

    def _refuse_oom_of_one(self, problem: str) -> None:
        """The others are in the middle of the same step and cannot cut it differently: all stop."""
        if not self._parts.group.is_alone:
            half = max(1, int(self.plan.micro_batch or 1) // 2)
            raise InsufficientMemoryError(
                "a step of this model needs more memory than this process may use",
                got=f"rank {self._parts.group.world.rank}: {problem}",
                try_=f"micro_batch={half} or sharding=full in a new run",
            )

    def _free_memory(self, problem: str, *, number: int, num_samples: int) -> None:
        """By collecting garbage, which may have held it; if that was tried for this step, by needing less."""
        self._empty_memory()
        if number != self._ran_out_at:
            self._ran_out_at = number
            self._recorder.event("oom", step=number, reason=problem, action="garbage collected, the same step again")
            return
        before, model = self.plan, self._parts.stepper.model
        has_memory = before.workload.has_batchnorm or self._guard.writes_buffers
        less = reduce_memory(
            before, model, num_samples=num_samples, step=number, problem=problem, may_split=not has_memory
        )
        self._use(less)
        cure = f"micro batch {self.plan.micro_batch} instead of {before.micro_batch}"
        if self.plan.activation_checkpointing != before.activation_checkpointing:
            cure = "activations are computed again in the backward pass"
            if self.plan.compile != "off":
                # To compile once more, with a full memory and nothing compared, could fail or be wrong.
                self._compiled.close()
                self._use(uncompiled_plan(self.plan, reason=f"{cure} since step {number:,}", step=number))
                cure = f"{cure}, and the model is no longer compiled"
            self._closing.enter_context(checkpoint_activations(model))
        self._recorder.event("oom", step=number, reason=problem, action=cure, exact=False)
        self._note_inexact(number, cure)

    def _empty_memory(self) -> None:
        gc.collect()
        self._parts.device.memory.empty_cache()

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        self._write_plan(plan)


class RollbackRequiredError(Exception):
    """The weights are not what they should be: only the last checkpoint can bring them back."""


class GuardedSteps:
    """Makes the steps of a run, as far as their numbers are numbers."""

    def __init__(self, execution: Executor, stepper: Stepper, soundness: NonFiniteGuard, recorder: Recorder) -> None:
        self._execution = execution
        self._stepper = stepper
        self._soundness = soundness
        self._recorder = recorder

    def make(self, loss: LossFunction, batch: GlobalBatch, *, number: int) -> Outcome | None:
        """Optimizer step `number`; None for one that is left out."""
        soundness = self._soundness
        if number in soundness.skipped:
            return None
        is_checked = number <= soundness.careful_until
        try:
            outcome = self._execution.step(loss, batch, number=number, is_checked=is_checked)
        except CannotUndoError as error:
            raise RollbackRequiredError(str(error)) from None
        except NonFiniteError as error:
            self._leave_out(batch, number=number, how=str(error))
            return None
        if is_checked and not self._stepper.has_finite_weights():
            # Loss and gradient were fine, and the update was not: only the checkpoint is from before it.
            how = "the update makes weights NaN or Inf"
            self._leave_out(batch, number=number, how=how)
            raise RollbackRequiredError(f"step {number:,}: {how}")
        if number == soundness.careful_until and not soundness.has_found:
            reason = "made again from the checkpoint, every step was fine"
            self._recorder.event("skip", step=number, reason=reason, verdict="transient")
        return outcome

    def are_sound(self, step: int, *, looks_closely: bool) -> bool:
        """Whether all losses read so far are numbers; looking closely reads them all, and the weights after `step`."""
        if looks_closely:
            self._recorder.read()
            if self._soundness.broken is None and not self._stepper.has_finite_weights():
                self._soundness.broken = step, "weights are NaN or Inf"
        return self._soundness.broken is None

    def _leave_out(self, batch: GlobalBatch, *, number: int, how: str) -> None:
        samples = sample_ids(batch.ids)
        self._recorder.event("skip", step=number, reason=how, verdict="reproducible", samples=samples)
        self._soundness.skip(number, how)
