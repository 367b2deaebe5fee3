"""The three parts that a run sees: generated Sudokus, Sudokus from files, or a folder of the official kind."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.recipes.puzzle.config import HELD_BACK, TRAIN_GRIDS_4X4, PuzzleConfig, Sizes
from whet.recipes.puzzle.reading import is_official, read_official, read_sudokus
from whet.recipes.puzzle.sudoku import all_grids_4x4, random_grids_9x9, shuffled, with_blanks

_TABLES = (".txt", ".csv")
_HELD_BACK_SHARE = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PuzzleData:
    train: dict[str, Tensor]
    dev: dict[str, Tensor]
    test: dict[str, Tensor]
    sizes: Sizes
    is_sudoku: bool
    notes: tuple[str, ...] = ()


def read_data(config: PuzzleConfig) -> PuzzleData:
    """What the config names; all draws come from its seed."""
    rng = np.random.default_rng(config.seed)
    if config.is_generated:
        return _generated(config, rng)
    paths = [Path(path) for path in (config.data, *config.data_paths) if path is not None]
    if len(paths) == 1 and is_official(paths[0]):
        return _official(paths[0], config, rng)
    return _from_files(paths, config, rng)


# --- Sudokus ----------------------------------------------------------------------------------------------------------


def _generated(config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    number = config.num_generated
    if config.size == 4:
        grids = all_grids_4x4(rng)
        train, others = grids[:TRAIN_GRIDS_4X4], grids[TRAIN_GRIDS_4X4:]
        held = others[rng.integers(len(others), size=2 * HELD_BACK)]
        solutions = np.concatenate([np.resize(train, (number, 16)), held])
    else:
        solutions = random_grids_9x9(number + 2 * HELD_BACK, rng)
    puzzles = with_blanks(solutions, config.blanks, rng)
    held_back = np.arange(number, number + 2 * HELD_BACK)
    return _sudokus(puzzles, solutions, np.split(held_back, 2), config, rng)


def _from_files(paths: list[Path], config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    puzzles, solutions, notes = read_sudokus([f for f in files if f.suffix.lower() in _TABLES or f in paths])
    side = round(puzzles.shape[1] ** 0.5)
    if side == 4 and config.augment:
        raise UsageError(
            "shuffled 4x4 grids would be those that are held back: there are only 288",
            got=f"augment={config.augment}",
            try_="augment=0",
        )
    order = rng.permutation(len(puzzles))
    order = order[_by_grid(solutions[order])]
    number = _num_held_back(len(puzzles), config)
    if config.puzzles != "auto":
        order = order[: config.puzzles + 2 * number]
    puzzles, solutions = puzzles[order], solutions[order]
    return _sudokus(puzzles, solutions, _last_grids(solutions, number), config, rng, notes=tuple(notes))


def _by_grid(solutions: np.ndarray) -> np.ndarray:
    """The order in which Sudokus with the same solution lie together, and else nothing has changed."""
    _, first, grid = np.unique(solutions, axis=0, return_index=True, return_inverse=True)
    order: np.ndarray = np.argsort(first[grid.reshape(-1)], kind="stable")
    return order


def _last_grids(solutions: np.ndarray, number: int) -> list[np.ndarray]:
    """`number` Sudokus at the end for dev, and as many for test; or some more, since a grid is in one part only."""
    is_first = np.ones(len(solutions), bool)
    is_first[1:] = (solutions[1:] != solutions[:-1]).any(1)
    starts = np.flatnonzero(is_first)
    begin, middle = (int(starts[starts <= len(solutions) - held].max()) for held in (2 * number, number))
    if middle == begin:
        begin = int(starts[starts < middle].max(initial=0))
    if not begin:
        raise UsageError(
            "too few grids to hold some back",
            got=f"{len(starts)} solutions in all",
            try_="Sudokus with other solutions",
        )
    return [np.arange(begin, middle), np.arange(middle, len(solutions))]


def _sudokus(
    puzzles: np.ndarray,
    solutions: np.ndarray,
    held_back: list[np.ndarray],
    config: PuzzleConfig,
    rng: np.random.Generator,
    *,
    notes: tuple[str, ...] = (),
) -> PuzzleData:
    """Only what is trained on is shuffled; cells become tokens: 0 is padding, 1 a blank, and k + 1 the digit k."""
    both = np.stack([puzzles, solutions])
    train = both[:, : held_back[0][0]]
    train = np.concatenate([train, *(shuffled(train, rng) for _ in range(config.augment))], axis=1)
    parts = [train, *(both[:, rows] for rows in held_back)]
    columns = [_columns(inputs + 1, labels + 1, np.zeros(len(inputs), np.int32)) for inputs, labels in parts]
    side = round(puzzles.shape[1] ** 0.5)
    sizes = Sizes(num_tokens=side + 2, length=side**2, num_puzzles=1)
    return PuzzleData(train=columns[0], dev=columns[1], test=columns[2], sizes=sizes, is_sudoku=True, notes=notes)


# --- folders of the official implementation ---------------------------------------------------------------------------


def _official(folder: Path, config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    if config.augment:
        raise UsageError("the folder holds its own copies", got=f"augment={config.augment}", try_="augment=0")
    train, test, sizes = read_official(folder)
    if test is None or len(test) < 2:
        # Whole groups: a puzzle must not be held back while a copy of it is trained on.
        groups = rng.permutation(int(train.groups.max(initial=0)) + 1)
        number = _num_held_back(len(groups), config)
        dev, held = (np.isin(train.groups, some) for some in (groups[:number], groups[number : 2 * number]))
        parts = [train.chosen(~dev & ~held), train.chosen(dev), train.chosen(held)]
    else:
        at = np.arange(len(test))
        parts = [train, test.chosen(at[::2][: config.eval_puzzles]), test.chosen(at[1::2][: config.eval_puzzles])]
    if config.puzzles != "auto":
        parts[0] = parts[0].chosen(np.sort(rng.permutation(len(parts[0]))[: config.puzzles]))
    columns = [_columns(part.inputs, part.labels, part.puzzles) for part in parts]
    return PuzzleData(train=columns[0], dev=columns[1], test=columns[2], sizes=sizes, is_sudoku=False)


def _num_held_back(number: int, config: PuzzleConfig) -> int:
    """For dev, and as many for test."""
    held_back = min(config.eval_puzzles, number // _HELD_BACK_SHARE)
    if not held_back:
        raise UsageError(
            "too few puzzles to hold some back", got=f"{number} puzzles", try_=f"{_HELD_BACK_SHARE} or more"
        )
    return held_back


def _columns(inputs: np.ndarray, labels: np.ndarray, puzzles: np.ndarray) -> dict[str, Tensor]:
    return {
        "inputs": torch.from_numpy(inputs.astype(np.int16)),
        "labels": torch.from_numpy(labels.astype(np.int16)),
        "puzzles": torch.from_numpy(puzzles),
    }
