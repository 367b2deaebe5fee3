"""Training data of puzzles: generated Sudokus, Sudokus from files, or a folder of the official implementation."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError, WhetError
from whet.data.padding import IGNORED_LABEL
from whet.recipes.puzzle.arc import ArcTasks
from whet.recipes.puzzle.config import NUM_HELD_OUT, TRAIN_GRIDS_4X4, PuzzleConfig, Sizes
from whet.recipes.puzzle.sudoku import (
    all_grids_4x4,
    random_grids_9x9,
    remove_cells,
    shuffle_grids,
    solve,
    to_candidates,
)

_SIDE_OF_LENGTH = {16: 4, 81: 9}
_SUDOKU_SUFFIXES = (".txt", ".csv")
_HELD_OUT_DIVISOR = 10
_MAX_TOKENS = 30_000
"""Maximum vocabulary size. Tokens are stored as int16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PuzzleData:
    """The three splits as tensors, and the model sizes that they determine."""

    train: dict[str, Tensor]
    val: dict[str, Tensor]
    test: dict[str, Tensor]
    sizes: Sizes
    is_sudoku: bool
    arc: ArcTasks | None = None
    """The held-out ARC tasks, if val and test contain copies of them."""
    notes: tuple[str, ...] = ()


def read_data(config: PuzzleConfig) -> PuzzleData:
    """Read or generate the data of a config. All random draws depend only on its seed."""
    rng = np.random.default_rng(config.seed)
    if config.is_generated:
        return _generate(config, rng)
    if len(config.paths) == 1 and is_official(config.paths[0]):
        return _from_official(config.paths[0], config, rng)
    return _from_files(config.paths, config, rng)


# --- Sudokus ----------------------------------------------------------------------------------------------------------


def parse_sudoku(text: str) -> np.ndarray | None:
    """Parse a Sudoku written in one line: digits, and 0, . or _ for a blank. Return None if it is not a Sudoku.

    >>> parse_sudoku("1.....2."), parse_sudoku("1... ..2. .3.. ...4".replace(" ", ""))[:4]
    (None, array([1, 0, 0, 0], dtype=int8))
    """
    side = _SIDE_OF_LENGTH.get(len(text))
    digits = text.translate(str.maketrans("._", "00"))
    if side is None or not (digits.isascii() and digits.isdigit()) or max(map(int, digits)) > side:
        return None
    return np.array([int(digit) for digit in digits], np.int8)


