"""Training data of puzzles: generated Sudokus, Sudokus from files, or a folder of the official implementation."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError, WhetError
from whet.recipes.puzzle.config import HELD_BACK, TRAIN_GRIDS_4X4, PuzzleConfig, Sizes
from whet.recipes.puzzle.model import IGNORED_LABEL
from whet.recipes.puzzle.sudoku import (
    all_grids_4x4,
    candidates_of,
    random_grids_9x9,
    remove_cells,
    shuffle_grids,
    solve,
)

_SIDE_OF_LENGTH = {16: 4, 81: 9}
_MAX_TOKENS = 30_000
"""They are kept as int16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PuzzleRows:
    """Puzzles as tokens, their solutions, which vector belongs to each, and which come from one original."""

    inputs: np.ndarray
    labels: np.ndarray
    puzzles: np.ndarray
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def chosen(self, which: np.ndarray) -> "PuzzleRows":
        return PuzzleRows(
            inputs=self.inputs[which],
            labels=self.labels[which],
            puzzles=self.puzzles[which],
            groups=self.groups[which],
        )


# --- lines ------------------------------------------------------------------------------------------------------------


def parse_sudoku(text: str) -> np.ndarray | None:
    """A Sudoku in one line: digits, and 0, . or _ for a blank; None where it is none.

    >>> cells_of("1...  ..2.".replace(" ", "")), cells_of("1... ..2. .3.. ...4".replace(" ", ""))[:4]
    (None, array([1, 0, 0, 0], dtype=int8))
    """
    side = _SIDE_OF_LENGTH.get(len(text))
    signs = text.translate(str.maketrans("._", "00"))
    if side is None or not (signs.isascii() and signs.isdigit()) or max(map(int, signs)) > side:
        return None
    return np.array([int(sign) for sign in signs], np.int8)


