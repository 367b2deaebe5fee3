"""Which steps are made, which are looked at first, and which are left out."""

from whet.data.batch import GlobalBatch
from whet.engine.execution import CannotUndoError, Execution
from whet.engine.recorder import Recorder, sample_ids
from whet.engine.soundness import Soundness
from whet.step.loss import LossFunction
from whet.step.step import NonFiniteError, Outcome, Stepper


class MustGoBackError(Exception):
    """The weights are not what they should be: only the last checkpoint can bring them back."""


class CarefulSteps:
    """Makes the steps of a run, as far as their numbers are numbers."""

    def __init__(self, execution: Execution, stepper: Stepper, soundness: Soundness, recorder: Recorder) -> None:
        self._execution = execution
        self._stepper = stepper
        self._soundness = soundness
        self._recorder = recorder

    def make(self, loss: LossFunction, batch: GlobalBatch, *, number: int) -> Outcome | None:
        """Optimizer step `number`; None for one that is left out."""
        soundness = self._soundness
        if number in soundness.skipped:
            return None
        is_careful = number <= soundness.careful_until
        try:
            outcome = self._execution.step(loss, batch, number=number, is_careful=is_careful)
        except CannotUndoError as error:
            raise MustGoBackError(str(error)) from None
        except NonFiniteError as error:
            self._leave_out(batch, number=number, how=str(error))
            return None
        if is_careful and not self._stepper.has_finite_weights():
            # Loss and gradient were fine, and the update was not: only the checkpoint is from before it.
            how = "the update makes weights NaN or Inf"
            self._leave_out(batch, number=number, how=how)
            raise MustGoBackError(f"step {number:,}: {how}")
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
