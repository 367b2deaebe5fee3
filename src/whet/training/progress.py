"""The progress of a run, for users: steps, epochs, samples and the best evaluation."""

from dataclasses import dataclass

from whet.training.callback import State


class Progress:
    """A read-only view of the progress of a run. It is always current; copy values to keep them."""

    __slots__ = ("_state",)

    def __init__(self, state: State) -> None:
        self._state = state

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._state.epoch

    @property
    def samples(self) -> int:
        """Number of samples consumed over all epochs."""
        return self._state.samples

    @property
    def total_steps(self) -> int | None:
        """Number of optimizer steps in the whole run; None if the data has no length."""
        return self._state.total_steps

    def __repr__(self) -> str:
        total = "" if self.total_steps is None else f", total_steps={self.total_steps}"
        return f"Progress(step={self.step}, epoch={self.epoch}, samples={self.samples}{total})"


@dataclass(frozen=True, kw_only=True, slots=True)
class BestStep:
    """The best evaluation of the goal."""

    step: int
    """The optimizer step of the evaluation."""
    metric: str
    """The name of the goal."""
    value: float
