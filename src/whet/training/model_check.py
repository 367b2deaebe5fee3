"""Check a model on its device before the first step: causality, parity with the CPU, repeatability."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, MicroBatch, micro_batch_shapes
from whet.data.split import LengthMode
from whet.device.abstract import AbstractDevice
from whet.device.errors import is_out_of_memory
from whet.plan.plan import Plan
from whet.step.loss import LossFunction
from whet.step.rollback import release_traceback
from whet.training.building import TrainingParts
from whet.verify.isolation import preserve_model_and_rng
from whet.verify.start import causality, device_parity
from whet.verify.start.causality import sequence_length
from whet.verify.trainable import OutputFunction

_Result = TypeVar("_Result")
_MAX_SAMPLES = 8
"""Of a micro-batch: as long as they are in training, and enough to try several places at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCheckResult:
    """What was found; None where it was not asked, or could not be."""

    leak: causality.CausalityLeak | None = None
    agreement: device_parity.DeviceParity | None = None
    said: tuple[str, ...] = ()
    """Everything in words."""
    is_complete: bool = True
    """Whether every question was answered."""

    @property
    def is_good(self) -> bool:
        return self.leak is None and (self.agreement is None or self.agreement.agrees)

    @property
    def error(self) -> float | None:
        """The largest one beside the CPU, for the log; None where it is not a number."""
        error = None if self.agreement is None else max(self.agreement.loss_error, self.agreement.gradient_error)
        return error if error is not None and math.isfinite(error) else None

    def __str__(self) -> str:
        return "; ".join(self.said)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCheck:
    """One model with its loss, and the samples that it is tried with."""

    parts: TrainingParts
    loss: LossFunction
    outputs: OutputFunction | None
    small: MicroBatch
    """For the comparison with the CPU."""
    whole: MicroBatch
    """For the outputs."""

    @classmethod
    def of(
        cls,
        parts: TrainingParts,
        plan: Plan,
        loss: LossFunction,
        outputs: OutputFunction | None,
        batch: GlobalBatch,
        length_mode: LengthMode,
    ) -> "ModelCheck":
        planned = plan.micro_batch
        assert isinstance(planned, int)

        def first(size: int) -> MicroBatch:
            return next(
                iter(parts.source.micro_batches(batch, micro_batch=min(size, len(batch)), length_mode=length_mode))
            )

        whole = first(min(planned, _MAX_SAMPLES))
        small = first(device_parity.parity_batch_size(plan.workload.num_parameters, sequence_length(whole)))
        return cls(parts=parts, loss=loss, outputs=outputs, small=small, whole=whole)

    @property
    def shapes(self) -> list[Any]:
        """What the findings hold for."""
        return [micro_batch_shapes(self.small), micro_batch_shapes(self.whole)]

    def findings(self, precision: str) -> ModelCheckResult:
        """All questions, in this number format; leaves no trace."""
        parts, said, is_complete = self.parts, [], True
        model, device = parts.stepper.model, parts.device
        precision = device_parity.compute_precision(model, precision)
        leak = agreement = None
        if parts.device.kind != "cpu":
            agreement, again, problem = self._compare(precision)
            said += [problem or str(agreement)]
            is_complete = problem is None
        if self.outputs is not None:
            outputs = self.outputs

            def probe() -> causality.CausalityLeak | None:
                return causality.check_causality(model, device, outputs, self.whole, precision=precision)

            leak, problem = self._ask(probe, "causality not shown")
            said += [problem or (str(leak) if leak else "causal")]
            is_complete = is_complete and problem is None
        if agreement is not None:
            said += [again or "the same bits twice"]
            if again and device.kind == "cuda":
                said[-1] += " (CUDA adds in any order; not with deterministic=on)"
        return ModelCheckResult(leak=leak, agreement=agreement, said=tuple(said), is_complete=is_complete)

    def _compare(self, precision: str) -> tuple[device_parity.DeviceParity | None, str | None, str | None]:
        """The agreement with the CPU, how a second pass differs, and what went wrong."""
        model, device, loss, micro = self.parts.stepper.model, self.parts.device, self.loss, self.small

        def compare() -> tuple[device_parity.DeviceParity, str | None]:
            once, twice = (
                device_parity.loss_and_gradients(model, device, loss, micro, precision=precision) for _ in range(2)
            )
            return device_parity.compare_with_cpu(
                model, loss, micro, once, precision=precision
            ), device_parity.repeat_difference(once, twice)

        found, problem = self._ask(compare, "not compared with the CPU")
        return (None, None, problem) if found is None else (*found, None)

    def _ask(self, question: Callable[[], Any], unanswered: str) -> tuple[Any, str | None]:
        device = self.parts.device

        def asked() -> Any:
            with preserve_model_and_rng(self.parts.stepper.model, device):
                return question()

        return run_check(asked, device, unanswered=unanswered)


def run_check(
    question: Callable[[], _Result], device: AbstractDevice, *, unanswered: str
) -> tuple[_Result | None, str | None]:
    """An answer, or why there is none: a step may work where a question does not, and has the last word."""
    try:
        return question(), None
    except UsageError:
        raise
    except Exception as error:
        is_oom, problem = is_out_of_memory(error), release_traceback(error)
    if is_oom:
        device.memory.empty_cache()
    return None, f"{unanswered}: {problem}"
