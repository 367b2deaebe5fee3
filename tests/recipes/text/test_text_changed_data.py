"""Resuming a run on the embedded docstrings after an update names the library that changed."""

import json
from pathlib import Path

import pytest

from whet.base.errors import DataChangedError, UsageError
from whet.config.resolve import resolve_config
from whet.recipes.recipe import load_recipe
from whet.recipes.runner import train_recipe
from whet.recipes.text import corpus_reader
from whet.recipes.text.corpus import Examples, split
from whet.recipes.text.embedded import LIBRARIES
from whet.run.folder import installed_versions
from whet.training.loop import TrainResult

pytestmark = pytest.mark.torch

SMALL = ("arch.hidden_size=16", "arch.layers=1", "arch.heads=2", "arch.vocab_size=300", "global_batch_size=4")


def train(run: Path, *args: str) -> TrainResult:
    recipe = load_recipe("text")
    return train_recipe(recipe, resolve_config(recipe.Config, (*SMALL, *args)), run=run, device="cpu")


def install(monkeypatch: pytest.MonkeyPatch, *, number: int) -> None:
    texts = tuple(f"return value {value} of {name}" for value in range(number) for name in LIBRARIES)
    corpus = split(Examples(texts=texts, labels=tuple(range(len(LIBRARIES))) * number), classes=LIBRARIES)
    monkeypatch.setattr(corpus_reader, "read_docstrings", lambda: corpus)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ({}, "one of them has changed since, perhaps sympy or networkx"),
        ({"torch": "2.0.1"}, f"torch has changed since (2.0.1 -> {installed_versions()['torch']})"),
        ({"transformers": None}, f"transformers has changed since (None -> {installed_versions()['transformers']})"),
    ],
)
def test_changed_embedded_texts_are_rejected_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: dict[str, str | None], why: str
) -> None:
    run = tmp_path / "run"
    install(monkeypatch, number=12)
    train(run, "max_steps=2")
    (run / "versions.json").write_text(json.dumps({**installed_versions(), **then}))
    install(monkeypatch, number=14)
    with pytest.raises(UsageError) as error:
        train(run, "max_steps=3")
    assert error.value.what == "the data is not what the run was started with"
    assert f"the embedded texts are docstrings of six installed libraries, and {why}" in str(error.value)
    install(monkeypatch, number=12)
    assert train(run, "max_steps=3").step == 3, "as the try line says"


def test_changed_user_texts_are_not_explained_by_an_update(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "texts.csv"
    rows = [f"this is text {number} of many,{'yes' if number % 2 else 'no'}" for number in range(60)]
    file.write_text("\n".join(("text,label", *rows)))
    train(run, f"data={file}", "max_steps=2")
    file.write_text("\n".join(("text,label", *rows[:50])))
    with pytest.raises(DataChangedError) as error:
        train(run, f"data={file}", "max_steps=3")
    assert "installed libraries" not in str(error.value)