def read_sudokus(paths: list[Path]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Read and solve Sudokus from text files, one per line, and CSV files with a column `question`.

    Return the distinct puzzles and their solutions, each (number, cells) with values 0 to 9, and notes for the user.
    Puzzles without exactly one solution are skipped and reported in a note.
    """
    distinct: dict[bytes, tuple[str, np.ndarray]] = {}
    for path in paths:
        for text in _sudoku_texts(path):
            cells = parse_sudoku(text)
            if cells is not None:
                # Use the cells as the key, because the same Sudoku may be written with different blank characters.
                distinct.setdefault(cells.tobytes(), (text, cells))
    texts, all_cells = [text for text, _ in distinct.values()], [cells for _, cells in distinct.values()]
    if len({len(cells) for cells in all_cells}) != 1:
        raise UsageError(
            "the files contain no Sudokus, or Sudokus of several sizes",
            got=", ".join(map(str, paths))[:200] or "no file",
            try_="lines of 81 characters (or all of 16): digits, and . for a blank",
        )
    puzzles = np.stack(all_cells)
    solutions = solve(to_candidates(puzzles), max_solutions=2)
    is_unique = np.array([len(grids) == 1 for grids in solutions])
    if not is_unique.any():
        raise UsageError("no Sudoku has exactly one solution", got=f"{len(puzzles)} Sudokus", try_="other data")
    notes = [f"read and solved {len(puzzles):,} Sudokus"]
    if not is_unique.all():
        examples = ", ".join(text for text, unique in zip(texts, is_unique, strict=True) if not unique)
        notes.append(f"skipped {int((~is_unique).sum()):,} without exactly one solution: {examples[:200]}")
    grids = np.concatenate([grids for grids in solutions if len(grids) == 1])
    return puzzles[is_unique], grids, notes


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
        raise WhetError("cannot read the data", got=f"{path}: {error}", try_="another file") from None


def _generate(config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    number = config.num_generated
    if config.size == 4:
        # Split the 288 grids, not the puzzles, so that no held-out solution is used for training.
        grids = all_grids_4x4(rng)
        train, others = grids[:TRAIN_GRIDS_4X4], grids[TRAIN_GRIDS_4X4:]
        held_out = others[rng.integers(len(others), size=2 * NUM_HELD_OUT)]
        solutions = np.concatenate([np.resize(train, (number, 16)), held_out])
    else:
        solutions = random_grids_9x9(number + 2 * NUM_HELD_OUT, rng)
    puzzles = remove_cells(solutions, config.blanks, rng)
    held_out_rows = np.arange(number, number + 2 * NUM_HELD_OUT)
    return _sudoku_data(puzzles, solutions, np.split(held_out_rows, 2), config, rng)


def _from_files(paths: Sequence[Path], config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    puzzles, solutions, notes = read_sudokus([f for f in files if f.suffix.lower() in _SUDOKU_SUFFIXES or f in paths])
    side = round(puzzles.shape[1] ** 0.5)
    if side == 4 and config.augment:
        raise UsageError(
            "augmented 4x4 grids would include held-out ones: there are only 288",
            got=f"augment={config.augment}",
            try_="augment=0",
        )
    # Shuffle, then make equal solutions adjacent, so that no solution is in two splits.
    order = rng.permutation(len(puzzles))
    order = order[_grouped_by_solution(solutions[order])]
    number = _num_held_out(len(puzzles), config)
    # The option limits only the training puzzles, so add the held-out ones.
    if config.puzzles != "auto":
        order = order[: config.puzzles + 2 * number]
    puzzles, solutions = puzzles[order], solutions[order]
    return _sudoku_data(puzzles, solutions, _held_out_rows(solutions, number), config, rng, notes=tuple(notes))


def _grouped_by_solution(solutions: np.ndarray) -> np.ndarray:
    """Return a stable order, as indices, in which Sudokus with the same solution are adjacent."""
    _, first, grid = np.unique(solutions, axis=0, return_index=True, return_inverse=True)
    order: np.ndarray = np.argsort(first[grid.reshape(-1)], kind="stable")
    return order


def _held_out_rows(solutions: np.ndarray, number: int) -> list[np.ndarray]:
    """Return the indices of about `number` rows at the end for val, and of as many for test.

    Equal solutions must be adjacent. Each is in only one split.
    """
    is_first = np.ones(len(solutions), bool)
    is_first[1:] = (solutions[1:] != solutions[:-1]).any(1)
    starts = np.flatnonzero(is_first)
    # Move both boundaries back to the first row of a solution, so that no solution is in two splits.
    begin, middle = (int(starts[starts <= len(solutions) - held_out].max()) for held_out in (2 * number, number))
    if middle == begin:
        begin = int(starts[starts < middle].max(initial=0))
    if not begin:
        raise UsageError(
            "too few grids to hold some out",
            got=f"{len(starts)} different solutions",
            try_="Sudokus with other solutions",
        )
    return [np.arange(begin, middle), np.arange(middle, len(solutions))]


def _sudoku_data(
    puzzles: np.ndarray,
    solutions: np.ndarray,
    held_out: list[np.ndarray],
    config: PuzzleConfig,
    rng: np.random.Generator,
    *,
    notes: tuple[str, ...] = (),
) -> PuzzleData:
    """Augment the training split and convert cells to tokens: 0 is padding, 1 a blank, and k + 1 the digit k."""
    both = np.stack([puzzles, solutions])
    # All rows before the first held-out row are training rows.
    train = both[:, : held_out[0][0]]
    # Augment only the training puzzles. A puzzle and its solution get the same symmetry.
    train = np.concatenate([train, *(shuffle_grids(train, rng) for _ in range(config.augment))], axis=1)
    splits = [train, *(both[:, rows] for rows in held_out)]
    train_columns, val, test = (
        _columns(inputs + 1, labels + 1, np.zeros(len(inputs), np.int32)) for inputs, labels in splits
    )
    side = round(puzzles.shape[1] ** 0.5)
    sizes = Sizes(num_tokens=side + 2, length=side**2, num_puzzles=1)
    return PuzzleData(train=train_columns, val=val, test=test, sizes=sizes, is_sudoku=True, notes=notes)


def _num_held_out(number: int, config: PuzzleConfig) -> int:
    """Return the number of val rows, which is also the number of test rows. Raise UsageError if it is 0."""
    held_out = min(config.eval_puzzles, number // _HELD_OUT_DIVISOR)
    if not held_out:
        raise UsageError(
            "too few puzzles to hold some out", got=f"{number} puzzles", try_=f"{_HELD_OUT_DIVISOR} or more"
        )
    return held_out


def _columns(inputs: np.ndarray, labels: np.ndarray, puzzles: np.ndarray) -> dict[str, Tensor]:
    return {
        "inputs": torch.from_numpy(inputs.astype(np.int16)),
        "labels": torch.from_numpy(labels.astype(np.int16)),
        "puzzles": torch.from_numpy(puzzles),
    }


# --- folders of the official implementation ---------------------------------------------------------------------------


Rows = dict[str, np.ndarray]
"""Rows of an official dataset, with the columns inputs, labels, puzzles (index of the embedding) and groups.

The rows of a group are augmented copies of the same original.
"""


def _at(rows: Rows, selected: np.ndarray) -> Rows:
    return {name: column[selected] for name, column in rows.items()}


def is_official(folder: Path) -> bool:
    """Return whether a folder has the format of the official implementation."""
    return (folder / "train" / "dataset.json").is_file()


def _from_official(folder: Path, config: PuzzleConfig, rng: np.random.Generator) -> PuzzleData:
    if config.augment:
        raise UsageError("the folder has its own augmentation", got=f"augment={config.augment}", try_="augment=0")
    train, test, sizes = read_official(folder)
    arc: ArcTasks | None = None
    notes: tuple[str, ...] = ()
    if test is None or len(test["groups"]) < 2:
        # Hold out whole groups, so that a held-out puzzle has no augmented copy in the training split.
        groups = rng.permutation(int(train["groups"].max(initial=0)) + 1)
        number = _num_held_out(len(groups), config)
        is_val, is_test = (np.isin(train["groups"], some) for some in (groups[:number], groups[number : 2 * number]))
        splits = [_at(train, ~is_val & ~is_test), _at(train, is_val), _at(train, is_test)]
    elif (arc := _read_tasks(folder, sizes)) is not None and len(np.unique(test["groups"])) > 1:
        # Keep all copies of a task in one split, because they vote together.
        parts = [_first_copies(_at(test, test["groups"] % 2 == half), config.eval_puzzles) for half in (0, 1)]
        splits = [train, *parts]
        notes = _copies_notes(test, parts)
    else:
        rows = np.arange(len(test["groups"]))
        splits = [train, *(_at(test, rows[half::2][: config.eval_puzzles]) for half in (0, 1))]
    if config.puzzles != "auto":
        splits[0] = _at(splits[0], np.sort(rng.permutation(len(splits[0]["groups"]))[: config.puzzles]))
    columns = [_columns(split["inputs"], split["labels"], split["puzzles"]) for split in splits]
    is_sudoku = sizes.num_puzzles == 1 and sizes.num_tokens - 2 == _SIDE_OF_LENGTH.get(sizes.length)
    return PuzzleData(
        train=columns[0], val=columns[1], test=columns[2], sizes=sizes, is_sudoku=is_sudoku, arc=arc, notes=notes
    )


def _read_tasks(folder: Path, sizes: Sizes) -> ArcTasks | None:
    try:
        tasks = ArcTasks.read(folder)
    except (OSError, ValueError, KeyError, TypeError, UsageError) as error:
        raise _folder_error(folder, f"{type(error).__name__}: {error}") from None
    if tasks is not None and len(tasks.names) < sizes.num_puzzles:
        raise _folder_error(folder, f"{len(tasks.names)} names in identifiers.json for {sizes.num_puzzles} puzzles")
    return tasks


def _first_copies(rows: Rows, limit: int) -> Rows:
    """Return at most `limit` rows: the first N copies of every group, starting with the original, for the same N."""
    puzzles, groups = rows["puzzles"], rows["groups"]
    is_next = np.ones(len(groups), bool)
    is_next[1:] = (puzzles[1:] != puzzles[:-1]) | (groups[1:] != groups[:-1])
    copies = is_next.cumsum()
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    copies -= copies[first][group]
    # Number of rows that remain if the copies 0 to i of every group are kept.
    sizes = np.bincount(copies).cumsum()
    num_copies = max(1, int((sizes <= limit).sum()))
    return _at(rows, np.flatnonzero(copies < num_copies)[:limit])


def _copies_notes(test: Rows, parts: list[Rows]) -> tuple[str, ...]:
    """Return a note if only some of the test rows are used for voting."""
    groups = test["groups"]
    used = sum(len(part["groups"]) for part in parts)
    if used == len(groups):
        return ()
    needed = max(int((groups % 2 == half).sum()) for half in (0, 1))
    return (f"{used:,} of {len(groups):,} test rows vote in evaluations; eval_puzzles={needed} has all",)


def read_official(folder: Path) -> tuple[Rows, Rows | None, Sizes]:
    """Read a folder in the official format. Return the training rows, the test rows or None, and the model sizes.

    Every row has the same weight, which differs from the official implementation.
    """
    train, sizes = _read_split(folder / "train")
    if not (folder / "test" / "dataset.json").is_file():
        return train, None, sizes
    test, test_sizes = _read_split(folder / "test")
    if test_sizes.length != sizes.length:
        raise _folder_error(folder, f"length {test_sizes.length} in test and {sizes.length} in train")
    sizes = Sizes(
        num_tokens=max(sizes.num_tokens, test_sizes.num_tokens),
        length=sizes.length,
        num_puzzles=max(sizes.num_puzzles, test_sizes.num_puzzles),
    )
    return train, test, sizes


def _read_split(folder: Path) -> tuple[Rows, Sizes]:
    try:
        info = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        sizes = Sizes(num_tokens=info["vocab_size"], length=info["seq_len"], num_puzzles=info["num_puzzle_identifiers"])
        sets = [_read_set(folder, name, sizes, info.get("ignore_label_id")) for name in info["sets"]]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise _folder_error(folder, f"{type(error).__name__}: {error}") from None
    # Group numbers start from 0 in each set.
    first = 0
    for part in sets:
        part["groups"] += first
        first = int(part["groups"].max(initial=first - 1)) + 1
    return {name: np.concatenate([part[name] for part in sets]) for name in sets[0]}, sizes


def _read_set(folder: Path, name: str, sizes: Sizes, ignored: int | None) -> Rows:
    if Path(name).name != name:
        raise ValueError(f"the set {name!r} is outside the folder")

    def load(what: str) -> np.ndarray:
        array: np.ndarray = np.load(folder / f"{name}__{what}.npy", mmap_mode="r", allow_pickle=False)
        return array

    inputs, labels = load("inputs"), load("labels")
    puzzle_starts, group_starts = np.asarray(load("puzzle_indices"), int), np.asarray(load("group_indices"), int)
    puzzles = np.repeat(np.asarray(load("puzzle_identifiers"), np.int32), np.diff(puzzle_starts))
    groups = np.repeat(np.repeat(np.arange(len(group_starts) - 1), np.diff(group_starts)), np.diff(puzzle_starts))
    shape = (len(puzzles), sizes.length)
    if inputs.shape != shape or labels.shape != shape or len(groups) != len(puzzles):
        raise ValueError(f"inputs {inputs.shape} and labels {labels.shape}, but the indices imply {shape}")
    if sizes.num_tokens > _MAX_TOKENS:
        raise ValueError(f"a vocabulary of {sizes.num_tokens}, at most {_MAX_TOKENS}")
    labels = np.asarray(labels)
    if ignored is not None:
        # Convert to a wider type first: the ARC builder writes uint8, which cannot represent IGNORED_LABEL.
        labels = np.where(labels == ignored, IGNORED_LABEL, labels.astype(np.int32))
    for what, tokens in (("inputs", inputs), ("labels", np.where(labels == IGNORED_LABEL, 0, labels))):
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < sizes.num_tokens):
            raise ValueError(f"{what} have tokens outside 0 to {sizes.num_tokens - 1}")
    if len(puzzles) and not (int(puzzles.min()) >= 0 and int(puzzles.max()) < sizes.num_puzzles):
        raise ValueError(f"puzzle identifiers outside 0 to {sizes.num_puzzles - 1}")
    return {
        "inputs": inputs.astype(np.int16),
        "labels": labels.astype(np.int16),
        "puzzles": puzzles,
        "groups": groups,
    }


def _folder_error(folder: Path, problem: str) -> WhetError:
    return WhetError("the folder's puzzles are invalid", got=f"{folder}: {problem}"[:300], try_="build it again")
