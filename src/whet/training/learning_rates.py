"""The learning rates of each step: base rates times the factor of the schedule."""

from torch.optim import Optimizer

from whet.step.optimizers import set_learning_rate
from whet.training.checks import check_no_other_scheduler, check_parameter_groups
from whet.training.schedule import LearningRateSchedule


class LearningRates:
    """The learning rates of one run, of each group of the optimizer."""

    def __init__(self, optimizer: Optimizer, schedule: LearningRateSchedule, base: list[float]) -> None:
        self.base = base
        """What the schedule's factor is of; part of every checkpoint."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._newest: list[float] = []

    def set_for(self, number: int) -> float:
        """Sets the rates of a step; that of the first group. What somebody else did to them is refused before."""
        check_parameter_groups(self._optimizer, self.base)
        check_no_other_scheduler(self._optimizer, self._newest)
        self._newest = set_learning_rate(self._optimizer, self._schedule.factor(number), self.base)
        return self._newest[0]

    def go_on_with(self, base: list[float]) -> None:
        """The base rates of a checkpoint, whose optimizer is in place and has rates of its own."""
        self.base, self._newest = base, []

    def put_back(self) -> None:
        """The optimizer has its base rates again."""
        set_learning_rate(self._optimizer, 1.0, self.base)
