"""How a plan is carried out, step by step, and what changes in it when memory runs out.

The samples of a step and their weights stay what they are; only how many go through at once may change, and it is said.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from whet.base.errors import NoMemoryError, UsageError
from whet.base.garbage import set_aside
from whet.checkpoint.randomness import seed_randomness
from whet.data.batch import GlobalBatch, Micro, Shapes, shapes_of
from whet.data.cut import Lengths
from whet.data.order import mix
from whet.engine.building import Parts
from whet.engine.evaluating import Evaluate, Evaluator
from whet.engine.guard import Guard
from whet.engine.own_kernels import refuse_idle_attention, refuse_idle_norms
from whet.engine.recorder import Recorder
from whet.engine.recovery import let_go, need_less
from whet.engine.start_checks import StartChecks, uncompiled_plan
from whet.engine.workload import calls_attention, measure_activation_bytes
from whet.plan.lowering import with_smaller_eval_batch
from whet.plan.plan import Plan, make_plan, with_learnt
from whet.plan.setting import Measured
from whet.step.loss import LossFunction
from whet.step.recompute import recompute_blocks
from whet.step.step import NonFiniteError, Outcome, WrongReplayError
from whet.verify.start.masks import explicit_masks
from whet.verify.subject import Outputs
from whet.world.joining import StepAgainError

_MOST_SHAPES = 1000
"""Counted up to here: packed batches have a new one each time."""


class CannotUndoError(Exception):
    """A step failed after it had begun to change the weights: only a checkpoint can bring them back."""


class Execution:
    """Makes steps and evaluations as the plan says.

    `write_plan` is told of a plan that changed; `note_inexact` since which step the run is not bit-exact, and why.
    """

    def __init__(
        self,
        parts: Parts,
        recorder: Recorder,
        *,
        write_plan: Callable[[Plan], None],
        note_inexact: Callable[[int, str], None],
        outputs: Outputs | None = None,
    ) -> None:
        self.plan = parts.plan
        self._parts = parts
        self._recorder = recorder
        self._write_plan = write_plan
        self._note_inexact = note_inexact
        self._closing = ExitStack()
        self._compiled = self._closing.enter_context(ExitStack())
        """While it is open, the model is called through the compiler, if at all."""
        if self.plan.value("layout") != "contiguous":
            # As the weights were found; what the optimizer keeps for them goes along.
            self._closing.callback(parts.layout.use, "contiguous", parts.stepper.optimizer)
        self._evaluator = Evaluator(parts)
        self._closing.callback(self._evaluator.close)
        if "causal_mask" in self.plan.settings and self.plan.value("causal_mask") == "explicit":
            # From now on: an evaluation may come before the first step.
            self._closing.enter_context(explicit_masks())
        if "attention" in self.plan.settings:
            self._closing.enter_context(parts.device.attention(str(self.plan.value("attention"))))
        if "freed_memory" in self.plan.settings:
            self._closing.enter_context(parts.device.freed_memory(str(self.plan.value("freed_memory"))))
        if "norms" in self.plan.settings:
            self._closing.enter_context(parts.device.norms(str(self.plan.value("norms"))))
        self._checks = StartChecks(
            parts=parts, recorder=recorder, outputs=outputs, closing=self._closing, note_inexact=note_inexact
        )
        self._closing.callback(lambda: parts.stepper.release("the session is over"))
        self._guard = Guard(parts.stepper.model, parts.device)
        self.shapes: set[Shapes] = set()
        """Those that micro-batches have had so far."""
        self.moved_from: str | None = None
        """The kind of device that the run came from, if it was another one."""
        self._is_ready = False
        self._ran_out_at: int | None = None

    def step(self, loss: LossFunction, batch: GlobalBatch, *, number: int, is_careful: bool = False) -> Outcome:
        """Makes optimizer step `number`; if memory runs out, once more with fewer samples at once.

        A careful step raises NonFiniteError instead of an update with such numbers, and leaves everything as it was.
        """
        is_first = not self._is_ready
        if is_first:
            self._prepare(loss, batch, number=number)
        stepper, group = self._parts.stepper, self._parts.group
        if not group.is_alone:
            # A pure function, so that no process has generators to save, and none draws what another draws.
            seed_randomness(mix(self._parts.seed, number, group.world.rank) % 2**63)
        while True:
            try:
                self._guard.keep()
                outcome = stepper(loss, self._cut(batch), num_samples=len(batch), step=number, is_careful=is_careful)
                break
            except NonFiniteError as error:
                is_undone = self._guard.put_back()
                stepper.forget()
                if not is_undone:
                    raise CannotUndoError(f"step {number:,}: {error}") from None
                raise
            except StepAgainError as error:
                self._undo_in_all(error, number=number)
                continue
            except WrongReplayError as error:
                self._tell_refusal(number)
                raise CannotUndoError(f"step {number:,}: {error}") from None
            except Exception as error:
                if not self._parts.device.is_oom(error):
                    raise
                problem = let_go(error)
                self._refuse_oom_of_one(problem)
            is_undone = not stepper.is_updating and self._guard.put_back()
            stepper.forget()
            if self.plan.value("graph") == "on" and stepper.refusal is None:
                stepper.release("memory ran out, and graphs hold some")
            self._tell_refusal(number)
            self._free_memory(problem, number=number, num_samples=len(batch))
            if not is_undone:
                raise CannotUndoError(f"step {number:,} ran out of memory while it changed the weights")
        self._tell_refusal(number)
        self._learn()
        if is_first and self.plan.value("compile") != "off":
            # A pass over all that the compiler keeps takes 0.15 s, and one is due at the end of every epoch.
            set_aside()
        return outcome

    def _undo_in_all(self, error: StepAgainError, *, number: int) -> None:
        """Every process has this error, before its update; what one cannot undo, none does."""
        is_undone = self._guard.put_back()
        self._parts.stepper.forget()
        if any(self._parts.group.most([float(not is_undone)])):
            raise CannotUndoError(f"step {number:,}: {error}")

    def _tell_refusal(self, number: int) -> None:
        """Steps that were to be captured and are not: one line, and the plan says why."""
        reason = self._parts.stepper.refusal
        if reason is None or self.plan.value("graph") == "off":
            return
        self._use(with_learnt(self.plan, {"graph": Measured(value="off", reason=reason, evidence={"step": number})}))
        self._recorder.event("plan", step=number, changed=f"steps are not captured as graphs: {reason}")

    def _learn(self) -> None:
        """The step is done, whatever happens here: without memory to compare with, all is kept next time too."""
        try:
            self._guard.learn()
        except Exception as error:
            if not self._parts.device.is_oom(error):
                raise

    def evaluate(self, evaluate: Evaluate, data: Any, *, step: int) -> dict[str, Any]:
        """The metrics, and what else was found, of the model as it is after `step`."""
        while True:
            try:
                return self._evaluator.run(evaluate, data, plan=self.plan)
            except Exception as error:
                if not self._parts.device.is_oom(error):
                    raise
                problem = let_go(error)
                self._refuse_oom_of_one(problem)
            finally:
                # The averaged weights may have been put in and out again, buffers too.
                self.expect_changes()
            self._empty_memory()
            self._use(with_smaller_eval_batch(self.plan, step=step, problem=problem))
            cure = f"evaluates {self.plan.value('eval_batch')} at once"
            self._recorder.event("oom", step=step, reason=problem, cure=cure)

    def batches(self, data: Any) -> Iterator[Micro]:
        """Data in its own order, on the device, as much at once as the plan evaluates."""
        return self._evaluator.batches(data, plan=self.plan)

    def expect_changes(self) -> None:
        """Something else than a step changed the model: what steps change is learnt anew."""
        self._guard = Guard(self._parts.stepper.model, self._parts.device)

    def close(self) -> None:
        """Leaves the model as it was found."""
        self._closing.close()

    # --- before the first step ---------------------------------------------------------------------------------------

    def _prepare(self, loss: LossFunction, batch: GlobalBatch, *, number: int) -> None:
        """How much a sample needs is measured before anything is done to the model."""
        is_open = "micro_batch" not in self.plan.wishes and self.plan.workload.activation_bytes is None
        if number == 1 and is_open and len(batch) >= 4:
            self._try_to_plan_micro_batch(loss, batch)
        if self.plan.wishes.get("attention", "torch") != "torch":
            self._refuse_no_attention(loss, batch)
        if self.plan.wishes.get("norms") == "own":
            refuse_idle_norms(self.plan)
        plan = self._checks.run(loss, batch, self.plan, how=self._how, step=number - 1, moved_from=self.moved_from)
        if plan is not self.plan:
            self._use(plan)
        model = self._parts.stepper.model
        if self.plan.value("activation_checkpointing") == "on":
            self._closing.enter_context(recompute_blocks(model))
        if self.plan.value("compile") != "off":
            plan = self._checks.use_compiled(
                loss, next(self._cut(batch)), self.plan, step=number - 1, until=self._compiled
            )
            if plan is not self.plan:
                self._use(plan)
        self._is_ready = True

    def _refuse_no_attention(self, loss: LossFunction, batch: GlobalBatch) -> None:
        parts = self._parts
        if self.plan.value("attention") == "own":
            refuse_idle_attention(self.plan)
            return
        few = next(iter(parts.source.micros(batch, micro_batch=min(4, len(batch)), how=self._how)))
        if not calls_attention(parts.stepper.model, loss, few.moved(parts.device.put), device=parts.device):
            raise UsageError(
                "the model does not call torch's scaled_dot_product_attention",
                got=f"attention={self.plan.value('attention')}",
                try_="attention=torch",
            )

    def _try_to_plan_micro_batch(self, loss: LossFunction, batch: GlobalBatch) -> None:
        """Where not even a few samples fit, the careful start of the plan stays."""
        try:
            self._plan_micro_batch(loss, batch)
            return
        except Exception as error:
            if not self._parts.device.is_oom(error):
                raise
            problem = let_go(error)
            self._refuse_oom_of_one(problem)
        self._empty_memory()
        cure = "what a sample needs could not be measured: the plan's careful start stays"
        self._recorder.event("oom", step=1, reason=problem, cure=cure)

    def _plan_micro_batch(self, loss: LossFunction, batch: GlobalBatch) -> None:
        parts, plan = self._parts, self.plan
        # Two points, and not of one sample: BatchNorm refuses it.
        small, large = (
            next(iter(parts.source.micros(batch, micro_batch=size, how=self._how))).moved(parts.device.put)
            for size in (2, 4)
        )
        needed = measure_activation_bytes(parts.stepper.model, loss, small, large, device=parts.device)
        needed = int(parts.group.most([float(needed)])[0])
        workload = plan.workload.model_copy(update={"activation_bytes": needed})
        self._use(
            make_plan(
                plan.machine,
                workload,
                wishes=plan.wishes,
                measured=plan.measured,
                conditions=plan.conditions,
                trials=plan.trials,
            )
        )

    # --- the parts ---------------------------------------------------------------------------------------------------

    @property
    def _how(self) -> Lengths:
        return str(self.plan.value("lengths"))  # type: ignore[return-value]

    def _cut(self, batch: GlobalBatch) -> Iterator[Micro]:
        micro_batch = self.plan.value("micro_batch")
        assert isinstance(micro_batch, int)
        for micro in self._parts.source.micros(batch, micro_batch=micro_batch, how=self._how):
            if len(self.shapes) < _MOST_SHAPES:
                self.shapes.add(shapes_of(micro))
            yield micro

    def _refuse_oom_of_one(self, problem: str) -> None:
        """The others are in the middle of the same step and cannot cut it differently: all stop."""
        if not self._parts.group.is_alone:
            half = max(1, int(self.plan.value("micro_batch") or 1) // 2)
            raise NoMemoryError(
                "a step of this model needs more memory than this process may use",
                got=f"rank {self._parts.group.world.rank}: {problem}",
                try_=f"micro_batch={half} or sharding=full in a new run",
            )

    def _free_memory(self, problem: str, *, number: int, num_samples: int) -> None:
        """By collecting garbage, which may have held it; if that was tried for this step, by needing less."""
        self._empty_memory()
        if number != self._ran_out_at:
            self._ran_out_at = number
            self._recorder.event("oom", step=number, reason=problem, cure="garbage collected, the same step again")
            return
        before, model = self.plan, self._parts.stepper.model
        has_memory = before.workload.has_batchnorm or self._guard.writes_buffers
        less = need_less(before, model, num_samples=num_samples, step=number, problem=problem, may_cut=not has_memory)
        self._use(less)
        cure = f"micro batch {self.plan.value('micro_batch')} instead of {before.value('micro_batch')}"
        if self.plan.value("activation_checkpointing") != before.value("activation_checkpointing"):
            cure = "activations are computed again in the backward pass"
            if self.plan.value("compile") != "off":
                # To compile once more, with a full memory and nothing compared, could fail or be wrong.
                self._compiled.close()
                self._use(uncompiled_plan(self.plan, reason=f"{cure} since step {number:,}", step=number))
                cure = f"{cure}, and the model is no longer compiled"
            self._closing.enter_context(recompute_blocks(model))
        self._recorder.event("oom", step=number, reason=problem, cure=cure, exact=False)
        self._note_inexact(number, cure)

    def _empty_memory(self) -> None:
        gc.collect()
        self._parts.device.empty_cache()

    def _use(self, plan: Plan) -> None:
        self.plan = plan
        self._write_plan(plan)
