"""Learning rate schedules: a factor of the base rate for each step, counted from 1."""

import math
from collections.abc import Callable
from typing import Any

from whet.base.errors import UsageError

SCHEDULE_NAMES = ("constant", "linear", "cosine", "plateau")


class LearningRateSchedule:
    """A factor of the base rate for each step; pure but for plateau, which watches the evaluations."""

    def __init__(self, shape: Callable[[int], float], *, watches: bool = False, patience: int = 2) -> None:
        self._shape = shape
        self._watches = watches
        self._patience = patience
        self._best: float | None = None
        self._num_bad = 0
        self._reduction = 1.0

    def factor(self, step: int) -> float:
        """The factor for one step."""
        return self._shape(step) * self._reduction

    def observe(self, score: float) -> None:
        """Takes an evaluation into account (higher is better): without progress the rate is halved."""
        if not self._watches:
            return
        if math.isfinite(score) and (self._best is None or score > self._best):
            self._best, self._num_bad = score, 0
            return
        self._num_bad += 1
        if self._num_bad > self._patience:
            self._reduction, self._num_bad = self._reduction / 2, 0

    def state(self) -> dict[str, Any]:
        """What a resume needs."""
        return {"best": self._best, "num_bad": self._num_bad, "reduction": self._reduction}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes a saved state back."""
        self._best, self._num_bad, self._reduction = state["best"], state["num_bad"], state["reduction"]


def make_schedule(
    shape: str | Callable[[int], float], *, total_steps: int | None, warmup_steps: int = 0
) -> LearningRateSchedule:
    """A schedule by name, or from a function of your own; warm-up rises linearly from the first step."""
    if callable(shape):
        return LearningRateSchedule(shape)
    if shape not in SCHEDULE_NAMES:
        raise UsageError("no such schedule", got=shape, try_=" or ".join(SCHEDULE_NAMES))
    if shape in ("linear", "cosine") and total_steps is None:
        raise UsageError(f"a {shape} schedule needs to know the end", got="data without a length", try_="max_steps=N")

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / (warmup_steps + 1)
        if shape in ("constant", "plateau") or total_steps is None:
            return 1.0
        # The last step still moves: it is one step away from zero.
        done = (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps)
        return 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LearningRateSchedule(factor, watches=shape == "plateau")
