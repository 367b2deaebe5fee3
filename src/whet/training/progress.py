"""The progress of a run: steps, epochs, samples and the best evaluation, for checkpoints and for users."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, Position


@dataclass(kw_only=True, slots=True)
class State:
    """The progress of a run: steps done, position in the data, best evaluation, and why it stopped.

    Checkpoints contain `position` and the fields in _SAVED.
    """

    step: int = 0
    """Number of completed optimizer steps."""
    position: Position = field(default_factory=Position)
    """The data that the optimizer has consumed. Data that has only been read ahead does not count."""
    samples: int = 0
    """Number of samples consumed over all epochs."""
    evaluated_step: int = 0
    """The step of the last evaluation."""
    goal: str | None = None
    """The goal and its direction, such as "val_loss (min)"; None without a goal."""
    best_score: float | None = None
    """The best value of the goal metric so far, negated if mode is "min"; None before the first one."""
    best_step: int | None = None
    """The step of `best_score`."""
    num_worse: int = 0
    """Number of evaluations since the best one."""
    ended_early: bool = False
    """Whether early stopping has ended the run."""

    epochs: int = 1
    max_steps: int | None = None
    total_steps: int | None = None
    """Number of optimizer steps in the whole run; None if the data has no length."""
    lr: float = 0.0
    """The learning rate of the first parameter group in the last step."""
    batch: GlobalBatch | None = None
    """The global batch of the last step."""

    stop_reason: str | None = None
    """The reason why the loop stopped before the last step; None if it did not."""

    _SAVED: ClassVar[tuple[str, ...]] = (
        "step", "samples", "evaluated_step", "goal", "best_score", "best_step", "num_worse", "ended_early",
    )  # fmt: skip

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.position.epoch

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or early stopping has ended the run."""
        if self.position.epoch >= self.epochs or self.ended_early:
            return True
        return self.max_steps is not None and self.step >= self.max_steps

    def advance(self, batch: GlobalBatch) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.position = batch.after
        self.samples += len(batch.ids)
        self.batch = batch

    def record_score(self, score: float) -> bool:
        """Record the score of an evaluation and return whether it is the best so far.

        Higher is better. NaN and Inf never count as the best.
        """
        if math.isfinite(score) and (self.best_score is None or score > self.best_score):
            self.best_score, self.best_step, self.num_worse = score, self.step, 0
            return True
        self.num_worse += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the progress as the dict that a checkpoint saves."""
        return {**{name: getattr(self, name) for name in self._SAVED}, "position": asdict(self.position)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the fields that a checkpoint saves. Raise UsageError if the goal has changed."""
        # Read all fields first, so that a KeyError does not leave the state half restored.
        values = {name: saved[name] for name in self._SAVED}
        if values["best_score"] is not None and self.goal not in (None, values["goal"]):
            # Scores of two different goals cannot be compared: early stopping and the best checkpoint would be wrong.
            raise UsageError(
                "the run was started with a different goal",
                got=f"{self.goal}; the run has {values['goal']}",
                try_="the same goal, mode and evaluation, or another run folder",
            )
        values["goal"] = self.goal or values["goal"]
        self.position = Position(**saved["position"])
        for name, value in values.items():
            setattr(self, name, value)


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
    """The step and the value of the best evaluation of the goal metric."""

    step: int
    """The optimizer step of the evaluation."""
    metric: str
    """The name of the goal."""
    value: float
