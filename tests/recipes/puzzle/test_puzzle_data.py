"""Puzzle data: generated, from files, or from a folder of the official implementation."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from whet.base.errors import WhetError
from whet.config.resolve import resolve_config
from whet.recipes.puzzle.config import PuzzleConfig, Sizes, count_parameters
from whet.recipes.puzzle.data import PuzzleData, parse_sudoku, read_data
from whet.recipes.puzzle.recipe import PuzzleRecipe, make_model
from whet.recipes.puzzle.sudoku import (
    all_grids_4x4,
    random_grids_9x9,
    remove_cells,
    shuffle_grids,
    solve,
    to_candidates,
)

pytestmark = pytest.mark.torch

EASY = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
SOLVED = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def data_of(*words: str) -> PuzzleData:
    return read_data(resolve_config(PuzzleConfig, words).config)


def assert_proper(data: PuzzleData, *, most_blanks: int) -> None:
    """Assert that the label of every puzzle is its only solution."""
    for part in (data.train, data.val, data.test):
        puzzles, labels = (part[name].numpy().astype(np.int8) - 1 for name in ("inputs", "labels"))
        assert ((puzzles == labels) | (puzzles == 0)).all()
        assert int((puzzles == 0).sum(1).max()) <= most_blanks
        for solutions, label in zip(solve(to_candidates(puzzles), max_solutions=2), labels, strict=True):
            assert len(solutions) == 1
            assert (solutions[0] == label).all()


def test_the_solver_finds_all_solutions() -> None:
    puzzle = parse_sudoku(EASY)
    assert puzzle is not None
    (solutions,) = solve(to_candidates(puzzle[None]), max_solutions=5)
    assert ["".join(map(str, grid)) for grid in solutions] == [SOLVED]
    grids = all_grids_4x4(np.random.default_rng(0))
    assert len({grid.tobytes() for grid in grids}) == 288
    contradictory = puzzle.copy()
    contradictory[2] = 5
    # Two cells can be swapped: exactly two solutions.
    two = np.array([parse_sudoku(SOLVED)])
    pairs = [(r1, r2, c1, c2) for r1 in range(9) for r2 in range(r1) for c1 in range(9) for c2 in range(c1)]
    swap = next(
        (9 * a + c, 9 * a + d, 9 * b + c, 9 * b + d)
        for a, b, c, d in pairs
        if a // 3 == b // 3 and two[0, 9 * a + c] == two[0, 9 * b + d] and two[0, 9 * a + d] == two[0, 9 * b + c]
    )
    two[0, list(swap)] = 0
    counts = [
        len(result) for result in solve(to_candidates(np.concatenate([contradictory[None], two])), max_solutions=9)
    ]
    assert counts == [0, 2]


def test_4x4_holds_out_whole_grids_and_depends_on_the_seed_only() -> None:
    data = data_of("puzzles=400")
    assert_proper(data, most_blanks=10)
    seen, held = ({row.numpy().tobytes() for row in part["labels"]} for part in (data.train, data.val))
    assert len(seen) == 200
    assert not seen & held
    assert not seen & {row.numpy().tobytes() for row in data.test["labels"]}
    again, other = data_of("puzzles=400"), data_of("puzzles=400", "seed=1")
    assert all(torch.equal(data.train[name], again.train[name]) for name in data.train)
    assert not torch.equal(data.train["inputs"], other.train["inputs"])
    with pytest.raises(WhetError, match="only 288"):
        resolve_config(PuzzleConfig, ["augment=3"])


def test_9x9_puzzles_have_one_solution_with_and_without_augmentation() -> None:
    rng = np.random.default_rng(0)
    grids = random_grids_9x9(6, rng)
    puzzles = remove_cells(grids, 50, rng)
    both = shuffle_grids(np.stack([puzzles, grids]), rng)
    assert not (both[1] == grids).all(1).any()
    assert ((both[0] == 0).sum(1) == (puzzles == 0).sum(1)).all()
    for solutions, grid in zip(solve(to_candidates(both[0]), max_solutions=2), both[1], strict=True):
        assert len(solutions) == 1
        assert (solutions[0] == grid).all()
    # Over many draws, every cell moves to every position and every digit becomes every other.
    marked = np.zeros((4_000, 81), np.int8)
    marked[:, 0] = 1
    moved = shuffle_grids(marked, rng)
    assert len(np.unique(moved.argmax(1))) == 81
    assert len(np.unique(moved.max(1))) == 9


def test_text_and_csv_files_are_read_and_solved(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    grids = all_grids_4x4(rng)[:60]
    lines = ["".join(map(str, row)).replace("0", ".") for row in remove_cells(grids, 9, rng)]
    (tmp_path / "SOURCE.txt").write_text("from somewhere\n")
    (tmp_path / "a.txt").write_text("\n".join(lines[:30]) + "\n................\n" + lines[0] + "\n")
    (tmp_path / "b.csv").write_text("source,question,answer\n" + "\n".join(f"x,{line},?" for line in lines[30:]))
    data = data_of(f"data={tmp_path}", "global_batch_size=8")
    assert (len(data.train["inputs"]), len(data.val["inputs"]), len(data.test["inputs"])) == (48, 6, 6)
    assert_proper(data, most_blanks=9)
    assert "1 without exactly one solution" in " ".join(data.notes)
    (tmp_path / "a.txt").write_text("nothing here\n")
    (tmp_path / "b.csv").unlink()
    with pytest.raises(WhetError, match="no Sudokus"):
        data_of(f"data={tmp_path}")


def test_no_grid_is_in_two_splits(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grids = all_grids_4x4(rng)[:12]
    texts = {"".join(map(str, row)).replace("0", ".") for row in remove_cells(np.repeat(grids, 5, axis=0), 6, rng)}
    spelled = [text.replace(".", sign) for text in sorted(texts) for sign in "0._"]
    (tmp_path / "puzzles.TXT").write_text("\n".join(spelled))
    for wanted in ("auto", 20):
        data = data_of(f"data={tmp_path}", f"puzzles={wanted}")
        parts = [{tuple(row) for row in part["labels"].tolist()} for part in (data.train, data.val, data.test)]
        assert all(parts)
        assert not parts[0] & parts[1]
        assert not parts[0] & parts[2]
        assert not parts[1] & parts[2]
        assert len(data.train["inputs"]) <= (len(texts) if wanted == "auto" else wanted)
    of_one = remove_cells(np.repeat(grids[:1], 40, axis=0), 6, rng)
    (tmp_path / "puzzles.TXT").write_text("\n".join("".join(map(str, row)) for row in of_one))
    with pytest.raises(WhetError, match="too few grids"):
        data_of(f"data={tmp_path}")


def test_real_sudokus_are_read(tmp_path: Path) -> None:
    folder = os.environ.get("WHET_TEST_DATA")
    if folder is None or not (Path(folder) / "sudoku-norvig").is_dir():
        pytest.skip("WHET_TEST_DATA names no folder with sudoku-norvig/")
    lines = (Path(folder) / "sudoku-norvig" / "sudoku10k.txt").read_text().splitlines()[:300]
    (tmp_path / "some.txt").write_text("\n".join(lines))
    data = data_of(f"data={tmp_path}/some.txt", "augment=1")
    assert len(data.train["inputs"]) == 2 * (300 - 2 * 30)
    assert data.sizes == Sizes(num_tokens=11, length=81, num_puzzles=1)


def official(folder: Path, *, examples: int, identifiers: int = 5) -> None:
    """Write groups of two puzzles; every second puzzle has two examples."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    counts = [1 + index % 2 for index in range(examples)]
    arrays = {
        "inputs": rng.integers(1, 7, (sum(counts), 10)).astype(np.uint8),
        "labels": rng.integers(0, 7, (sum(counts), 10)).astype(np.int64),
        "puzzle_identifiers": (np.arange(examples) % identifiers).astype(np.int32),
        "puzzle_indices": np.cumsum([0, *counts]),
        "group_indices": np.arange(0, examples + 1, 2),
    }
    for name, array in arrays.items():
        np.save(folder / f"all__{name}.npy", array)
    about = {
        "vocab_size": 7, "seq_len": 10, "num_puzzle_identifiers": identifiers, "ignore_label_id": 0, "sets": ["all"],
        "pad_id": 0, "blank_identifier_id": 0,
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(about))


