"""What is minimised? The surprise at every token that is to be predicted: a sum over them, and how many they are."""

import torch
from torch import Tensor

from whet.data.batch import MicroBatch
from whet.recipes.chat.model.causal import IGNORED, CausalModel


def next_token_loss(model: CausalModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Nats in all, averaged over supervised passes, and the number of tokens: so micro-batches weigh by tokens."""
    targets = targets_of(micro)
    nats = model(*inputs_of(micro), targets)
    return torch.stack(nats).mean(0), (targets != IGNORED).sum()


def inputs_of(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Tokens and where documents begin, without the last place: nothing comes after it."""
    return micro.tokens[:, :-1], micro.is_start[:, :-1]


def targets_of(micro: MicroBatch) -> Tensor:
    """The token that comes next at each place, and a number that is ignored where it does not count."""
    return micro.tokens[:, 1:].long().masked_fill(~micro.is_loss[:, 1:], IGNORED)
