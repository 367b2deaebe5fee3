"""Resuming with other data may be allowed; other tokens or classes than those of the weights may not."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from whet.base.errors import UsageError
from whet.config.resolve import resolve_config
from whet.recipes.recipe import load_recipe
from whet.recipes.runner import train_recipe

pytestmark = pytest.mark.torch

WORDS = ("arch.hidden_size=16", "arch.heads=2", "arch.layers=1", "arch.vocab_size=300", "arch.max_length=16")


def write(file: Path, rows: Sequence[tuple[str, str]]) -> Path:
    file.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    return file


def train(run: Path, data: Path, *, max_steps: int, allow: tuple[str, ...] = ()) -> None:
    recipe = load_recipe("text")
    words = (*WORDS, f"data={data}", f"max_steps={max_steps}", "global_batch_size=8", "epochs=9", "threads=1")
    train_recipe(recipe, resolve_config(recipe.Config, words), run=run, device="cpu", allow=allow)


def test_weights_are_refused_with_other_tokens_or_classes(tmp_path: Path) -> None:
    rows = [(f"the {what} number {n} is here", kind) for n in range(40) for what, kind in (("fox", "a"), ("fern", "b"))]
    first = write(tmp_path / "first.jsonl", rows)
    train(tmp_path / "run", first, max_steps=2)
    moved = write(tmp_path / "moved.jsonl", rows[::-1])
    train(tmp_path / "run", moved, max_steps=3, allow=("data",))
    words = write(
        tmp_path / "words.jsonl", [(f"some other stone {n} lies there", kind) for n, (_, kind) in enumerate(rows)]
    )
    with pytest.raises(UsageError, match="not have the tokenizer"):
        train(tmp_path / "run", words, max_steps=4, allow=("data",))
    labels = write(tmp_path / "labels.jsonl", [(text, kind + "!") for text, kind in rows])
    with pytest.raises(UsageError, match="not have the classes"):
        train(tmp_path / "run", labels, max_steps=4, allow=("data",))
