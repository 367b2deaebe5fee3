"""The base class of recipes: what is required, what has a default, and the errors for what is missing."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from whet.api.load import load_predictor
from whet.api.train import train_by_name
from whet.base.errors import UsageError, WhetError
from whet.config.options import CommonConfig, TrainingOptions
from whet.config.resolve import resolve_config
from whet.recipes.recipe import BUILT_IN, Recipe, load_recipe, validate_recipe
from whet.recipes.runner import prepare_recipe, train_recipe
from whet.run.events import read_events
from whet.training.training_config import parse_training_config

pytestmark = pytest.mark.torch


class Minimal(Recipe):
    """Only what is required."""

    name = "minimal"

    def data(self, config: Any) -> Any:
        columns = {"x": torch.linspace(-1, 1, 64)[:, None], "y": torch.linspace(1, -1, 64)[:, None]}
        return SimpleNamespace(train=columns, val=columns, test=None)

    def model(self, config: Any, data: Any) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, micro: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(micro.x), micro.y)


def test_a_recipe_needs_only_name_data_model_and_loss(tmp_path: Path) -> None:
    recipe = validate_recipe(Minimal(), "minimal.py")
    resolved = resolve_config(recipe.Config, ["epochs=2", "global_batch_size=16", "threads=1"])
    result = train_recipe(recipe, resolved, run=tmp_path / "run", device="cpu")
    assert (result.state, result.step, set(result.metrics)) == ("done", 8, {"val_loss"})


def test_every_training_option_of_a_recipe_reaches_its_session() -> None:
    options = ["global_batch_size=16", "epochs=2", "max_steps=7", "schedule=cosine", "warmup_steps=3", "clip=0.5"]
    options += ["ema=on", "verify_resume=on", "seed=5", "eval_every=4", "patience=2", "epochs_per_session=1"]
    recipe = Minimal()
    config = resolve_config(recipe.Config, options).config
    training = dict(parse_training_config(prepare_recipe(recipe, config).training))
    expected = {name: getattr(config, name) for name in TrainingOptions.model_fields}
    assert expected.keys() == {option.partition("=")[0] for option in options}, "each is given"
    assert {name: training[name] for name in expected} == expected


def test_a_recipe_repeats_steps_with_verify_resume(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(f'{{"text": "word{row % 3} and {row}", "label": "{row % 3}"}}\n' for row in range(60)))
    values = {"arch": {"hidden_size": 16, "layers": 1, "max_length": 8, "vocab_size": 300}, "threads": 1}
    train = partial(train_by_name, "text", file, run=tmp_path / "run", device="cpu", on_event=None, measure=False)
    train = partial(train, global_batch_size=8, epochs=2, epochs_per_session=1, checkpoint_steps=4, **values)
    assert train().state == "stopped"
    assert train(verify_resume=True, epochs_per_session=2).state == "done"
    (event,) = read_events(tmp_path / "run", kinds=("resume",))
    assert event.get("exactness").startswith("verified: steps ")


def test_a_recipe_evaluates_in_the_dtype_of_its_weights(tmp_path: Path) -> None:
    """Its metrics do not depend on the precision of training, which applies to an `evaluate` function of a user."""
    dtypes = []

    class Evaluated(Minimal):
        def evaluate(self, model: nn.Module, micro_batches: Any) -> dict[str, float]:
            outputs = [model(micro.x) for micro in micro_batches]
            dtypes.append(outputs[0].dtype)
            return {"mean": torch.cat(outputs).mean().item()}

    resolved = resolve_config(Minimal.Config, ["epochs=1", "global_batch_size=16", "threads=1", "precision=bf16"])
    train_recipe(Evaluated(), resolved, run=tmp_path / "run", device="cpu")
    assert set(dtypes) == {torch.float32}


def test_the_default_description_counts_the_model_and_its_data() -> None:
    recipe = Minimal()
    config = resolve_config(recipe.Config, ["epochs=2", "global_batch_size=16"]).config
    described = recipe.describe(config)
    assert (described.num_parameters, described.num_samples, described.num_steps) == (2, 64, 8)
    assert described == prepare_recipe(recipe, config).workload


def test_optional_methods_are_supported_only_where_they_are_overridden() -> None:
    recipe = Minimal()
    assert [recipe.supports(name) for name in ("loss", "evaluate", "predict", "outputs")] == [True, False, False, False]
    assert (recipe.metadata(None, None), recipe.example_input({}), recipe.assumptions(None)) == ({}, None, ())
    with pytest.raises(UsageError, match="the recipe minimal cannot predict") as refused:
        recipe.predict(None, {})
    assert refused.value.try_ == "one of text, puzzle", "only recipes that can"
    with pytest.raises(UsageError, match="cannot export its model"):
        recipe.write_model_files(None, {}, Path(), to="onnx")


def test_a_recipe_that_fails_without_a_message_is_reported() -> None:
    class Failing(Minimal):
        def predict(self, config: Any, metadata: Any) -> Any:
            raise ValueError

    with pytest.raises(WhetError, match="lacks data that its recipe needs") as raised:
        load_predictor(Failing(), SimpleNamespace(config={}, metadata={}), checkpoint="last")
    assert raised.value.got == "ValueError"


def test_the_goal_of_the_config_precedes_that_of_the_recipe() -> None:
    assert Minimal().selected_goal(CommonConfig()) is None
    text = load_recipe("text")
    config = resolve_config(text.Config, ["goal=macro_f1"]).config
    assert (text.goal, text.selected_goal(config)) == ("accuracy", "macro_f1")


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_recipes_are_complete(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert all(recipe.supports(method) for method in ("data", "model", "loss", "describe", "metadata"))
    assert recipe.supports("evaluate") or recipe.supports("partial_metrics")


class WithoutLoss(Minimal):
    loss = Recipe.loss


class ForeignConfig(Minimal):
    Config = dict


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (object(), "does not return a recipe"),
        (None, "does not return a recipe"),
        (Recipe(), "is incomplete"),
        (WithoutLoss(), "is incomplete"),
        (ForeignConfig(), "lacks the common keys"),
    ],
)
def test_incomplete_recipes_are_rejected(made: object, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        validate_recipe(made, "mine.py")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import no_such_module", "could not be loaded"),
        ("import sys; sys.exit(0)", "ends the program"),
        ("x = 1", r"does not define recipe\(\)"),
        ("def recipe(): return 3", "does not return a recipe"),
    ],
)
def test_a_file_without_a_recipe_is_rejected(tmp_path: Path, source: str, what: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(WhetError, match=what):
        load_recipe(str(file))


@pytest.mark.parametrize(
    ("source", "word", "hint"),
    [
        ("def main(): ...", "mine.py", "python mine.py; whet plan, prove, bench, check and compare take mine.py:main"),
        ("if __name__ == '__main__': print()", "mine.py", "python mine.py"),
        ("from os import remove", "mine.py", "def recipe(): return ..."),
        ("def main(): ...", "mine.py:mian", "mine.py:main (did you mean main?)"),
        ("from dataclasses import replace", "mine.py:replase", "def replase(): return ..."),
    ],
)
def test_a_missing_function_gets_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, word: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UsageError) as raised:
        load_recipe(word)
    assert raised.value.try_ == hint


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean 'text'"):
        load_recipe("txet")
