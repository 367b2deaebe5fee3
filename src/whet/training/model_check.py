"""Check a model on its device before the first step: causality, parity with the CPU, repeatability."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, micro_batch_shapes
from whet.device.abstract import AbstractDevice
from whet.device.errors import is_out_of_memory
from whet.step.loss import MicroLoss
from whet.step.rollback import release_traceback
from whet.verify.draws import RecordedDraws
from whet.verify.isolation import preserve_model_and_rng
from whet.verify.start import causality, device_parity

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_Result = TypeVar("_Result")
_MAX_SAMPLES = 8
"""Maximum number of samples for the causality check. Each has full length and tests several positions at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCheckResult:
    """The results of all checks. A result is None if its check passed, was skipped or could not run."""

    leak: causality.CausalityLeak | None = None
    parity: device_parity.DeviceParity | None = None
    messages: tuple[str, ...] = ()
    is_complete: bool = True
    """Whether all checks could run."""

    @property
    def is_good(self) -> bool:
        return self.leak is None and (self.parity is None or self.parity.agrees)

    @property
    def error(self) -> float | None:
        """The largest difference from the CPU, for the log; None if it is unknown or not finite."""
        error = None if self.parity is None else max(self.parity.loss_error, self.parity.gradient_error)
        return error if error is not None and math.isfinite(error) else None

    def __str__(self) -> str:
        return "; ".join(self.messages)


class ModelCheck:
    """Checks the model of a run on samples of the first batch, then restores the model and the random generators."""

    def __init__(self, run: "RunContext", loss: MicroLoss, batch: GlobalBatch) -> None:
        self._run = run
        self.loss = loss
        plan = run.plan
        self._whole = run.first_samples(batch, min(plan.micro_batch, _MAX_SAMPLES))
        length = causality.sequence_length(self._whole)
        # The CPU is slow, so it gets only a few samples.
        num_samples = device_parity.parity_batch_size(plan.workload.num_parameters, length)
        self._small = run.first_samples(batch, num_samples)

    @property
    def shapes(self) -> list[Any]:
        """The input shapes for which the results of the checks are valid."""
        return [micro_batch_shapes(self._small), micro_batch_shapes(self._whole)]

    def run_checks(self, precision: str) -> ModelCheckResult:
        """Check causality, parity with the CPU and repeatability in the given precision."""
        model, device, outputs = self._run.model, self._run.device, self._run.config.outputs
        messages, is_complete = [], True
        precision = device_parity.compute_precision(model, precision)
        leak = parity = None
        if not device.is_cpu:
            parity, difference, problem = self._compare_with_cpu(precision)
            messages += [problem or str(parity)]
            is_complete = problem is None
        if outputs is not None:
            leak, problem = self._isolated(
                lambda: causality.check_causality(model, device, outputs, self._whole, precision=precision),
                "causality not shown",
            )
            messages += [problem or (str(leak) if leak else "causal")]
            is_complete = is_complete and problem is None
        if parity is not None:
            messages += [difference or "the same bits twice"]
            if difference and device.adds_in_any_order:
                messages[-1] += f" ({device.kind.upper()} adds in any order; not with deterministic=on)"
        return ModelCheckResult(leak=leak, parity=parity, messages=tuple(messages), is_complete=is_complete)

    def _compare_with_cpu(self, precision: str) -> tuple[device_parity.DeviceParity | None, str | None, str | None]:
        """Compare the loss and gradients of the device with those of the CPU, and those of two passes on the device.

        Return the parity, the difference between the two passes if there is one, and the problem if the check failed to
        run.
        """
        model, device, loss, micro = self._run.model, self._run.device, self.loss, self._small

        def compare() -> tuple[device_parity.DeviceParity, str | None]:
            draws = RecordedDraws()
            first, second = (
                device_parity.loss_and_gradients(model, device, loss, micro, precision=precision, draws=draws)
                for _ in range(2)
            )
            parity = device_parity.compare_with_cpu(model, loss, micro, first, precision=precision, draws=draws)
            return parity, device_parity.repeat_difference(first, second)

        result, problem = self._isolated(compare, "not compared with the CPU")
        return (None, None, problem) if result is None else (*result, None)

    def _isolated(self, check: Callable[[], _Result], failed: str) -> tuple[_Result | None, str | None]:
        model, device = self._run.model, self._run.device

        def isolated() -> _Result:
            with preserve_model_and_rng(model, device):
                return check()

        return run_check(isolated, device, failed=failed)


def run_check(
    check: Callable[[], _Result], device: AbstractDevice, *, failed: str
) -> tuple[_Result | None, str | None]:
    """Run a check. Return its result, or None and the reason why the check itself failed.

    A failed check is not an error: it may need more memory than a step, and only the step must succeed.
    """
    try:
        return check(), None
    except UsageError:
        raise
    except Exception as error:
        is_oom, problem = is_out_of_memory(error), release_traceback(error)
    if is_oom:
        device.memory.empty_cache()
    return None, f"{failed}: {problem}"
