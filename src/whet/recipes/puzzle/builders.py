"""Build puzzle folders in the official format from Sudoku and maze CSV files and from ARC JSON files.

With the same input and seed, the arrays equal those of the official builders: random numbers are drawn in the same
order from NumPy's legacy generator. The official ARC builder uses the seed 42, and those of Sudokus and mazes set none.
This module does not import torch.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from whet.base.errors import UsageError
from whet.run import durable

Kind = Literal["sudoku", "maze", "arc"]
Grid = np.ndarray
Pair = tuple[Grid, Grid]
ARC_SIDE = 30
ARC_SEPARATOR = "|||"
MAZE_CHARACTERS = "# SGo"
_ARC_RETRIES = 5
_SPLITS = ("train", "test")
_INVERSE_DIHEDRAL = (0, 3, 2, 1, 4, 5, 6, 7)
_DIHEDRAL: tuple[Callable[[Grid], Grid], ...] = (
    lambda grid: grid,
    lambda grid: np.rot90(grid, k=1),
    lambda grid: np.rot90(grid, k=2),
    lambda grid: np.rot90(grid, k=3),
    np.fliplr,
    np.flipud,
    lambda grid: grid.T,
    lambda grid: np.fliplr(np.rot90(grid, k=1)),
)
"""The eight symmetries of a square, in the order of the official implementation."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options for selecting and augmenting puzzles."""

    augment: int | None = None
    """Number of augmented copies of each training puzzle, or None for the default: 1000 for ARC, otherwise 0.

    Mazes have at most 7, because a square has 8 symmetries.
    """
    subsample: int | None = None
    """Number of training puzzles to keep, or None for all. Not used for ARC."""
    min_difficulty: int | None = None
    """Minimum value of the column `rating`, or None for no limit. Not used for ARC."""
    seed: int = 42


@dataclass(kw_only=True)
class _Split:
    """Rows of a split. The rows of a puzzle are consecutive, and so are the puzzles of a group."""

    inputs: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    identifiers: list[int] = field(default_factory=list)
    puzzle_ends: list[int] = field(default_factory=lambda: [0])
    group_ends: list[int] = field(default_factory=lambda: [0])

    def add_puzzle(self, pairs: Sequence[Pair], identifier: int = 0) -> None:
        for one, two in pairs:
            self.inputs.append(one.reshape(-1))
            self.labels.append(two.reshape(-1))
        self.identifiers.append(identifier)
        self.puzzle_ends.append(len(self.inputs))

    def end_group(self) -> None:
        self.group_ends.append(len(self.identifiers))


@dataclass(frozen=True, kw_only=True)
class _Built:
    """The splits and names of a dataset before it is written."""

    splits: dict[str, _Split]
    num_tokens: int
    names: list[str]
    """Name of each puzzle embedding. The first one is `<blank>`."""
    test_puzzles: dict[str, Any] | None = None


def build_folder(source: Path, out: Path, options: BuildOptions) -> dict[str, Any]:
    """Build the folder `out` atomically, and return a summary."""
    if out.exists():
        raise UsageError("the folder already exists", got=str(out), try_="another --out DIR")
    rng = np.random.RandomState(options.seed)
    kind, built = _build(source, options, rng)
    durable.make_directory(out.absolute().parent)
    durable.publish_directory(out.absolute(), fill=lambda draft: _write(draft, built, kind=kind))
    return {
        "kind": kind,
        **{f"{name}_examples": len(part.inputs) for name, part in built.splits.items()},
        **{f"{name}_groups": len(part.group_ends) - 1 for name, part in built.splits.items()},
        "puzzle_vectors": len(built.names),
    }


def _build(source: Path, options: BuildOptions, rng: np.random.RandomState) -> tuple[Kind, _Built]:
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    challenges = [file for file in files if file.name.endswith("_challenges.json")]
    if challenges:
        return "arc", _build_arc(challenges, options, rng)
    tables = {file.stem: file for file in files if file.suffix == ".csv" and file.stem in _SPLITS}
    if source.is_file() and source.suffix == ".csv":
        tables = {"train": source}
    if "train" not in tables:
        raise UsageError(
            "no puzzles to build from",
            got=str(source),
            try_="train.csv and test.csv with the columns question and answer, or ARC files *_challenges.json",
        )
    rows = {name: _read_csv(file, options) for name, file in tables.items()}
    first = rows["train"][0][0]
    if set(first) <= set("0123456789."):
        return "sudoku", _build_sudoku(rows, options, rng)
    return "maze", _build_maze(rows, options, rng)


