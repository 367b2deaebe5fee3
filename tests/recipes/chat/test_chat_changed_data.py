"""Resuming a chat run after the embedded conversations have changed."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from small_chat import WORDS, prepared
from whet.base.errors import DataChangedError, UsageError
from whet.config.resolve import resolve_config
from whet.recipes.chat import embedded
from whet.recipes.chat.embedded import embedded_conversations
from whet.recipes.chat.prepare import PrepareOptions
from whet.recipes.recipe import load_recipe
from whet.recipes.runner import train_recipe
from whet.run.folder import installed_versions
from whet.training.loop import TrainResult

pytestmark = pytest.mark.torch

SMALL = PrepareOptions(format="openai", vocab_size=512, max_length=64, train_split=0.75, max_bad=0)


def train(run: Path, *words: str, **options: Any) -> TrainResult:
    recipe = load_recipe("chat")
    reported = (*WORDS, "max_steps=2", "global_batch_size=4", "epochs_per_session=1", *words)
    return train_recipe(recipe, resolve_config(recipe.Config, reported), run=run, device="cpu", **options)


@functools.cache
def some() -> list[Any]:
    return list(embedded_conversations())[:60]


def embed(monkeypatch: pytest.MonkeyPatch, home: Path, *, num: int) -> None:
    monkeypatch.setenv("WHET_HOME", str(home))
    monkeypatch.setattr(embedded, "OPTIONS", SMALL)
    monkeypatch.setattr(embedded, "embedded_conversations", lambda: some()[:num])
    monkeypatch.setattr(embedded, "_key", lambda: str(num))


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ({}, f"whet has changed since (still {installed_versions()['whet']}, with other files)"),
        ({"whet": "0.0.1"}, f"whet has changed since (0.0.1 -> {installed_versions()['whet']})"),
        pytest.param(
            {"python": "3.10.0"},
            f"Python has changed since (3.10.0 -> {installed_versions()['python']})",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_changed_embedded_conversations_are_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: dict[str, str], why: str
) -> None:
    run = tmp_path / "run"
    embed(monkeypatch, tmp_path / "home", num=60)
    train(run)
    started = {**installed_versions(), **then}
    (run / "versions.json").write_text(json.dumps(started))
    embed(monkeypatch, tmp_path / "home", num=50)
    with pytest.raises(UsageError) as refused:
        train(run, "max_steps=3")
    assert refused.value.what == "the data is not what the run was started with"
    assert f"the embedded conversations are generated from whet and Python's library, and {why}" in str(refused.value)
    assert f"(whet {started['whet']}, Python {started['python']})" in str(refused.value)
    embed(monkeypatch, tmp_path / "home", num=60)
    assert train(run, "max_steps=3").step == 3, "as the try line says"


def test_changed_own_conversations_are_not_blamed_on_whet(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = prepared(tmp_path / "one")
    run = tmp_path / "run"
    train(run, f"data={one}")
    two = prepared(tmp_path / "two", num_talks=20)
    one.rename(tmp_path / "away")
    two.rename(one)
    with pytest.raises(DataChangedError) as refused:
        train(run, f"data={one}", "max_steps=3")
    assert "generated from whet" not in str(refused.value)
