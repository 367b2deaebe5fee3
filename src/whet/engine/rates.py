"""Which learning rates does a step have? The run's own times the schedule's factor, and nobody else sets them."""

from torch.optim import Optimizer

from whet.engine.refusals import refuse_foreign_schedule, refuse_other_groups
from whet.engine.schedule import Schedule
from whet.step.optimizer import set_rate


class Rates:
    """The learning rates of one run, of each group of the optimizer."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule, base: list[float]) -> None:
        self.base = base
        """What the schedule's factor is of; part of every checkpoint."""
        self._optimizer = optimizer
        self._schedule = schedule
        self._newest: list[float] = []

    def set_for(self, number: int) -> float:
        """Sets the rates of a step; that of the first group. What somebody else did to them is refused before."""
        refuse_other_groups(self._optimizer, self.base)
        refuse_foreign_schedule(self._optimizer, self._newest)
        self._newest = set_rate(self._optimizer, self._schedule.factor(number), self.base)
        return self._newest[0]

    def go_on_with(self, base: list[float]) -> None:
        """The base rates of a checkpoint, whose optimizer is in place and has rates of its own."""
        self.base, self._newest = base, []

    def put_back(self) -> None:
        """The optimizer has its base rates again."""
        set_rate(self._optimizer, 1.0, self.base)
