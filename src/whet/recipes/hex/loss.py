"""What is minimised? Cross entropy of the move over the legal ones, and of the result; weights are yours to say.

A position that is decided has no move: it teaches the value alone, and counts as a sample like any other, so that the
loss does not depend on how a batch is cut.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from whet.data.batch import MicroBatch
from whet.recipes.hex.net import Judgement


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What each part of the loss counts."""

    policy: float = 1.0
    value: float = 1.0
    uncertainty: float = 0.1


def hex_loss(said: Judgement, micro: MicroBatch, weights: Weights) -> Tensor:
    """The mean over positions."""
    parts = (
        weights.policy * policy_losses(said, micro),
        weights.value * value_losses(said, micro),
        weights.uncertainty * uncertainty_losses(said, micro),
    )
    return sum(parts[1:], start=parts[0]).mean()


def policy_losses(said: Judgement, micro: MicroBatch) -> Tensor:
    """Of each position: against the move that was played, or the shares of a search; 0 where there is no move."""
    logs = said.policy.log_softmax(1)
    if "shares" in micro.fields:
        # A taken cell has the share 0, and 0 times its logarithm is 0: it is finite.
        return -(micro.shares.float() * logs).sum(1)
    return -logs.gather(1, micro.move.clamp(min=0)[:, None])[:, 0] * (micro.move >= 0)


def value_losses(said: Judgement, micro: MicroBatch) -> Tensor:
    """Of each position: against who won."""
    return functional.binary_cross_entropy_with_logits(said.value, micro.win, reduction="none")


def uncertainty_losses(said: Judgement, micro: MicroBatch) -> Tensor:
    """Of each position: how well the net knows how wrong its value is; the value itself does not move for it."""
    squared = (said.win.detach() - micro.win).square()
    return functional.binary_cross_entropy_with_logits(said.error, squared, reduction="none")
