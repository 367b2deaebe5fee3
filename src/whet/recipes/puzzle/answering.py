"""What does a trained model answer to Sudokus that are written in lines?"""

from collections.abc import Sequence
from typing import Any

import torch

from whet.base.errors import UsageError
from whet.recipes.puzzle.config import Sizes
from whet.recipes.puzzle.judging import steps_of
from whet.recipes.puzzle.model import PuzzleModel
from whet.recipes.puzzle.reading import cells_of


@torch.no_grad()
def answers(model: PuzzleModel, texts: Sequence[str], sizes: Sizes) -> list[dict[str, Any]]:
    """For each its cells as digits, how sure the model is that all are right, and whether the given ones were kept."""
    given = [cells_of("".join(text.split())) for text in texts]
    for text, cells in zip(texts, given, strict=True):
        if cells is None or len(cells) != sizes.length:
            raise UsageError(
                "this is no Sudoku of the size that was learnt",
                got=text[:100],
                try_=f"{sizes.length} signs: digits, and . for a blank",
            )
    inputs = torch.stack([torch.from_numpy(cells) for cells in given if cells is not None]).to(model.y0.device).long()
    *_, (logits, halt) = steps_of(model, inputs + 1, torch.zeros_like(inputs[:, 0]))
    # Padding and blanks are no answers.
    digits = logits[..., 2:].argmax(-1) + 1
    is_kept = ((inputs == 0) | (inputs == digits)).all(-1)
    return [
        {"label": "".join(map(str, row)), "probability": sure, "keeps_given": keeps}
        for row, sure, keeps in zip(digits.tolist(), halt.sigmoid().tolist(), is_kept.tolist(), strict=True)
    ]
