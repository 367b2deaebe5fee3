"""What is minimised? The surprise at every token that is to be predicted: a sum over them, and how many they are."""

import torch
from torch import Tensor
from torch.nn import functional

from whet.data.batch import Micro
from whet.recipes.chat.model.causal import CausalModel

_IGNORED = -100


def next_token_loss(model: CausalModel, micro: Micro) -> tuple[Tensor, Tensor]:
    """Nats in all, averaged over supervised passes, and the number of tokens: so micro-batches weigh by tokens."""
    passes = model(*inputs_of(micro))
    targets = targets_of(micro)
    nats = [surprise(model.logits(states), targets) for states in passes]
    return torch.stack(nats).mean(0), (targets != _IGNORED).sum()


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of -ln p over all targets that count."""
    return functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def inputs_of(micro: Micro) -> tuple[Tensor, Tensor]:
    """Tokens and where documents begin, without the last place: nothing comes after it."""
    return micro.tokens[:, :-1], micro.is_start[:, :-1]


def targets_of(micro: Micro) -> Tensor:
    """The token that comes next at each place, and a number that is ignored where it does not count."""
    return micro.tokens[:, 1:].long().masked_fill(~micro.is_loss[:, 1:], _IGNORED)
