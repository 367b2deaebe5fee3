"""4x4 Sudokus on a CPU: the model learns to solve unseen grids, and more steps solve more of them."""

from pathlib import Path
from typing import Any

import pytest

from whet.config.resolve import resolve_config
from whet.recipes.puzzle.recipe import PuzzleRecipe
from whet.recipes.runner import train_recipe
from whet.run.events import read_events
from whet.run.folder import open_run

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def train(run: Path, *words: str) -> list[dict[str, Any]]:
    """Train, or resume, and return all evaluations of the run on unseen grids."""
    recipe = PuzzleRecipe()
    train_recipe(recipe, resolve_config(recipe.Config, ["threads=1", "eval_every=200", *words]), run=run)
    return [event.fields for event in read_events(open_run(run), kinds=("eval",))]


def test_the_mixer_solves_unseen_grids_by_step_600(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "max_steps=600")
    assert next(e["test_exact_accuracy"] for e in result if "test_exact_accuracy" in e) >= 0.95
    early = result[0]
    assert early["exact_8"] > early["exact_1"] + 0.1, "while it learns, more steps solve more"


def test_attention_solves_unseen_grids_by_step_3000_in_two_of_three_seeds(tmp_path: Path) -> None:
    solved = 0
    for seed in range(3):
        run, words = tmp_path / str(seed), (f"seed={seed}", "arch.mlp_t=false", "epochs=30")
        # The run is extended only if necessary.
        solved += any(
            max(e.get("exact_accuracy", 0.0) for e in train(run, *words, f"max_steps={most}")) >= 0.85
            for most in (1_600, 2_000, 2_400, 3_000)
        )
        if solved == 2:
            return
    raise AssertionError(f"{solved} of 3 seeds")
