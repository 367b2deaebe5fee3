"""Folders in the official format, what is read of them, and checkpoints of the official code."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import whet
from whet.base.errors import UsageError
from whet.config.resolve import resolve_config
from whet.data.padding import IGNORED_LABEL
from whet.recipes.puzzle.builders import BuildOptions, arc_grid, build_folder, inverse_augmentation
from whet.recipes.puzzle.config import PuzzleConfig
from whet.recipes.puzzle.data import read_data
from whet.recipes.puzzle.model import official_name
from whet.recipes.puzzle.official import import_official
from whet.recipes.puzzle.recipe import make_model
from whet.run.folder import open_run

pytestmark = pytest.mark.torch

SOLVED = "1234341221434321"
SUDOKUS = [(SOLVED.replace(digit, "."), SOLVED) for digit in "1234"]


def write_csv(folder: Path, rows: list[tuple[str, str]]) -> Path:
    folder.mkdir()
    for name in ("train", "test"):
        lines = [f"made,{question},{answer},{number}" for number, (question, answer) in enumerate(rows)]
        (folder / f"{name}.csv").write_text("\n".join(["source,question,answer,rating", *lines]) + "\n")
    return folder


def write_arc(folder: Path) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)

    def grid() -> list[list[int]]:
        cells: list[list[int]] = rng.integers(0, 10, (3, 2)).tolist()
        return cells

    for subset in ("training", "evaluation"):
        tasks = {
            f"{subset}{n}": {
                "train": [{"input": grid(), "output": grid()} for _ in range(2)],
                "test": [{"input": grid()}],
            }
            for n in range(2)
        }
        (folder / f"arc_{subset}_challenges.json").write_text(json.dumps(tasks))
        (folder / f"arc_{subset}_solutions.json").write_text(json.dumps({name: [grid()] for name in tasks}))
    return folder


def test_sudokus_are_shuffled_within_their_rules(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "csv", SUDOKUS)
    summary = build_folder(source, tmp_path / "out", BuildOptions(augment=5, subsample=3))
    assert (summary["kind"], summary["train_examples"], summary["test_examples"]) == ("sudoku", 18, 4)
    inputs, labels = (np.load(tmp_path / f"out/train/all__{what}.npy") for what in ("inputs", "labels"))
    assert len(np.unique(labels, axis=0)) > 3
    for grid in labels.reshape(-1, 4, 4):
        assert all(set(line) == {2, 3, 4, 5} for line in (*grid, *grid.T))
    assert ((inputs == labels) | (inputs == 1)).all()
    again = build_folder(source, tmp_path / "again", BuildOptions(augment=5, subsample=3))
    assert again == summary
    np.testing.assert_array_equal(np.load(tmp_path / "again/train/all__inputs.npy"), inputs)
    data = read_data(resolve_config(PuzzleConfig, [f"data={tmp_path / 'out'}"]).config)
    assert data.is_sudoku
    assert (data.sizes.num_tokens, data.sizes.length) == (6, 16)


def test_mazes_have_the_symmetries_of_a_square(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "csv", [("S# G", "S#oG")])
    build_folder(source, tmp_path / "out", BuildOptions(augment=7))
    labels = np.load(tmp_path / "out/train/all__labels.npy")
    assert len(np.unique(labels, axis=0)) == len(labels) == 8
    np.testing.assert_array_equal(labels[0], [3, 1, 5, 4])
    build_folder(source, tmp_path / "two", BuildOptions(augment=2))
    np.testing.assert_array_equal(np.load(tmp_path / "two/train/all__labels.npy"), labels[:3])
    with pytest.raises(UsageError, match="unknown characters"):
        build_folder(write_csv(tmp_path / "bad", [("S?G#", "SoG#")]), tmp_path / "none", BuildOptions())


def test_a_minimum_rating_needs_ratings(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "csv", SUDOKUS)
    assert build_folder(source, tmp_path / "out", BuildOptions(min_difficulty=1))["train_examples"] == 3
    for file in source.iterdir():
        file.write_text("".join(line.rpartition(",")[0] + "\n" for line in file.read_text().splitlines()))
    with pytest.raises(UsageError, match="lacks the column rating") as refused:
        build_folder(source, tmp_path / "none", BuildOptions(min_difficulty=1))
    assert refused.value.got == "source, question, answer, and --min-difficulty 1"


def test_arc_folders_are_read_and_their_augmentations_undone(tmp_path: Path) -> None:
    source = write_arc(tmp_path / "arc")
    build_folder(source, tmp_path / "out", BuildOptions(augment=4))
    names = json.loads((tmp_path / "out/identifiers.json").read_text())
    tests = json.loads((tmp_path / "out/test_puzzles.json").read_text())
    inputs, labels, numbers, starts = (
        np.load(tmp_path / f"out/test/all__{what}.npy")
        for what in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices")
    )
    assert inputs.dtype == np.uint8
    assert len(numbers) == 2 * 5
    for number, row in zip(numbers, starts[:-1], strict=True):
        original, undo = inverse_augmentation(names[number])
        canvas = inputs[row].reshape(30, 30)
        cells = canvas[np.ix_((canvas > 1).any(1), (canvas > 1).any(0))] - 2
        np.testing.assert_array_equal(undo(cells), arc_grid(tests[original]["test"][0]["input"]))
    # Labels of padding are ignored, although uint8 cannot hold the ignored label.
    data = read_data(resolve_config(PuzzleConfig, [f"data={tmp_path / 'out'}"]).config)
    ignored = torch.cat([data.val["labels"], data.test["labels"]]) == IGNORED_LABEL
    assert int(ignored.sum()) == int((labels == 0).sum()) > 0
    assert not data.is_sudoku


def test_an_official_checkpoint_becomes_a_run(tmp_path: Path) -> None:
    build_folder(write_csv(tmp_path / "csv", SUDOKUS), tmp_path / "out", BuildOptions(augment=2))
    words = [f"data={tmp_path / 'out'}", "global_batch_size=4", "threads=1"]
    arch = {"hidden_size": 32, "num_heads": 2, "H_cycles": 1, "L_cycles": 2, "halt_max_steps": 2, "puzzle_emb_len": 2}
    config = resolve_config(PuzzleConfig, [*words, *(f"arch.{key}={value}" for key, value in arch.items())]).config
    torch.manual_seed(1)
    model = make_model(config, read_data(config).sizes, num_slots=1)
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("slots.")}
    file = tmp_path / "step_7"
    torch.save({f"_orig_mod.model.inner.{official_name(name)}": tensor for name, tensor in weights.items()}, file)
    (tmp_path / "all_config.yaml").write_text(json.dumps({"arch": arch | {"forward_dtype": "bfloat16"}, "lr": 0.002}))
    metrics = import_official(file, tmp_path / "run", words=words, device="cpu")
    assert metrics["test_loss"] > 0
    run = open_run(tmp_path / "run")
    assert run.metadata["is_sudoku"]
    loaded = whet.load(run.path, make_model(config, read_data(config).sizes, num_slots=4), "last").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    with pytest.raises(UsageError, match="does not say what it was trained on"):
        import_official(file, tmp_path / "other", words=[])
    with pytest.raises(UsageError, match="does not fit"):
        import_official(file, tmp_path / "other", words=[*words, "arch.puzzle_emb_len=3"], device="cpu")
