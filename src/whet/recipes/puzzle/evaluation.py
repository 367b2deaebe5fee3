"""Metrics and predictions of the puzzle model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import MicroBatch
from whet.recipes.puzzle.config import Sizes
from whet.recipes.puzzle.data import parse_sudoku
from whet.recipes.puzzle.model import IGNORED_LABEL, PuzzleModel, puzzle_losses, slot_input


def evaluate(model: PuzzleModel, micro_batches: Iterator[MicroBatch]) -> dict[str, Any]:
    """exact_accuracy: puzzles that are right as a whole; exact_1 and so on: those right after so many steps."""
    sums: Tensor | None = None
    number = 0
    for micro in micro_batches:
        offer = slot_input(micro)
        counts = (offer.labels != IGNORED_LABEL).sum(-1).clamp(min=1)
        exact, cells, loss, halts = [], None, None, None
        for logits, halt in run_steps(model, offer.inputs, offer.puzzles):
            found = puzzle_losses(logits, halt, offer.labels)
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


def run_steps(model: PuzzleModel, inputs: Tensor, puzzles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and the logit of halting after each of all steps; the slots are not touched."""
    is_new = torch.ones_like(puzzles, dtype=torch.bool)
    shape = (len(inputs), model.shape.num_places, model.shape.width)
    y, z = model.y0.expand(shape), model.z0.expand(shape)
    for _ in range(model.slots.most_steps):
        y, z, logits, halting = model(inputs, puzzles, y, z, is_new)
        is_new = torch.zeros_like(is_new)
        yield logits, halting[:, 0]


@torch.no_grad()
def solve_texts(model: PuzzleModel, texts: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    """For each its cells as digits, how sure the model is that all are right, and whether the given ones were kept."""
    given = [parse_sudoku("".join(text.split())) for text in texts]
    for text, cells in zip(texts, given, strict=True):
        if cells is None or len(cells) != sizes.length:
            raise UsageError(
                "this is no Sudoku of the size that was learnt",
                got=text[:100],
                try_=f"{sizes.length} signs: digits, and . for a blank",
            )
    inputs = torch.stack([torch.from_numpy(cells) for cells in given if cells is not None]).to(model.y0.device).long()
    *_, (logits, halt) = run_steps(model, inputs + 1, torch.zeros_like(inputs[:, 0]))
    # Padding and blanks are no answers.
    digits = logits[..., 2:].argmax(-1) + 1
    is_kept = ((inputs == 0) | (inputs == digits)).all(-1)
    return [
        {"label": "".join(map(str, row)), "probability": sure, "keeps_given": keeps}
        for row, sure, keeps in zip(digits.tolist(), halt.sigmoid().tolist(), is_kept.tolist(), strict=True)
    ]
