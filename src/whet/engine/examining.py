"""What is found out about a model before its first step: is it causal, right, and the same twice? Changes nothing."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, Micro, shapes_of
from whet.data.cut import Lengths
from whet.device.abstract import AbstractDevice
from whet.engine.building import Parts
from whet.engine.recovery import let_go
from whet.plan.plan import Plan
from whet.step.loss import LossFunction
from whet.verify.start import canary, causality, repeat
from whet.verify.start.places import num_places
from whet.verify.subject import Outputs
from whet.verify.untouched import untouched

_Answer = TypeVar("_Answer")
_MOST_SAMPLES = 8
"""Of a micro-batch: as long as they are in training, and enough to try several places at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What was found; None where it was not asked, or could not be."""

    leak: causality.Leak | None = None
    agreement: canary.Agreement | None = None
    said: tuple[str, ...] = ()
    """Everything in words."""
    is_complete: bool = True
    """Whether every question was answered."""

    @property
    def is_good(self) -> bool:
        return self.leak is None and (self.agreement is None or self.agreement.holds)

    @property
    def error(self) -> float | None:
        """The largest one beside the CPU, for the log; None where it is not a number."""
        error = None if self.agreement is None else max(self.agreement.loss_error, self.agreement.gradient_error)
        return error if error is not None and math.isfinite(error) else None

    def __str__(self) -> str:
        return "; ".join(self.said)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """One model with its loss, and the samples that it is tried with."""

    parts: Parts
    loss: LossFunction
    outputs: Outputs | None
    small: Micro
    """For the comparison with the CPU."""
    whole: Micro
    """For the outputs."""

    @classmethod
    def of(
        cls, parts: Parts, plan: Plan, loss: LossFunction, outputs: Outputs | None, batch: GlobalBatch, how: Lengths
    ) -> "Examination":
        planned = plan.value("micro_batch")
        assert isinstance(planned, int)

        def first(size: int) -> Micro:
            return next(iter(parts.source.micros(batch, micro_batch=min(size, len(batch)), how=how)))

        whole = first(min(planned, _MOST_SAMPLES))
        small = first(canary.num_samples(plan.workload.num_parameters, num_places(whole)))
        return cls(parts=parts, loss=loss, outputs=outputs, small=small, whole=whole)

    @property
    def shapes(self) -> list[Any]:
        """What the findings hold for."""
        return [shapes_of(self.small), shapes_of(self.whole)]

    def findings(self, precision: str) -> Findings:
        """All questions, in this number format; leaves no trace."""
        parts, said, is_complete = self.parts, [], True
        model, device = parts.stepper.model, parts.device
        precision = canary.number_format(model, precision)
        leak = agreement = None
        if parts.device.kind != "cpu":
            agreement, again, problem = self._compare(precision)
            said += [problem or str(agreement)]
            is_complete = problem is None
        if self.outputs is not None:
            outputs = self.outputs

            def probe() -> causality.Leak | None:
                return causality.probe(model, device, outputs, self.whole, precision=precision)

            leak, problem = self._ask(probe, "causality not shown")
            said += [problem or (str(leak) if leak else "causal")]
            is_complete = is_complete and problem is None
        if agreement is not None:
            said += [again or "the same bits twice"]
            if again and device.kind == "cuda":
                said[-1] += " (CUDA adds in any order; not with deterministic=on)"
        return Findings(leak=leak, agreement=agreement, said=tuple(said), is_complete=is_complete)

    def _compare(self, precision: str) -> tuple[canary.Agreement | None, str | None, str | None]:
        """The agreement with the CPU, how a second pass differs, and what went wrong."""
        model, device, loss, micro = self.parts.stepper.model, self.parts.device, self.loss, self.small

        def compare() -> tuple[canary.Agreement, str | None]:
            once, twice = (canary.compute(model, device, loss, micro, precision=precision) for _ in range(2))
            return canary.compare(model, loss, micro, once, precision=precision), repeat.difference(once, twice)

        found, problem = self._ask(compare, "not compared with the CPU")
        return (None, None, problem) if found is None else (*found, None)

    def _ask(self, question: Callable[[], Any], unanswered: str) -> tuple[Any, str | None]:
        device = self.parts.device

        def asked() -> Any:
            with untouched(self.parts.stepper.model, device):
                return question()

        return ask(asked, device, unanswered=unanswered)


def ask(
    question: Callable[[], _Answer], device: AbstractDevice, *, unanswered: str
) -> tuple[_Answer | None, str | None]:
    """An answer, or why there is none: a step may work where a question does not, and has the last word."""
    try:
        return question(), None
    except UsageError:
        raise
    except Exception as error:
        is_oom, problem = device.is_oom(error), let_go(error)
    if is_oom:
        device.empty_cache()
    return None, f"{unanswered}: {problem}"
