"""The direction of a metric follows from its name, or is asked for."""

import pytest

from whet.base.errors import UsageError
from whet.config.goal import metric_mode, resolve_mode

MINIMIZED = """
    loss val_loss test_loss valid_loss train/loss valLoss eval.loss error val_error_rate perplexity ppl val_ppl
    bits_per_byte bpb mse val_mse mae rmse nll negative_log_likelihood wer cer fid fid_score fid50k cross_entropy
    mean_squared_error log_loss brier_score kl_divergence hinge_loss
"""
MAXIMIZED = """
    accuracy val_accuracy acc val_acc test_acc1 f1 macro_f1 F1Score f1_score auc val_auroc precision recall map mAP
    mAP50 bleu bleu4 rouge rouge1 rougeL r2 r2_score score val_score iou mIoU top5 exact_match win_rate
    neg_mean_squared_error log_likelihood
"""
UNKNOWN = "closeness weight val test steps time x accuracy_loss entropy lossy per_epoch throughput acuracy"


@pytest.mark.parametrize(("names", "mode"), [(MINIMIZED, "min"), (MAXIMIZED, "max"), (UNKNOWN, None)])
def test_the_words_of_a_name_tell_the_direction(names: str, mode: str | None) -> None:
    wrong = [name for name in names.split() if metric_mode(name) != mode]
    assert wrong == []


def test_a_name_that_tells_nothing_is_asked_for() -> None:
    with pytest.raises(UsageError, match="does not imply whether lower or higher") as refused:
        resolve_mode("closeness", "auto")
    assert 'mode="min"' in str(refused.value.try_)
    assert (resolve_mode("closeness", "max"), resolve_mode("closeness", "min")) == ("max", "min")


def test_a_given_mode_wins_over_the_name() -> None:
    assert resolve_mode("val_loss", "max") == "max"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="mode must be"):
        resolve_mode("val_loss", "minimum")


@pytest.mark.parametrize(
    ("recipe", "goals"),
    [
        ("text", {"accuracy": "max", "macro_f1": "max", "micro_f1": "max", "cross_entropy": "min"}),
        ("chat", {"bits_per_byte": "min", "perplexity": "min", "cross_entropy": "min"}),
        ("puzzle", {}),
        ("hex", {}),
    ],
)
def test_the_goal_of_every_recipe_has_a_direction(recipe: str, goals: dict[str, str]) -> None:
    from whet.recipes.recipe import load_recipe

    loaded = load_recipe(recipe)
    assert loaded.goal is not None
    assert resolve_mode(loaded.goal, loaded.mode) in ("min", "max")
    assert {name: resolve_mode(name, "auto") for name in goals} == goals
