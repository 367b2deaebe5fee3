"""How the parts of one step, computed by several processes, become one step. Here: one process, nothing to join."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

_NOTHING = contextlib.nullcontext()


class StepAgainError(Exception):
    """All processes must make this step once more; none has changed a weight."""


class Joining:
    """What a step asks; the base is for one process and does nothing."""

    is_alone = True
    holds_all = True
    """Whether this process has the whole model."""

    def computing(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Around forward and backward of one micro-batch; gradients are summed over all processes with the last."""
        return _NOTHING

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        """What the loss function gives for a micro-batch."""
        return loss(micro)

    def seed(self, loss: Tensor) -> Tensor | None:  # noqa: ARG002
        """What the backward pass begins with: how often a loss counts; None for once."""
        return None

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """Loss and weight of all processes together."""
        return loss, weight

    def whole(self, tensor: Tensor) -> Tensor:
        """A number about all parameters, where each process knows a part of them."""
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that lies here."""
        return tensor

    def evaluating(self) -> AbstractContextManager[object]:
        """While entered, each process may call the model as often as it likes, whatever the others do."""
        return contextlib.nullcontext()
