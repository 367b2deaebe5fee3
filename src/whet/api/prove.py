"""Training runs that `whet prove` can kill and resume: short segments of a recipe or of a training function."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.api.load import recipe_spec
from whet.api.target import ScriptTraining, load_training
from whet.base.errors import UsageError, WhetError
from whet.config.options import CommonConfig
from whet.config.resolve import ResolvedConfig, resolve_config
from whet.plan.plan import read_plan
from whet.prove.kills import ProvableTraining
from whet.recipes.recipe import Recipe, load_factory, load_recipe, script_arguments
from whet.run.folder import RUN_FILE, open_run

_SEGMENT_TARGET = "whet.api.prove:train_segment"
_FUNCTION_TARGET = "whet.api.prove:train_function_segment"


def training_from_args(
    what: str, args: Sequence[str], *, file: Path | None, device: str
) -> tuple[str, ProvableTraining]:
    """Return the name and training run of a recipe, configured by key=value arguments, or of a training function."""
    loaded = load_training(what)
    if isinstance(loaded, ScriptTraining):
        if args or file:
            raise UsageError("only a recipe has options", got=" ".join(args) or str(file), try_=f"whet prove {what}")
        return loaded.name, provable_function(loaded, device=device)
    resolved = resolve_config(loaded.Config, args, file=file)
    return loaded.name, provable_training(what, loaded, resolved, device=device)


def training_from_run(path: Path, *, file: str | None, device: str) -> tuple[str, ProvableTraining]:
    """Return the name and training run of an existing run folder, with its saved settings."""
    run = open_run(path)
    # The folder must not choose which code is executed. Only the user may, by naming a file.
    what = recipe_spec(run, given=file, command="prove")
    recipe = load_training(what)
    if isinstance(recipe, ScriptTraining):
        return recipe.name, provable_function(recipe, device=device)
    overrides = read_plan(run.plan, where=f"{path}/plan.json").overrides
    config = recipe.Config.model_validate(run.config)
    chosen = str(overrides.get("device", "auto")) if device == "auto" else device
    resolved = ResolvedConfig(config=config, given=tuple(overrides))
    return recipe.name, provable_training(what, recipe, resolved, device=chosen)


def provable_function(training: ScriptTraining, *, device: str) -> ProvableTraining:
    """Return the training run of a function. Every process calls the function, with its run folder redirected."""
    arguments = {"function": training.target, "config": dict(training.config.config), "device": device}
    return ProvableTraining(target=_FUNCTION_TARGET, arguments=arguments)


def provable_training(what: str, recipe: Recipe, resolved: ResolvedConfig[Any], *, device: str) -> ProvableTraining:
    """Return the training run of a recipe, in the form that `whet prove` starts and kills."""
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
    """Start or resume a segment in a run folder. Called in a child process that may be killed at any time."""
    from whet.device.environment import configure_before_torch

    recipe = load_recipe(arguments["recipe"])
    config = recipe.Config.model_validate(arguments["config"])
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # These modules import torch, which must see the environment set above. A user recipe may have imported it already.
    from whet.recipes.runner import train_recipe

    changes = recipe_segment_changes(config, steps=arguments["steps"], every=arguments["every"])
    segment = config.model_copy(update=changes)
    # Mark the interval as given by the user, so that the plan does not change it.
    resolved = ResolvedConfig(config=segment, given=(*arguments["given"], "checkpoint_steps"))
    command = ["whet", "prove", arguments["recipe"]]
    train_recipe(recipe, resolved, run=run, device=arguments["device"], command=command, on_event=on_event)


def train_function_segment(run: Path, arguments: dict[str, Any], *, on_event: Any) -> None:
    """Start or resume a segment of a training function in a run folder. Called in a child process."""
    from whet.device.rng import seed_everything
    from whet.training.intercept import Interception, ProofSegment, SegmentEnded, intercept

    word = arguments["function"]
    segment = ProofSegment(
        run=run,
        steps=arguments["steps"],
        every=arguments["every"],
        device=arguments["device"],
        on_event=on_event,
        command=("whet", "prove", word),
    )
    # A function that does not seed torch gets the same initial weights in every new run, so that runs can be compared.
    # A process that resumes gets other weights, as after a real interruption, which reveals what a checkpoint does not
    # restore.
    seed_everything(1 if (run / RUN_FILE).exists() else 0)
    with intercept(Interception(segment)) as interception, script_arguments(word):
        try:
            load_factory(word)()
        except SegmentEnded:
            return
    if not interception.is_ended:
        raise WhetError(
            f"{word} did not train",
            got="it returned without calling whet.train",
            try_="a function that calls whet.train(...)",
        )


def preload(arguments: dict[str, Any]) -> None:
    """Import the modules that a segment needs before the process forks."""
    word = arguments.get("recipe") or arguments["function"]
    with script_arguments(word):
        load_factory(word)


def recipe_segment_changes(config: CommonConfig, *, steps: int, every: int) -> dict[str, Any]:
    """Return the overrides that make a run a short segment: fewer steps, more frequent saves and evaluations."""
    from whet.training.intercept import segment_changes

    own = config.checkpoint_steps
    return {
        **segment_changes(config.max_steps, config.eval_every, steps=steps),
        "checkpoint_steps": every if own == "auto" else min(every, own),
    }


def describe_changes(requested: Mapping[str, Any], trained: Mapping[str, Any]) -> tuple[str, ...]:
    """Describe how the trained config differs from the requested one, in one line per key."""
    return tuple(
        f"{key}={trained.get(key)} instead of {requested[key]}"
        for key in requested
        if requested[key] != trained.get(key)
    )