def read_sudokus(paths: list[Path]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Puzzles, solutions (both 0 to 9) and notes, from text files with a Sudoku in each line and .csv with a column
    `question`; each once. Those that do not have exactly one solution are left out, and said."""
    found: dict[bytes, tuple[str, np.ndarray]] = {}
    for path in paths:
        for text in _sudoku_texts(path):
            cells = parse_sudoku(text)
            if cells is not None:
                # By its cells: the same Sudoku may be written with other signs for a blank.
                found.setdefault(cells.tobytes(), (text, cells))
    texts, each = [text for text, _ in found.values()], [cells for _, cells in found.values()]
    if len({len(cells) for cells in each}) != 1:
        raise UsageError(
            "no Sudokus of one size were found",
            got=", ".join(map(str, paths))[:200] or "no file",
            try_="lines of 81 signs (or all of 16): digits, and . for a blank",
        )
    puzzles = np.stack(each)
    solutions = solve(candidates_of(puzzles), most=2)
    is_proper = np.array([len(grids) == 1 for grids in solutions])
    if not is_proper.any():
        raise UsageError("no Sudoku has exactly one solution", got=f"{len(puzzles)} Sudokus", try_="other data")
    notes = [f"{len(puzzles):,} Sudokus were read and solved"]
    if not is_proper.all():
        examples = ", ".join(text for text, proper in zip(texts, is_proper, strict=True) if not proper)
        notes.append(f"{int((~is_proper).sum()):,} without exactly one solution are left out: {examples[:200]}")
    grids = np.concatenate([grids for grids in solutions if len(grids) == 1])
    return puzzles[is_proper], grids, notes


def _sudoku_texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            if path.suffix.lower() == ".csv":
                for row in csv.DictReader(file):
                    yield (row.get("question") or "").strip()
            else:
                for line in file:
                    yield line.strip()
    except (OSError, csv.Error) as error:
        raise WhetError("the data cannot be read", got=f"{path}: {error}", try_="another file") from None


# --- folders ----------------------------------------------------------------------------------------------------------


def is_official(folder: Path) -> bool:
    return (folder / "train" / "dataset.json").is_file()


def read_official(folder: Path) -> tuple[PuzzleRows, PuzzleRows | None, Sizes]:
    """Training rows, test rows if there are any, and what a model must fit. Every example counts the same here."""
    train, sizes = _read_split(folder / "train")
    if not (folder / "test" / "dataset.json").is_file():
        return train, None, sizes
    test, test_sizes = _read_split(folder / "test")
    if test_sizes.length != sizes.length:
        raise _folder_error(folder, f"length {test_sizes.length} in test and {sizes.length} in train")
    return (
        train,
        test,
        Sizes(
            num_tokens=max(sizes.num_tokens, test_sizes.num_tokens),
            length=sizes.length,
            num_puzzles=max(sizes.num_puzzles, test_sizes.num_puzzles),
        ),
    )


def _read_split(folder: Path) -> tuple[PuzzleRows, Sizes]:
    try:
        about = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        sizes = Sizes(
            num_tokens=about["vocab_size"], length=about["seq_len"], num_puzzles=about["num_puzzle_identifiers"]
        )
        parts = [_read_set(folder, name, sizes, about.get("ignore_label_id")) for name in about["sets"]]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise _folder_error(folder, f"{type(error).__name__}: {error}") from None
    starts = np.cumsum([0, *(int(part.groups.max(initial=-1)) + 1 for part in parts)])
    rows = PuzzleRows(
        inputs=np.concatenate([part.inputs for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        puzzles=np.concatenate([part.puzzles for part in parts]),
        groups=np.concatenate([part.groups + start for part, start in zip(parts, starts, strict=False)]),
    )
    return rows, sizes


def _read_set(folder: Path, name: str, sizes: Sizes, ignored: int | None) -> PuzzleRows:
    if Path(name).name != name:
        raise ValueError(f"the set {name!r} lies elsewhere")

    def load(what: str) -> np.ndarray:
        array: np.ndarray = np.load(folder / f"{name}__{what}.npy", mmap_mode="r", allow_pickle=False)
        return array

    inputs, labels = load("inputs"), load("labels")
    puzzle_starts, group_starts = np.asarray(load("puzzle_indices"), int), np.asarray(load("group_indices"), int)
    puzzles = np.repeat(np.asarray(load("puzzle_identifiers"), np.int32), np.diff(puzzle_starts))
    groups = np.repeat(np.repeat(np.arange(len(group_starts) - 1), np.diff(group_starts)), np.diff(puzzle_starts))
    shape = (len(puzzles), sizes.length)
    if inputs.shape != shape or labels.shape != shape or len(groups) != len(puzzles):
        raise ValueError(f"inputs {inputs.shape}, labels {labels.shape}; the indices speak of {shape}")
    if sizes.num_tokens > _MAX_TOKENS:
        raise ValueError(f"a vocabulary of {sizes.num_tokens}, at most {_MAX_TOKENS}")
    counted = (
        np.where(np.asarray(labels) == ignored, IGNORED_LABEL, labels) if ignored is not None else np.asarray(labels)
    )
    for what, tokens in (("inputs", inputs), ("labels", np.where(counted == IGNORED_LABEL, 0, counted))):
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < sizes.num_tokens):
            raise ValueError(f"{what} have tokens outside of 0 to {sizes.num_tokens - 1}")
    if len(puzzles) and not (int(puzzles.min()) >= 0 and int(puzzles.max()) < sizes.num_puzzles):
        raise ValueError(f"puzzle identifiers outside of 0 to {sizes.num_puzzles - 1}")
    return PuzzleRows(inputs=inputs.astype(np.int16), labels=counted.astype(np.int16), puzzles=puzzles, groups=groups)


def _folder_error(folder: Path, problem: str) -> WhetError:
    return WhetError(
        "the folder does not hold puzzles as it says", got=f"{folder}: {problem}"[:300], try_="build it anew"
    )


_SUDOKU_SUFFIXES = (".txt", ".csv")
_HELD_OUT_DIVISOR = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PuzzleData:
    train: dict[str, Tensor]
    val: dict[str, Tensor]
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
    puzzles = remove_cells(solutions, config.blanks, rng)
    held_back = np.arange(number, number + 2 * HELD_BACK)
    return _sudokus(puzzles, solutions, np.split(held_back, 2), config, rng)


def _from_files(paths: list[Path], config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    puzzles, solutions, notes = read_sudokus([f for f in files if f.suffix.lower() in _SUDOKU_SUFFIXES or f in paths])
    side = round(puzzles.shape[1] ** 0.5)
    if side == 4 and config.augment:
        raise UsageError(
            "shuffled 4x4 grids would be those that are held back: there are only 288",
            got=f"augment={config.augment}",
            try_="augment=0",
        )
    order = rng.permutation(len(puzzles))
    order = order[_by_grid(solutions[order])]
    number = _num_held_out(len(puzzles), config)
    if config.puzzles != "auto":
        order = order[: config.puzzles + 2 * number]
    puzzles, solutions = puzzles[order], solutions[order]
    return _sudokus(puzzles, solutions, _held_out_rows(solutions, number), config, rng, notes=tuple(notes))


def _by_grid(solutions: np.ndarray) -> np.ndarray:
    """The order in which Sudokus with the same solution lie together, and else nothing has changed."""
    _, first, grid = np.unique(solutions, axis=0, return_index=True, return_inverse=True)
    order: np.ndarray = np.argsort(first[grid.reshape(-1)], kind="stable")
    return order


def _held_out_rows(solutions: np.ndarray, number: int) -> list[np.ndarray]:
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
    train = np.concatenate([train, *(shuffle_grids(train, rng) for _ in range(config.augment))], axis=1)
    parts = [train, *(both[:, rows] for rows in held_back)]
    columns = [_columns(inputs + 1, labels + 1, np.zeros(len(inputs), np.int32)) for inputs, labels in parts]
    side = round(puzzles.shape[1] ** 0.5)
    sizes = Sizes(num_tokens=side + 2, length=side**2, num_puzzles=1)
    return PuzzleData(train=columns[0], val=columns[1], test=columns[2], sizes=sizes, is_sudoku=True, notes=notes)


# --- folders of the official implementation ---------------------------------------------------------------------------


def _official(folder: Path, config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    if config.augment:
        raise UsageError("the folder holds its own copies", got=f"augment={config.augment}", try_="augment=0")
    train, test, sizes = read_official(folder)
    if test is None or len(test) < 2:
        # Whole groups: a puzzle must not be held back while a copy of it is trained on.
        groups = rng.permutation(int(train.groups.max(initial=0)) + 1)
        number = _num_held_out(len(groups), config)
        val, held = (np.isin(train.groups, some) for some in (groups[:number], groups[number : 2 * number]))
        parts = [train.chosen(~val & ~held), train.chosen(val), train.chosen(held)]
    else:
        at = np.arange(len(test))
        parts = [train, test.chosen(at[::2][: config.eval_puzzles]), test.chosen(at[1::2][: config.eval_puzzles])]
    if config.puzzles != "auto":
        parts[0] = parts[0].chosen(np.sort(rng.permutation(len(parts[0]))[: config.puzzles]))
    columns = [_columns(part.inputs, part.labels, part.puzzles) for part in parts]
    return PuzzleData(train=columns[0], val=columns[1], test=columns[2], sizes=sizes, is_sudoku=False)


def _num_held_out(number: int, config: PuzzleConfig) -> int:
    """For dev, and as many for test."""
    held_back = min(config.eval_puzzles, number // _HELD_OUT_DIVISOR)
    if not held_back:
        raise UsageError(
            "too few puzzles to hold some back", got=f"{number} puzzles", try_=f"{_HELD_OUT_DIVISOR} or more"
        )
    return held_back


def _columns(inputs: np.ndarray, labels: np.ndarray, puzzles: np.ndarray) -> dict[str, Tensor]:
    return {
        "inputs": torch.from_numpy(inputs.astype(np.int16)),
        "labels": torch.from_numpy(labels.astype(np.int16)),
        "puzzles": torch.from_numpy(puzzles),
    }
