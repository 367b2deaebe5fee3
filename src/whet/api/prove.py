"""Trainings that `whet prove` can kill and resume: short segments of a recipe's training."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.api.load import recipe_spec
from whet.config.options import CommonConfig
from whet.config.resolve import ResolvedConfig, resolve_config
from whet.plan.plan import read_plan
from whet.prove.kills import ProvableTraining
from whet.recipes.recipe import Recipe, load_recipe
from whet.run.folder import open_run

_SEGMENT_TARGET = "whet.api.prove:train_segment"


def training_from_args(
    what: str, args: Sequence[str], *, file: Path | None, device: str
) -> tuple[Recipe, ProvableTraining]:
    """Return the training of a recipe or file, configured by key=value arguments."""
    recipe = load_recipe(what)
    return recipe, provable_training(what, recipe, resolve_config(recipe.Config, args, file=file), device=device)


def training_from_run(path: Path, *, file: str | None, device: str) -> tuple[Recipe, ProvableTraining]:
    """Return the training of a run folder, with the settings saved in it."""
    run = open_run(path)
    what = recipe_spec(run, given=file)
    recipe = load_recipe(what)
    overrides = read_plan(run.plan, where=f"{path}/plan.json").overrides
    config = recipe.Config.model_validate(run.config)
    chosen = str(overrides.get("device", "auto")) if device == "auto" else device
    return recipe, provable_training(what, recipe, ResolvedConfig(config=config, given=tuple(overrides)), device=chosen)


def provable_training(what: str, recipe: Recipe, resolved: ResolvedConfig[Any], *, device: str) -> ProvableTraining:
    """Return the training of a recipe with its config."""
    arguments = {
        "recipe": what,
        "config": resolved.config.model_dump(mode="json"),
        "given": list(resolved.given),
        "device": device,
    }
    # Report missing data and invalid combinations before a process is started.
    recipe.describe(resolved.config)
    return ProvableTraining(target=_SEGMENT_TARGET, arguments=arguments)


def train_segment(run: Path, arguments: dict[str, Any], *, on_event: Any) -> None:
    """Start or resume the segment in a run folder. Called in a child process, which may be killed at any time."""
    from whet.device.environment import configure_before_torch

    recipe = load_recipe(arguments["recipe"])
    config = recipe.Config.model_validate(arguments["config"])
    configure_before_torch(mps_fallback=config.mps_fallback == "on")
    # These modules import torch, which must see the environment set above. A user recipe may have imported it already.
    from whet.recipes.runner import train_recipe

    segment = config.model_copy(update=segment_changes(config, steps=arguments["steps"], every=arguments["every"]))
    # Mark the interval as set by the user, so that the plan keeps the checkpoint interval of the proof.
    resolved = ResolvedConfig(config=segment, given=(*arguments["given"], "checkpoint_steps"))
    command = ["whet", "prove", arguments["recipe"]]
    train_recipe(recipe, resolved, run=run, device=arguments["device"], command=command, on_event=on_event)


def preload(arguments: dict[str, Any]) -> None:
    """Import the modules that a segment needs, before the process is forked."""
    load_recipe(arguments["recipe"])


def segment_changes(config: CommonConfig, *, steps: int, every: int) -> dict[str, Any]:
    """Return the overrides that turn a training into a segment: fewer steps, more frequent saves and evaluations."""
    own = config.checkpoint_steps
    eval_every = math.ceil(steps / 2)
    return {
        "max_steps": min(steps, config.max_steps or steps),
        "checkpoint_steps": every if own == "auto" else min(every, own),
        "eval_every": eval_every if config.eval_every == "auto" else min(eval_every, config.eval_every),
        "epochs_per_session": None,
    }


def describe_changes(requested: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe how the trained config differs from the requested one, one line per key."""
    return tuple(
        f"{key}={trained.get(key)} instead of {requested[key]}"
        for key in requested
        if requested[key] != trained.get(key)
    )
