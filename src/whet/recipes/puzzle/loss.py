"""What is a step of supervision trained on? The tokens of the solution, and whether it is right as a whole."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from whet.base.errors import WhetError
from whet.data.batch import Micro
from whet.device.branches import widest_float
from whet.recipes.puzzle.halting import Held, Offer
from whet.recipes.puzzle.model import PuzzleModel

IGNORED = -100
"""The label of a place that does not count."""
_HALTING = 0.5


class Parts(NamedTuple):
    """For each puzzle; tensors of the same length."""

    tokens: Tensor
    halting: Tensor
    is_right: Tensor


def stablemax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """-log p of each label, 0 where it is ignored: p is s(v) / sum s, and s is v + 1, or 1 / (1 - v) below 0."""
    wide = logits.to(widest_float(logits.device))
    # min and max keep both branches finite, so that the gradient of the one not taken is not 0 times infinity.
    sizes = torch.where(wide < 0, 1 / (1 - wide.clamp(max=0)), wide.clamp(min=0) + 1)
    counts = labels != IGNORED
    chosen = sizes.gather(-1, torch.where(counts, labels, 0)[..., None]).squeeze(-1)
    return torch.where(counts, sizes.sum(-1).log() - chosen.log(), 0)


def parts(logits: Tensor, halt: Tensor, labels: Tensor) -> Parts:
    """The losses of each puzzle, and whether all its tokens are right."""
    counts = labels != IGNORED
    number = counts.sum(-1).clamp(min=1)
    is_right = ((logits.argmax(-1) == labels) | ~counts).all(-1)
    halting = functional.binary_cross_entropy_with_logits(halt, is_right.to(halt.dtype), reduction="none")
    return Parts(tokens=stablemax_loss(logits, labels).sum(-1) / number, halting=halting, is_right=is_right)


def puzzle_loss(model: PuzzleModel, micro: Micro) -> Tensor:
    """The mean over the slots of a micro-batch. In training mode the slots go one step on; else nothing remembers."""
    offer = offer_of(micro)
    held = model.slots.held(offer) if model.training else fresh(model, offer)
    y, z, logits, halting = model(held.inputs, held.puzzles, held.y, held.z, held.is_new)
    found = parts(logits, halting[:, 0], held.labels)
    if model.training:
        model.slots.settle(offer.first, held, y=y, z=z, halt=halting[:, 0])
    return (found.tokens + _HALTING * found.halting).mean()


def offer_of(micro: Micro) -> Offer:
    """Rows of data as slots take them."""
    if micro.first_place is None:
        raise WhetError(
            "the samples of a micro-batch must lie in a row in the global batch",
            got="samples sorted by length",
            try_="puzzles of one length",
        )
    return Offer(
        first=micro.first_place,
        inputs=micro.inputs.long(),
        labels=micro.labels.long(),
        puzzles=micro.puzzles.long(),
    )


def fresh(model: PuzzleModel, offer: Offer) -> Held:
    """What is offered, at its beginning."""
    shape = (len(offer.inputs), model.shape.num_places, model.shape.width)
    return Held(
        inputs=offer.inputs,
        labels=offer.labels,
        puzzles=offer.puzzles,
        y=model.y0.expand(shape),
        z=model.z0.expand(shape),
        is_new=torch.ones_like(offer.puzzles, dtype=torch.bool),
        steps=torch.zeros_like(offer.puzzles),
    )
