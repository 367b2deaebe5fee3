"""Puzzles from disk: Sudokus as lines of text or rows of a table, and the folders of the official implementation."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from whet.base.errors import UsageError, WhetError
from whet.recipes.puzzle.config import Sizes
from whet.recipes.puzzle.loss import IGNORED
from whet.recipes.puzzle.solving import candidates_of, solve

_SIDES = {16: 4, 81: 9}
_MOST_TOKENS = 30_000
"""They are kept as int16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Puzzles as tokens, their solutions, which vector belongs to each, and which come from one original."""

    inputs: np.ndarray
    labels: np.ndarray
    puzzles: np.ndarray
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    def chosen(self, which: np.ndarray) -> "Rows":
        return Rows(
            inputs=self.inputs[which],
            labels=self.labels[which],
            puzzles=self.puzzles[which],
            groups=self.groups[which],
        )


# --- lines ------------------------------------------------------------------------------------------------------------


def cells_of(text: str) -> np.ndarray | None:
    """A Sudoku in one line: digits, and 0, . or _ for a blank; None where it is none.

    >>> cells_of("1...  ..2.".replace(" ", "")), cells_of("1... ..2. .3.. ...4".replace(" ", ""))[:4]
    (None, array([1, 0, 0, 0], dtype=int8))
    """
    side = _SIDES.get(len(text))
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
            cells = cells_of(text)
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


def read_official(folder: Path) -> tuple[Rows, Rows | None, Sizes]:
    """Training rows, test rows if there are any, and what a model must fit. Every example counts the same here."""
    train, sizes = _read_part(folder / "train")
    if not (folder / "test" / "dataset.json").is_file():
        return train, None, sizes
    test, test_sizes = _read_part(folder / "test")
    if test_sizes.length != sizes.length:
        raise _damaged(folder, f"length {test_sizes.length} in test and {sizes.length} in train")
    return (
        train,
        test,
        Sizes(
            num_tokens=max(sizes.num_tokens, test_sizes.num_tokens),
            length=sizes.length,
            num_puzzles=max(sizes.num_puzzles, test_sizes.num_puzzles),
        ),
    )


def _read_part(folder: Path) -> tuple[Rows, Sizes]:
    try:
        about = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
        sizes = Sizes(
            num_tokens=about["vocab_size"], length=about["seq_len"], num_puzzles=about["num_puzzle_identifiers"]
        )
        parts = [_read_set(folder, name, sizes, about.get("ignore_label_id")) for name in about["sets"]]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise _damaged(folder, f"{type(error).__name__}: {error}") from None
    starts = np.cumsum([0, *(int(part.groups.max(initial=-1)) + 1 for part in parts)])
    rows = Rows(
        inputs=np.concatenate([part.inputs for part in parts]),
        labels=np.concatenate([part.labels for part in parts]),
        puzzles=np.concatenate([part.puzzles for part in parts]),
        groups=np.concatenate([part.groups + start for part, start in zip(parts, starts, strict=False)]),
    )
    return rows, sizes


def _read_set(folder: Path, name: str, sizes: Sizes, ignored: int | None) -> Rows:
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
    if sizes.num_tokens > _MOST_TOKENS:
        raise ValueError(f"a vocabulary of {sizes.num_tokens}, at most {_MOST_TOKENS}")
    counted = np.where(np.asarray(labels) == ignored, IGNORED, labels) if ignored is not None else np.asarray(labels)
    for what, tokens in (("inputs", inputs), ("labels", np.where(counted == IGNORED, 0, counted))):
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < sizes.num_tokens):
            raise ValueError(f"{what} have tokens outside of 0 to {sizes.num_tokens - 1}")
    if len(puzzles) and not (int(puzzles.min()) >= 0 and int(puzzles.max()) < sizes.num_puzzles):
        raise ValueError(f"puzzle identifiers outside of 0 to {sizes.num_puzzles - 1}")
    return Rows(inputs=inputs.astype(np.int16), labels=counted.astype(np.int16), puzzles=puzzles, groups=groups)


def _damaged(folder: Path, problem: str) -> WhetError:
    return WhetError(
        "the folder does not hold puzzles as it says", got=f"{folder}: {problem}"[:300], try_="build it anew"
    )