def test_an_official_folder_is_read(tmp_path: Path) -> None:
    official(tmp_path / "train", examples=40)
    data = data_of(f"data={tmp_path}", "global_batch_size=8")
    assert data.sizes == Sizes(num_tokens=7, length=10, num_puzzles=5)
    assert sum(len(part["inputs"]) for part in (data.train, data.val, data.test)) == 60
    assert set(data.train["labels"].unique().tolist()) == {-100, *range(1, 7)}
    rows = {part["inputs"].numpy().tobytes()[:20] for part in (data.val, data.test)}
    assert len(rows) == 2, "whole groups are held back, each once"
    official(tmp_path / "test", examples=8)
    with_test = data_of(f"data={tmp_path}", "global_batch_size=8")
    assert (len(with_test.train["inputs"]), len(with_test.val["inputs"]), len(with_test.test["inputs"])) == (60, 6, 6)
    np.save(tmp_path / "train" / "all__puzzle_identifiers.npy", np.full(40, 5))
    with pytest.raises(WhetError, match="puzzle identifiers outside"):
        data_of(f"data={tmp_path}")
    (tmp_path / "train" / "all__inputs.npy").write_bytes(b"broken")
    with pytest.raises(WhetError, match="puzzles are invalid"):
        data_of(f"data={tmp_path}")


@pytest.mark.parametrize(
    ("words", "sizes", "expected"),
    [
        # The counts of the official models, with one embedding shared by all Sudokus.
        (("size=9", "arch.mlp_t=false"), (11, 81), 6_828_034 + 512),
        (("size=9",), (11, 81), 5_028_866 + 512),
        (("size=9", "arch.mlp_t=false"), (6, 900), 6_822_914 + 512),
        (("size=9",), (6, 900), 18_795_522 + 512),
        (("arch.pos_encodings=learned", "arch.mlp_t=false"), (6, 16), None),
    ],
)
def test_parameter_count_is_exact(words: tuple[str, ...], sizes: tuple[int, int], expected: int | None) -> None:
    config = resolve_config(PuzzleConfig, words).config
    asked = Sizes(num_tokens=sizes[0], length=sizes[1], num_puzzles=1)
    with torch.device("meta"):
        model = make_model(config, asked, num_slots=1)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(config.arch, asked) == counted
    assert expected in (None, counted)


def test_invalid_sizes_are_rejected() -> None:
    for words, what in (
        (["arch.mlp_t=false", "arch.num_heads=3"], "must be an even number"),
        (["arch.puzzle_emb_len=0", "arch.puzzle_emb_ndim=8"], "does not fit its positions"),
        (["dropout=0.1"], "dropout"),
    ):
        with pytest.raises(WhetError, match=what):
            resolve_config(PuzzleConfig, words)
    assert PuzzleRecipe().describe(resolve_config(PuzzleConfig, []).config).num_steps == 600
