"""Trainings that `whet prove` can kill and resume: bounded segments of a recipe's training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.config.options import CommonConfig
from whet.config.resolve import ResolvedConfig, resolve_config
from whet.plan.plan import read_plan
from whet.prove.kills import ProvableTraining
from whet.recipes.recipe import BUILT_IN, Recipe, load_recipe
from whet.run.folder import open_run

_SEGMENT_TARGET = "whet.api.prove:train_segment"


def provable_training(word: str, recipe: Recipe, resolved: ResolvedConfig[Any], *, device: str) -> ProvableTraining:
    """A recipe with its settings as a training that can be proved."""
    arguments = {
        "recipe": word,
        "config": resolved.config.model_dump(mode="json"),
        "given": list(resolved.given),
        "device": device,
    }
    recipe.describe(resolved.config)
    return ProvableTraining(target=_SEGMENT_TARGET, arguments=arguments)


def training_from_args(
    word: str, words: Sequence[str], *, file: Path | None, device: str
) -> tuple[Recipe, ProvableTraining]:
    """The training of a recipe or file with key=value words."""
    recipe = load_recipe(word)
    return recipe, provable_training(word, recipe, resolve_config(recipe.Config, words, file=file), device=device)


def training_from_run(path: Path, *, file: str | None, device: str) -> tuple[Recipe, ProvableTraining]:
    """The training of a run folder, with the settings that are saved there."""
    run = open_run(path)
    # Only a built-in one by itself: a run folder may come from anywhere, and must not say which code is run.
    if file is None and run.header.recipe not in BUILT_IN:
        meant = next((word for word in run.header.command if word.partition(":")[0].endswith(".py")), "FILE")
        raise UsageError("the run is of a recipe of yours", got=run.header.recipe, try_=f"--recipe {meant}")
    word = file or run.header.recipe
    recipe = load_recipe(word)
    overrides = read_plan(run.plan, where=f"{path}/plan.json").overrides
    config = recipe.Config.model_validate(run.config)
    chosen = str(overrides.get("device", "auto")) if device == "auto" else device
    return recipe, provable_training(word, recipe, ResolvedConfig(config=config, given=tuple(overrides)), device=chosen)


def train_segment(run: Path, arguments: dict[str, Any], *, show: Any) -> None:
    """One life: begins the piece in a run folder, or goes on with it."""
    from whet.device.environment import configure_before_torch

    recipe = load_recipe(arguments["recipe"])
    config = recipe.Config.model_validate(arguments["config"])
    configure_before_torch(mps_fallback=config.mps_fallback == "on")
    # torch is loaded from here on, unless a recipe of yours has done so.
    from whet.recipes.runner import train_recipe

    piece = config.model_copy(update=segment_changes(config, steps=arguments["steps"], every=arguments["every"]))
    resolved = ResolvedConfig(config=piece, given=(*arguments["given"], "checkpoint_steps"))
    command = ["whet", "prove", arguments["recipe"]]
    train_recipe(recipe, resolved, run=run, device=arguments["device"], command=command, show=show)


def preload(arguments: dict[str, Any]) -> None:
    """Loads what a life will import."""
    load_recipe(arguments["recipe"])


def segment_changes(config: CommonConfig, *, steps: int, every: int) -> dict[str, Any]:
    """How the piece differs from the whole: shorter, saved and evaluated more often, in one sitting."""
    own = config.checkpoint_steps
    evaluates = math.ceil(steps / 2)
    return {
        "max_steps": min(steps, config.max_steps or steps),
        "checkpoint_steps": every if own == "auto" else min(every, own),
        "eval_every": evaluates if config.eval_every == "auto" else min(evaluates, config.eval_every),
        "epochs_per_session": None,
    }


def describe_changes(asked: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[str, ...]:
    """How the config that was trained differs from the one that was asked for, key by key."""
    return tuple(f"{key}={trained.get(key)} instead of {asked[key]}" for key in asked if asked[key] != trained.get(key))
