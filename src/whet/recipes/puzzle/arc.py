"""Evaluation of ARC: predictions for the augmented copies of a task vote for its solution. Does not import torch.

The rule is that of the official evaluator. The augmentation of each prediction is undone. Predictions are ranked by
number of votes, then by their mean probability of being correct. pass@K is the fraction of test inputs whose solution
is among the first K.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.recipes.puzzle.builders import ARC_SIDE, arc_grid, grid_hash, inverse_augmentation

PASS_K = (1, 2, 5, 10, 100, 1000)
"""Values of K for which the official evaluator reports pass@K."""
_FIRST_COLOR, _LAST_COLOR = 2, 11
"""Tokens of the first and the last color."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArcTasks:
    """The names of all puzzle embeddings, and the test pairs of the held-out tasks."""

    names: tuple[str, ...]
    tests: dict[str, tuple[tuple[str, str], ...]]
    """Hashes of the input and the solution of each test pair, by task."""

    @classmethod
    def read(cls, folder: Path) -> "ArcTasks | None":
        """Read the tasks of a puzzle folder. Return None if it has none, as for Sudokus and mazes."""
        tests_file = folder / "test_puzzles.json"
        if not tests_file.is_file():
            return None
        names = json.loads((folder / "identifiers.json").read_text(encoding="utf-8"))
        tests = {
            name: tuple((_hash(pair["input"]), _hash(pair["output"])) for pair in task["test"])
            for name, task in json.loads(tests_file.read_text(encoding="utf-8")).items()
        }
        return cls(names=tuple(names), tests=tests)


def _hash(cells: list[list[int]]) -> str:
    return grid_hash(arc_grid(cells))


class ArcVotes:
    """Collects the predictions of an evaluation as votes, by task and test input."""

    def __init__(self, tasks: ArcTasks) -> None:
        self._tasks = tasks
        self._probabilities: defaultdict[str, defaultdict[str, defaultdict[str, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        """Probability of being correct of each vote, by task, input and solution."""

    def add(self, puzzles: Iterable[int], inputs: Any, predicted: Any, probabilities: Iterable[float]) -> None:
        """Add the predictions for some rows.

        Args:
            puzzles: Index of the puzzle embedding of each row.
            inputs: Input tokens, (rows, 900).
            predicted: Predicted tokens, (rows, 900).
            probabilities: Predicted probability that all tokens of a row are correct.
        """
        for puzzle, given, solution, probability in zip(puzzles, inputs, predicted, probabilities, strict=True):
            task, undo = inverse_augmentation(self._tasks.names[puzzle])
            votes = self._probabilities[task][grid_hash(undo(crop(given)))]
            votes[grid_hash(undo(crop(solution)))].append(probability)

    def metrics(self) -> dict[str, float]:
        """Return the mean pass@K over the tasks that have predictions. The test inputs of a task are averaged first."""
        passed = np.zeros(len(PASS_K))
        tasks = [name for name in self._tasks.tests if name in self._probabilities]
        for name in tasks:
            tests = self._tasks.tests[name]
            for given, solution in tests:
                rank = _rank(self._probabilities[name][given], solution)
                passed += np.array([rank is not None and rank < limit for limit in PASS_K]) / len(tests)
        return {f"pass@{limit}": float(sum_ / max(1, len(tasks))) for limit, sum_ in zip(PASS_K, passed, strict=True)}


def _rank(votes: dict[str, list[float]], solution: str) -> int | None:
    """Return the rank of a solution, counted from 0, or None if it has no votes."""
    ranked = sorted(
        votes, key=lambda answer: (len(votes[answer]), sum(votes[answer]) / len(votes[answer])), reverse=True
    )
    return ranked.index(solution) if solution in votes else None


def crop(tokens: np.ndarray) -> np.ndarray:
    """Return the colors, 0 to 9, of the largest top-left rectangle of the canvas that contains only color tokens."""
    canvas = tokens.reshape(ARC_SIDE, ARC_SIDE)
    is_color = (canvas >= _FIRST_COLOR) & (canvas <= _LAST_COLOR)
    # For each row: the number of leading columns that contain only colors in this row and all rows above.
    widths = np.minimum.accumulate(is_color.cumprod(1).sum(1))
    height = int(np.argmax(widths * np.arange(1, ARC_SIDE + 1))) + 1
    colors: np.ndarray = (canvas[:height, : widths[height - 1]] - _FIRST_COLOR).astype(np.uint8)
    # If the canvas has no color, return shape (0, 0) instead of (1, 0).
    return colors if colors.size else colors[:0]
