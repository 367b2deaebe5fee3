"""How many puzzles are right? Each is worked on for exactly all steps, from the beginning, and judged after each."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whet.data.batch import Micro
from whet.recipes.puzzle.loss import IGNORED, offer_of, parts
from whet.recipes.puzzle.model import PuzzleModel


def judge(model: PuzzleModel, micros: Iterator[Micro]) -> dict[str, Any]:
    """exact_accuracy: puzzles that are right as a whole; exact_1 and so on: those right after so many steps."""
    sums: Tensor | None = None
    number = 0
    for micro in micros:
        offer = offer_of(micro)
        counts = (offer.labels != IGNORED).sum(-1).clamp(min=1)
        exact, cells, loss, halts = [], None, None, None
        for logits, halt in steps_of(model, offer.inputs, offer.puzzles):
            found = parts(logits, halt, offer.labels)
            exact.append(found.is_right.sum())
            cells = ((logits.argmax(-1) == offer.labels).sum(-1) / counts).sum()
            loss = found.tokens.sum()
            halts = ((halt >= 0) == found.is_right).sum()
        here = torch.stack([part.float() for part in (cells, loss, halts, *exact) if part is not None])
        sums = here if sums is None else sums + here
        number += len(micro)
    if sums is None:
        return {}
    cell_share, loss_mean, halt_share, *exact_shares = (sums / number).tolist()
    by_step = {f"exact_{step}": share for step, share in enumerate(exact_shares, start=1)}
    return {
        "exact_accuracy": exact_shares[-1],
        "accuracy": cell_share,
        "loss": loss_mean,
        "halt_accuracy": halt_share,
        **by_step,
    }


def steps_of(model: PuzzleModel, inputs: Tensor, puzzles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and the logit of halting after each of all steps; the slots are not touched."""
    is_new = torch.ones_like(puzzles, dtype=torch.bool)
    shape = (len(inputs), model.shape.num_places, model.shape.width)
    y, z = model.y0.expand(shape), model.z0.expand(shape)
    for _ in range(model.slots.most_steps):
        y, z, logits, halting = model(inputs, puzzles, y, z, is_new)
        is_new = torch.zeros_like(is_new)
        yield logits, halting[:, 0]
