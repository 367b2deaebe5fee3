"""Measure a recipe's steps and its global batch size in a separate process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.autotune.batch_size import choose_batch_size, lr_scaling, recorded_batch_size
from whet.autotune.process_bench import ProcessStepBench
from whet.autotune.step_bench import ProbeFailedError, ProgressCallback
from whet.base import env
from whet.base.errors import WhetError
from whet.config.resolve import ResolvedConfig
from whet.machine.pressure import read_conditions
from whet.plan.workload import AutoBatch
from whet.recipes.recipe import load_recipe

_BENCH_TARGET = "whet.api.autotune:open_bench"
_MAX_MEMORY_SHARE = 0.9
"""Of what is free at the start: a probe that takes more is ended before the system ends something else."""


def recipe_bench(word: str, resolved: ResolvedConfig[Any], *, device: str) -> ProcessStepBench:
    """A rig for a recipe with its settings; enter it to start the process."""
    arguments = {
        "recipe": word,
        "config": resolved.config.model_dump(mode="json"),
        "given": list(resolved.given),
        "device": device,
        "global_batch_size": resolved.config.global_batch_size,
    }
    free = read_conditions().memory_available_bytes
    max_bytes = int(_MAX_MEMORY_SHARE * free) if free else None
    return ProcessStepBench(_BENCH_TARGET, arguments, environment=env.child_environment(), max_bytes=max_bytes)


def open_bench(arguments: Mapping[str, Any]) -> Any:
    """In the child: the recipe's training, ready to be stepped."""
    from whet.device.environment import configure_before_torch

    recipe = load_recipe(arguments["recipe"])
    config = recipe.Config.model_validate(arguments["config"])
    config = config.model_copy(update={"global_batch_size": arguments["global_batch_size"]})
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # torch is loaded from here on, unless a recipe of yours has done so.
    from whet.device.open import current_machine
    from whet.plan.plan import make_plan
    from whet.recipes.runner import prepare_recipe
    from whet.training.step_bench import LocalStepBench
    from whet.training.training_config import parse_training_config

    made = prepare_recipe(recipe, config)
    machine, conditions = current_machine()
    overrides = ResolvedConfig(config=config, given=tuple(arguments["given"])).overrides
    if arguments["device"] != "auto":
        overrides = {**overrides, "device": arguments["device"]}
    plan = make_plan(machine, made.workload, overrides=overrides, conditions=conditions)
    training = parse_training_config(made.training)
    return LocalStepBench(
        made.model, made.optimizer, made.data.train, training, loss=made.loss, plan=plan, may_compile=True
    )


BATCH_SIZE_BUDGET_SECONDS = 20.0
"""What finding it may take before a training; mostly it is much less."""


def restore_auto_batch(path: Path, resolved: ResolvedConfig[Any]) -> ResolvedConfig[Any] | None:
    """The config with the global batch that a run was started with; None where there is no run."""
    chosen = recorded_batch_size(path, base_rates=[resolved.config.lr])
    return None if chosen is None else resolved.with_batch(chosen)


def find_batch_size(
    rig: ProcessStepBench,
    resolved: ResolvedConfig[Any],
    *,
    budget_seconds: float,
    watch: ProgressCallback | None = None,
) -> AutoBatch:
    """The knee for a recipe whose rig is open; the rig is left at it."""
    config = resolved.config
    scaling = lr_scaling(config.optimizer)
    return choose_batch_size(
        rig, base_rates=[config.lr], scaling=scaling, budget_seconds=budget_seconds, on_progress=watch
    )


def resolve_auto_batch_size(
    word: str, resolved: ResolvedConfig[Any], *, device: str, watch: ProgressCallback | None = None
) -> ResolvedConfig[Any]:
    """The config with the global batch that was measured in a process of its own, and its learning rate."""
    try:
        with recipe_bench(word, resolved, device=device) as rig:
            return resolved.with_batch(
                find_batch_size(rig, resolved, budget_seconds=BATCH_SIZE_BUDGET_SECONDS, watch=watch)
            )
    except ProbeFailedError as error:
        raise WhetError("no global batch could be measured", got=error.reason, try_="global_batch_size=N") from None
