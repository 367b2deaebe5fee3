"""Learning rate schedules: a factor of the base rate for each step. Steps count from 1."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.step.optimizers import set_learning_rate

SCHEDULE_NAMES = ("constant", "linear", "cosine", "plateau")


class LearningRateSchedule:
    """A factor of the base rate for each step. It depends on the step only, except for plateau, which has state."""

    def __init__(self, shape: Callable[[int], float], *, is_plateau: bool = False, patience: int = 2) -> None:
        self._shape = shape
        self._is_plateau = is_plateau
        self._patience = patience
        self._best: float | None = None
        self._num_bad = 0
        self._reduction = 1.0

    def factor(self, step: int) -> float:
        """Return the factor for one step."""
        return self._shape(step) * self._reduction

    def observe(self, score: float) -> None:
        """Record the score of an evaluation; higher is better. A plateau schedule halves the rate without progress."""
        if not self._is_plateau:
            return
        if math.isfinite(score) and (self._best is None or score > self._best):
            self._best, self._num_bad = score, 0
            return
        self._num_bad += 1
        if self._num_bad > self._patience:
            self._reduction, self._num_bad = self._reduction / 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resume needs."""
        return {"best": self._best, "num_bad": self._num_bad, "reduction": self._reduction}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._best, self._num_bad, self._reduction = state["best"], state["num_bad"], state["reduction"]


def make_schedule(
    shape: str | Callable[[int], float], *, total_steps: int | None, warmup_steps: int = 0
) -> LearningRateSchedule:
    """Make a schedule from a name or from a function of the step. Warm-up rises linearly from the first step."""
    if callable(shape):
        return LearningRateSchedule(shape)
    if shape not in SCHEDULE_NAMES:
        raise UsageError("unknown schedule", got=shape, try_=" or ".join(SCHEDULE_NAMES))
    if shape in ("linear", "cosine") and total_steps is None:
        raise UsageError(
            f"a {shape} schedule needs to know the last step", got="data without a length", try_="max_steps=N"
        )

    def factor(step: int) -> float:
        if step <= warmup_steps:
            return step / (warmup_steps + 1)
        if shape in ("constant", "plateau") or total_steps is None:
            return 1.0
        # step - 1, so that the last step still has a rate above zero: a rate of 0 would waste it.
        done = (step - 1 - warmup_steps) / max(1, total_steps - warmup_steps)
        return 1 - done if shape == "linear" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return LearningRateSchedule(factor, is_plateau=shape == "plateau")


class LearningRates:
    """Sets the learning rates of an optimizer: the base rate of each parameter group times the schedule's factor."""

    def __init__(self, optimizer: Optimizer, schedule: LearningRateSchedule, base: list[float]) -> None:
        self.base = base
        """The base rate of each parameter group, which the factor multiplies; saved in every checkpoint."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._last_set: list[float] = []

    def set_for(self, step: int) -> float:
        """Set the rates of a step and return that of the first group. Raise if other code has changed the rates."""
        check_parameter_groups(self._optimizer, self.base)
        _check_no_other_scheduler(self._optimizer, self._last_set)
        self._last_set = set_learning_rate(self._optimizer, self._schedule.factor(step), self.base)
        return self._last_set[0]

    def use_base(self, base: list[float]) -> None:
        """Use the base rates of a checkpoint."""
        # Restoring the optimizer has already overwritten its rates, so the last rates are forgotten: otherwise the
        # check for a second scheduler would fail.
        self.base, self._last_set = base, []

    def restore(self) -> None:
        """Set the optimizer back to its base rates."""
        set_learning_rate(self._optimizer, 1.0, self.base)


def check_parameter_groups(optimizer: Optimizer, base_rates: list[float]) -> None:
    """Raise if parameter groups were added or removed: an added group has no base rate and would not be clipped."""
    if len(optimizer.param_groups) != len(base_rates):
        raise UsageError(
            "the optimizer has other parameter groups than when the session began",
            got=f"{len(optimizer.param_groups)} groups; {len(base_rates)} at the beginning",
            try_="all parameters in it from the beginning, with requires_grad_(False) until they are trained",
        )


def _check_no_other_scheduler(optimizer: Optimizer, last_set: list[float]) -> None:
    """Raise if other code has changed the rates: two schedulers would silently overwrite each other."""
    rates = [group["lr"] for group in optimizer.param_groups]
    # A tensor rate belongs to an optimizer that whet built. It is not checked: reading it would wait for the device.
    if last_set and not isinstance(rates[0], torch.Tensor) and rates != last_set:
        raise UsageError(
            "something else changes the learning rate",
            got=f"{rates}; whet had set {last_set}",
            try_="schedule=... (a name, or a function from a step to a factor), and no scheduler beside it",
        )
