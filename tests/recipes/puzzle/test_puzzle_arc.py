"""ARC: augmented copies vote for the solution of their task, as in the official evaluator."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whet.base.errors import WhetError
from whet.config.resolve import resolve_config
from whet.recipes.puzzle.arc import ArcTasks, ArcVotes, crop
from whet.recipes.puzzle.builders import BuildOptions, build_folder
from whet.recipes.puzzle.config import PuzzleConfig

EVALUATED = ("one", "two", "three")


def grid(rng: np.random.Generator) -> list[list[int]]:
    cells: list[list[int]] = rng.integers(0, 10, rng.integers(1, 6, 2)).tolist()
    return cells


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three held-out tasks, the first with two test inputs, and four copies of each."""
    rng = np.random.default_rng(0)
    source = tmp_path / "arc"
    source.mkdir()
    for subset, names in (("training", ("four",)), ("evaluation", EVALUATED)):
        tasks = {
            name: {
                "train": [{"input": grid(rng), "output": grid(rng)} for _ in range(2)],
                "test": [{"input": grid(rng)} for _ in range(2 if name == "one" else 1)],
            }
            for name in names
        }
        solved = {name: [grid(rng) for _ in task["test"]] for name, task in tasks.items()}
        (source / f"arc_{subset}_challenges.json").write_text(json.dumps(tasks))
        (source / f"arc_{subset}_solutions.json").write_text(json.dumps(solved))
    build_folder(source, tmp_path / "built", BuildOptions(augment=3))
    return tmp_path / "built"


def test_rows(folder: Path) -> dict[str, np.ndarray]:
    """The test split: puzzles by row, inputs and labels."""
    arrays = {
        what: np.load(folder / "test" / f"all__{what}.npy")
        for what in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices")
    }
    arrays["puzzles"] = np.repeat(arrays["puzzle_identifiers"], np.diff(arrays["puzzle_indices"]))
    return arrays


test_rows.__test__ = False  # type: ignore[attr-defined]


def vote(folder: Path, predicted: np.ndarray, probabilities: list[float]) -> dict[str, float]:
    tasks = ArcTasks.read(folder)
    assert tasks is not None
    votes, rows = ArcVotes(tasks), test_rows(folder)
    votes.add(rows["puzzles"].tolist(), rows["inputs"], predicted, probabilities)
    return votes.metrics()


def test_right_predictions_of_all_copies_pass(folder: Path) -> None:
    rows = test_rows(folder)
    assert len(rows["puzzles"]) == (2 + 1 + 1) * 4
    metrics = vote(folder, rows["labels"], [0.5] * len(rows["labels"]))
    assert metrics == {f"pass@{k}": 1.0 for k in (1, 2, 5, 10, 100, 1000)}


def test_votes_count_before_probabilities_and_each_test_input_counts_its_share(folder: Path) -> None:
    rows = test_rows(folder)
    names = json.loads((folder / "identifiers.json").read_text())
    predicted, probabilities = rows["labels"].copy(), np.full(len(rows["labels"]), 0.1)
    tasks = np.array([names[puzzle].split("|||")[0] for puzzle in rows["puzzles"]])
    wrong = np.zeros(900, np.uint8)
    wrong[0] = 2
    # One wrong copy of four loses, although it is sure of itself.
    first_of_two = np.flatnonzero(tasks == "two")[0]
    predicted[first_of_two], probabilities[first_of_two] = wrong, 1.0
    # Two against two: the probability decides. The wrong solution is the same after any symmetry and has color 0.
    predicted[np.flatnonzero(tasks == "three")[:2]] = wrong
    probabilities[np.flatnonzero(tasks == "three")[:2]] = 0.2
    # One of the two test inputs of the task is wrong in all copies.
    predicted[np.flatnonzero(tasks == "one")[::2]] = wrong
    metrics = vote(folder, predicted, probabilities.tolist())
    assert metrics["pass@1"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert metrics["pass@2"] == metrics["pass@1000"] == pytest.approx((1 + 1 + 0.5) / 3)


def plain_crop(canvas: np.ndarray) -> np.ndarray:
    """The rule in words: try every height, and keep the first with the largest area."""
    best, size, width = 0, (0, 0), 30
    for height in range(1, 31):
        colors = [2 <= cell <= 11 for cell in canvas[height - 1, :width]]
        width = colors.index(False) if False in colors else width
        if height * width > best:
            best, size = height * width, (height, width)
    return (canvas[: size[0], : size[1]] - 2).astype(np.uint8)


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_rectangle_at_the_top_left_is_cropped(seed: int) -> None:
    rng = np.random.default_rng(seed)
    canvas = rng.integers(2, 12, (30, 30))
    canvas[rng.random((30, 30)) < rng.choice([0, 0.02, 0.3])] = rng.integers(0, 2)
    if seed == 0:
        canvas[:] = 0
    np.testing.assert_array_equal(crop(canvas.reshape(-1)), plain_crop(canvas))


@pytest.mark.torch
def test_copies_of_a_task_are_in_one_split_and_limited_alike(folder: Path) -> None:
    from whet.recipes.puzzle.data import read_data

    def read(*words: str) -> Any:
        return read_data(resolve_config(PuzzleConfig, [f"data={folder}", *words]).config)

    names = json.loads((folder / "identifiers.json").read_text())
    data = read()
    tasks = [{names[puzzle].split("|||")[0] for puzzle in part["puzzles"].tolist()} for part in (data.val, data.test)]
    assert not tasks[0] & tasks[1]
    assert tasks[0] | tasks[1] == set(EVALUATED)
    assert not data.notes
    limited = read("eval_puzzles=5")
    for part in (limited.val, limited.test):
        assert 0 < len(part["puzzles"]) <= 5
        copies = [names[puzzle].split("|||")[0] for puzzle in dict.fromkeys(part["puzzles"].tolist())]
        assert len({copies.count(task) for task in copies}) == 1
    (note,) = limited.notes
    assert "eval_puzzles=" in note
    (folder / "identifiers.json").write_text("[]")
    with pytest.raises(WhetError, match=r"folder's puzzles are invalid"):
        read()


@pytest.mark.torch
def test_evaluations_of_a_training_vote(folder: Path, tmp_path: Path) -> None:
    import whet
    from whet.run.events import read_events
    from whet.run.folder import open_run

    arch = {"hidden_size": 16, "num_heads": 2, "H_cycles": 1, "L_cycles": 1, "halt_max_steps": 2, "L_layers": 1}
    whet.train(
        "puzzle",
        data=str(folder),
        arch=arch | {"mlp_t": False, "puzzle_emb_len": 1},
        global_batch_size=4,
        max_steps=2,
        run=tmp_path / "run",
        device="cpu",
        measure=False,
    )
    evaluations = list(read_events(open_run(tmp_path / "run"), kinds=("eval",)))
    assert any("pass@2" in event.fields for event in evaluations)
    assert any("test_pass@2" in event.fields for event in evaluations)