def _read_csv(path: Path, options: BuildOptions) -> list[tuple[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        if not {"question", "answer"} <= set(columns):
            raise UsageError(f"{path} lacks columns", got=", ".join(columns), try_="question and answer")
        limit = options.min_difficulty
        if limit is not None and "rating" not in columns:
            got = f"{', '.join(columns)}, and --min-difficulty {limit}"
            raise UsageError(f"{path} lacks the column rating", got=got, try_="no --min-difficulty")
        rows = [(row["question"], row["answer"]) for row in reader if limit is None or int(row["rating"] or 0) >= limit]
    for number, (question, answer) in enumerate(rows, start=2):
        if not len(question) == len(answer) == len(rows[0][0]) or round(len(question) ** 0.5) ** 2 != len(question):
            raise UsageError(
                f"row {number} of {path} is not a square grid, or of another size than the first",
                got=f"{len(question)} and {len(answer)} characters",
                try_="grids of one size",
            )
    if not rows:
        raise UsageError(f"{path} has no puzzles", got="no rows", try_="another file, or no --min-difficulty")
    return rows


def _to_grid(text: str) -> Grid:
    side = round(len(text) ** 0.5)
    return np.frombuffer(text.encode("latin-1"), dtype=np.uint8).reshape(side, side)


def _subsample(rows: list[tuple[str, str]], options: BuildOptions, rng: np.random.RandomState) -> list[tuple[str, str]]:
    if options.subsample is None or options.subsample >= len(rows):
        return rows
    return [rows[index] for index in rng.choice(len(rows), size=options.subsample, replace=False)]


# --- Sudoku and mazes -------------------------------------------------------------------------------------------------


def _build_sudoku(rows: dict[str, list[tuple[str, str]]], options: BuildOptions, rng: np.random.RandomState) -> _Built:
    splits = {}
    for name, texts in rows.items():
        split = splits[name] = _Split()
        is_train = name == "train"
        for question, answer in _subsample(texts, options, rng) if is_train else texts:
            pair = _to_grid(question.replace(".", "0")) - ord("0"), _to_grid(answer.replace(".", "0")) - ord("0")
            for copy in range(1 + (options.augment or 0 if is_train else 0)):
                shuffled = pair if copy == 0 else _shuffle_sudoku(pair, rng)
                split.add_puzzle([(shuffled[0] + 1, shuffled[1] + 1)])
            split.end_group()
    side = round(splits["train"].inputs[0].size ** 0.5)
    return _Built(splits=splits, num_tokens=side + 2, names=["<blank>"])


def _shuffle_sudoku(pair: Pair, rng: np.random.RandomState) -> Pair:
    """Apply a random symmetry: rename digits, maybe transpose, and permute bands, rows, stacks and columns.

    Random numbers are drawn in the order of the official implementation.
    """
    side = len(pair[0])
    box = round(side**0.5)
    digits = np.pad(rng.permutation(np.arange(1, side + 1)), (1, 0))
    is_transposed = rng.rand() < 0.5
    rows = np.concatenate([band * box + rng.permutation(box) for band in rng.permutation(box)])
    columns = np.concatenate([stack * box + rng.permutation(box) for stack in rng.permutation(box)])

    def shuffle(grid: Grid) -> Grid:
        turned = grid.T if is_transposed else grid
        return digits[turned[np.ix_(rows, columns)]]

    return shuffle(pair[0]), shuffle(pair[1])


def _build_maze(rows: dict[str, list[tuple[str, str]]], options: BuildOptions, rng: np.random.RandomState) -> _Built:
    unknown = {char for texts in rows.values() for pair in texts for char in "".join(pair)} - set(MAZE_CHARACTERS)
    if unknown:
        raise UsageError("unknown characters in a maze", got=repr("".join(sorted(unknown))[:40]), try_="# SGo")
    tokens = np.zeros(256, np.uint8)
    tokens[[ord(char) for char in MAZE_CHARACTERS]] = np.arange(len(MAZE_CHARACTERS)) + 1
    splits = {}
    for name, texts in rows.items():
        split = splits[name] = _Split()
        is_train = name == "train"
        for question, answer in _subsample(texts, options, rng) if is_train else texts:
            for symmetry in _DIHEDRAL[: 1 + (options.augment or 0 if is_train else 0)]:
                split.add_puzzle([(symmetry(tokens[_to_grid(question)]), symmetry(tokens[_to_grid(answer)]))])
            split.end_group()
    return _Built(splits=splits, num_tokens=len(MAZE_CHARACTERS) + 1, names=["<blank>"])


# --- ARC --------------------------------------------------------------------------------------------------------------


def _build_arc(challenges: list[Path], options: BuildOptions, rng: np.random.RandomState) -> _Built:
    """Build ARC puzzles. The test pairs of evaluation tasks are the test split, and all other pairs the train split."""
    augment = 1000 if options.augment is None else options.augment
    groups: dict[str, list[list[tuple[str, list[Pair]]]]] = {}
    test_puzzles: dict[str, Any] = {}
    # Read the training tasks first, because the official commands list the subsets in this order.
    for path in sorted(challenges, key=lambda path: ("training" not in path.name, path.name)):
        is_held_out = "evaluation" in path.name or len(challenges) == 1
        tasks = list(_read_tasks(path).items())
        rng.shuffle(tasks)
        for name, task in tasks:
            if is_held_out:
                test_puzzles[name] = task
            copies = _augmented(name, task, augment=augment, is_held_out=is_held_out, rng=rng)
            for split in _arc_splits(is_held_out=is_held_out):
                groups.setdefault(split, []).append([(copy_name, pairs[split]) for copy_name, pairs in copies])
    numbers: dict[str, int] = {}
    for split_groups in groups.values():
        for group in split_groups:
            for name, _ in group:
                numbers.setdefault(name, len(numbers) + 1)
    splits: dict[str, _Split] = {}
    for split_name, split_groups in groups.items():
        rows = splits[split_name] = _Split()
        for group in split_groups:
            for name, pairs in group:
                in_place = rng.randint(0, len(pairs))
                placed = [
                    _place(pair, is_moved=split_name == "train" and index != in_place, rng=rng)
                    for index, pair in enumerate(pairs)
                ]
                rows.add_puzzle(placed, numbers[name])
            rows.end_group()
    return _Built(splits=splits, num_tokens=12, names=["<blank>", *numbers], test_puzzles=test_puzzles)


def _arc_splits(*, is_held_out: bool) -> tuple[str, ...]:
    return ("train", "test") if is_held_out else ("train",)


def _read_tasks(path: Path) -> dict[str, Any]:
    tasks: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    solved = path.with_name(path.name.replace("_challenges.json", "_solutions.json"))
    if solved.is_file():
        for name, grids in json.loads(solved.read_text(encoding="utf-8")).items():
            for index, grid in enumerate(grids):
                tasks[name]["test"][index]["output"] = grid
    for task in tasks.values():
        for example in task["test"]:
            example.setdefault("output", [[0]])
    return tasks


def arc_grid(cells: list[list[int]]) -> Grid:
    """Convert an ARC grid to a uint8 array. Raise UsageError if it is not valid."""
    grid = np.array(cells)
    if grid.ndim != 2 or max(grid.shape) > ARC_SIDE or grid.min() < 0 or grid.max() > 9:
        raise UsageError(
            "not an ARC grid", got=str(cells)[:80], try_=f"rows of colors 0 to 9, at most {ARC_SIDE} by {ARC_SIDE}"
        )
    return grid.astype(np.uint8)


def _augmented(
    name: str, task: dict[str, Any], *, augment: int, is_held_out: bool, rng: np.random.RandomState
) -> list[tuple[str, dict[str, list[Pair]]]]:
    """Return the task and up to `augment` distinct augmented copies. Their names describe the augmentation."""
    original: dict[str, list[Pair]] = {split: [] for split in _arc_splits(is_held_out=is_held_out)}
    for part, examples in task.items():
        destination = "test" if part == "test" and is_held_out else "train"
        original[destination] += [(arc_grid(one["input"]), arc_grid(one["output"])) for one in examples]
    copies = [(name, original)]
    seen = {_task_hash(original)}
    for _ in range(_ARC_RETRIES * augment):
        symmetry = int(rng.randint(0, 8))
        colors = np.concatenate([np.arange(0, 1, dtype=np.uint8), rng.permutation(np.arange(1, 10, dtype=np.uint8))])
        copy = {
            split: [tuple(_DIHEDRAL[symmetry](colors[grid]) for grid in pair) for pair in pairs]
            for split, pairs in original.items()
        }
        key = _task_hash(copy)  # type: ignore[arg-type]
        if key not in seen:
            seen.add(key)
            written = "".join(map(str, colors))
            copies.append((f"{name}{ARC_SEPARATOR}t{symmetry}{ARC_SEPARATOR}{written}", copy))  # type: ignore[arg-type]
        if len(copies) > augment:
            break
    return copies


def inverse_augmentation(name: str) -> tuple[str, Callable[[Grid], Grid]]:
    """Return the original name of an augmented task, and a function that undoes the augmentation of a grid."""
    original, *how = name.split(ARC_SEPARATOR)
    if not how:
        return name, lambda grid: grid
    symmetry, colors = int(how[-2][1:]), np.argsort(list(how[-1])).astype(np.uint8)
    return original, lambda grid: colors[_DIHEDRAL[_INVERSE_DIHEDRAL[symmetry]](grid)]


def grid_hash(grid: Grid) -> str:
    """Return a SHA-256 hash of the shape and the cells of a uint8 grid."""
    return hashlib.sha256(bytes(grid.shape) + grid.tobytes()).hexdigest()


def _task_hash(pairs: dict[str, list[Pair]]) -> str:
    hashes = sorted(f"{grid_hash(one)}|{grid_hash(two)}" for part in pairs.values() for one, two in part)
    return hashlib.sha256("|".join(hashes).encode()).hexdigest()


def _place(pair: Pair, *, is_moved: bool, rng: np.random.RandomState) -> Pair:
    """Place both grids on canvases at the same random offset if `is_moved`, else at the top left.

    Token 0 is padding, 1 marks the ends of rows and columns, and k + 2 is the color k.
    """
    top, left = 0, 0
    if is_moved:
        heights, widths = zip(*(grid.shape for grid in pair), strict=True)
        top = int(rng.randint(0, ARC_SIDE - max(heights) + 1))
        left = int(rng.randint(0, ARC_SIDE - max(widths) + 1))
    placed = []
    for grid in pair:
        canvas = np.zeros((ARC_SIDE, ARC_SIDE), np.uint8)
        bottom, right = top + grid.shape[0], left + grid.shape[1]
        canvas[top:bottom, left:right] = grid + 2
        if bottom < ARC_SIDE:
            canvas[bottom, left:right] = 1
        if right < ARC_SIDE:
            canvas[top:bottom, right] = 1
        placed.append(canvas)
    return placed[0], placed[1]


# --- files ------------------------------------------------------------------------------------------------------------


def _write(folder: Path, built: _Built, *, kind: Kind) -> None:
    for name, split in built.splits.items():
        (folder / name).mkdir()
        # Count like the official builders: for mazes and Sudokus, they report one puzzle with one example per group.
        num_puzzles = len(split.identifiers) if kind == "arc" else len(split.group_ends) - 1
        info = {
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "vocab_size": built.num_tokens,
            "seq_len": split.inputs[0].size,
            "num_puzzle_identifiers": len(built.names),
            "total_groups": len(split.group_ends) - 1,
            "mean_puzzle_examples": len(split.inputs) / num_puzzles if kind == "arc" else 1.0,
            "total_puzzles": num_puzzles,
            "sets": ["all"],
        }
        _write_json(folder / name / "dataset.json", info)
        arrays = {
            "inputs": np.stack(split.inputs),
            "labels": np.stack(split.labels),
            "puzzle_identifiers": np.array(split.identifiers, np.int32),
            "puzzle_indices": np.array(split.puzzle_ends, np.int32),
            "group_indices": np.array(split.group_ends, np.int32),
        }
        for what, array in arrays.items():
            np.save(folder / name / f"all__{what}.npy", array)
    _write_json(folder / "identifiers.json", built.names)
    if built.test_puzzles is not None:
        _write_json(folder / "test_puzzles.json", built.test_puzzles)
    # NumPy does not sync the files that it writes.
    durable.sync_files(folder)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def summary_lines(summary: dict[str, Any], out: Path) -> Iterator[str]:
    """Format the summary of a build as lines for the terminal."""
    counts = ", ".join(
        f"{name} {summary[f'{name}_examples']:,} examples of {summary[f'{name}_groups']:,} puzzles"
        for name in _SPLITS
        if f"{name}_examples" in summary
    )
    yield f"built     {summary['kind']}: {counts}; {summary['puzzle_vectors']:,} puzzle vectors"
    yield f"folder    {out}; whet train puzzle data={out} trains on it"
