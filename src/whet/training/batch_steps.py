"""The optimizer steps on one batch: usually one, one for each of several optimizers, or a manual step."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch
from whet.step.step import Outcome
from whet.training import checks

MANUAL = "<manual>"
"""Represents a manual step among the names of optimizers, which are identifiers."""


class BatchSteps:
    """The outcomes of the steps on the current batch, which together count as one step of the run."""

    def __init__(self) -> None:
        self.batch: GlobalBatch | None = None
        self.is_rolled_back = False
        """Whether a step on this batch has caused a rollback. The batch will be repeated."""
        self.is_pending = False
        """Whether the batch has steps that are not yet counted as a step of the run."""
        self._outcomes: dict[str, Outcome] = {}
        self._visited: set[str] = set()
        """Optimizers that have stepped on this batch or do not step on it."""
        self._is_finished = True
        self._loss: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The optimizers that stepped; None after a manual step, in which any of them may have stepped."""
        return None if MANUAL in self._outcomes else tuple(self._outcomes)

    def has_visited(self, names: Collection[str]) -> bool:
        """Return whether all of these optimizers have stepped on the batch or skipped it."""
        return self._visited.issuperset(names)

    def begin(self, batch: GlobalBatch) -> None:
        """Reset the record for a new batch."""
        self.batch, self._outcomes, self._visited = batch, {}, set()
        self.is_rolled_back = self.is_pending = self._is_finished = False
        self._loss = None

    def check(self, batch: GlobalBatch, name: str) -> None:
        """Raise UsageError if the batch is not the current one, or if the optimizer has already stepped on it."""
        if batch is not self.batch or name in self._visited or (self._is_finished and not name):
            raise checks.wrong_batch_error()
        if self._is_finished:
            raise UsageError(
                "the steps of this batch are complete",
                got="another step after session.log, session.due, session.evaluate or a manual step",
                try_="all steps of a batch first, then its evaluation",
            )

    def add(self, name: str, outcome: Outcome) -> None:
        """Record the outcome of an optimizer's step."""
        self._outcomes[name] = outcome
        self._visited.add(name)
        self.is_pending = not self._is_finished

    def add_manual(self) -> None:
        """Record a step performed by the user's own code."""
        loss = torch.tensor(float("nan")) if self._loss is None else self._loss
        outcome = Outcome(loss=loss, grad_norm=None, marks=(), is_manual=True, has_loss=self._loss is not None)
        self.add(MANUAL, outcome)

    def skip(self, name: str) -> None:
        """Record that an optimizer does not step on this batch."""
        self._visited.add(name)
        self.is_pending = not self._is_finished

    def log_loss(self, loss: Tensor) -> None:
        """Record the loss of a manual step."""
        self._loss = loss

    def discard(self) -> None:
        """Discard the recorded steps of the batch after a rollback."""
        self._outcomes, self._visited = {}, set()
        self.is_rolled_back = self._is_finished = True
        self.is_pending = False

    def finish(self) -> Outcome | None:
        """Combine the outcomes of all steps into one and return it; None without steps, or on a second call."""
        if not self.is_pending:
            return None
        self._is_finished, self.is_pending = True, False
        outcomes = self._outcomes
        if len(outcomes) == 1 and outcomes.keys() <= {"", MANUAL}:
            return next(iter(outcomes.values()))
        known = {name: outcome for name, outcome in outcomes.items() if outcome.has_loss}
        if not known:
            # No optimizer steps on this batch, or the user's code has logged no loss.
            nothing = torch.tensor(float("nan"))
            return Outcome(loss=nothing, grad_norm=None, marks=(), is_manual=True, has_loss=False)
        losses = {f"loss_{name}": outcome.loss for name, outcome in known.items() if name != MANUAL}
        scalars = {name: value for outcome in known.values() for name, value in outcome.scalars.items()}
        # The sum is NaN if any of the losses is, so that the NaN guard detects it.
        total = torch.stack([outcome.loss.float() for outcome in known.values()]).sum()
        return replace(
            next(iter(known.values())),
            loss=total,
            marks=tuple(mark for outcome in outcomes.values() for mark in outcome.marks),
            is_skipped=any(outcome.is_skipped for outcome in outcomes.values()),
            is_manual=MANUAL in outcomes,
            scalars={**losses, **scalars},
        )
