"""Metrics and predictions of the puzzle model."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import DictBatch
from whet.data.padding import IGNORED_LABEL
from whet.recipes.puzzle.arc import ArcTasks, ArcVotes
from whet.recipes.puzzle.config import Sizes
from whet.recipes.puzzle.data import parse_sudoku
from whet.recipes.puzzle.model import PuzzleModel, puzzle_losses, slot_input
from whet.recipes.puzzle.slots import SlotInput


def evaluate(model: PuzzleModel, micro_batches: Iterator[DictBatch], arc: ArcTasks | None = None) -> dict[str, Any]:
    """Run the model for the maximum number of steps on each puzzle, and return the metrics.

    `exact_accuracy` is the fraction of puzzles with all cells correct, and `exact_N` is that fraction after N steps.
    With `arc`, `pass@K` is the fraction of test inputs whose solution is among the K with the most votes.
    """
    votes = None if arc is None else ArcVotes(arc)
    sums: Tensor | None = None
    number = 0
    for micro in micro_batches:
        batch = slot_input(micro)
        num_counted = (batch.labels != IGNORED_LABEL).sum(-1).clamp(min=1)
        # Sum on the device, to transfer results once at the end instead of once per micro-batch.
        exact, cells, loss, halts = [], None, None, None
        for logits, halt in run_steps(model, batch.inputs, batch.puzzles):
            losses = puzzle_losses(logits, halt, batch.labels)
            exact.append(losses.is_right.sum())
            cells = ((logits.argmax(-1) == batch.labels).sum(-1) / num_counted).sum()
            loss = losses.tokens.sum()
            halts = ((halt >= 0) == losses.is_right).sum()
        if votes is not None:
            _add_votes(votes, batch, logits, halt)
        of_batch = torch.stack([part.float() for part in (cells, loss, halts, *exact) if part is not None])
        sums = of_batch if sums is None else sums + of_batch
        number += len(micro.sample_ids)
    if sums is None:
        return {}
    cell_accuracy, mean_loss, halt_accuracy, *exact_accuracies = (sums / number).tolist()
    by_step = {f"exact_{step}": share for step, share in enumerate(exact_accuracies, start=1)}
    return {
        "exact_accuracy": exact_accuracies[-1],
        "accuracy": cell_accuracy,
        "loss": mean_loss,
        "halt_accuracy": halt_accuracy,
        **by_step,
        **({} if votes is None else votes.metrics()),
    }


def _add_votes(votes: ArcVotes, batch: SlotInput, logits: Tensor, halt: Tensor) -> None:
    # Use float64 like the official evaluator. Convert on the CPU, because not all devices support it.
    probabilities = halt.cpu().double().sigmoid()
    puzzles, inputs, predicted = (part.cpu().numpy() for part in (batch.puzzles, batch.inputs, logits.argmax(-1)))
    votes.add(puzzles.tolist(), inputs, predicted, probabilities.tolist())


def run_steps(model: PuzzleModel, inputs: Tensor, puzzles: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the token logits, (B, length, tokens), and halting logits, (B,), after each step, without using slots."""
    is_new = torch.ones_like(puzzles, dtype=torch.bool)
    y, z = model.initial_states(len(inputs))
    for _ in range(model.slots.max_steps):
        y, z, logits, halting = model(inputs, puzzles, y, z, is_new)
        is_new = torch.zeros_like(is_new)
        yield logits, halting[:, 0]


@torch.no_grad()
def solve_texts(model: PuzzleModel, texts: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    """Solve Sudokus given as text.

    For each Sudoku, return the digits of all cells, the predicted probability that all are correct, and whether the
    given digits are unchanged.
    """
    parsed = [parse_sudoku("".join(text.split())) for text in texts]
    for text, cells in zip(texts, parsed, strict=True):
        if cells is None or len(cells) != sizes.length:
            raise UsageError(
                "not a Sudoku of the size that the model was trained on",
                got=text[:100],
                try_=f"{sizes.length} characters: digits, and . for a blank",
            )
    given = torch.stack([torch.from_numpy(cells) for cells in parsed if cells is not None]).to(model.y0.device).long()
    *_, (logits, halt) = run_steps(model, given + 1, torch.zeros_like(given[:, 0]))
    # Skip tokens 0 and 1, because padding and blanks are not valid in a solution.
    digits = logits[..., 2:].argmax(-1) + 1
    keeps_given = ((given == 0) | (given == digits)).all(-1)
    return [
        {"label": "".join(map(str, row)), "probability": probability, "keeps_given": keeps}
        for row, probability, keeps in zip(digits.tolist(), halt.sigmoid().tolist(), keeps_given.tolist(), strict=True)
    ]
