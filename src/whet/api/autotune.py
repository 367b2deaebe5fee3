"""Time training steps and choose the global batch size in a separate process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.api.target import ScriptTraining, load_training
from whet.autotune.batch_size import choose_batch_size, lr_scaling, recorded_batch_size
from whet.autotune.process_bench import ProcessStepBench
from whet.autotune.step_bench import ProbeFailedError, ProgressCallback
from whet.base import env
from whet.base.errors import WhetError
from whet.config.resolve import ResolvedConfig
from whet.machine.pressure import read_system_state
from whet.plan.workload import AutoBatch
from whet.recipes.recipe import load_recipe

# Time limit of the batch size search before training. It usually takes much less.
BATCH_SIZE_BUDGET_SECONDS = 20.0
_BENCH_TARGET = "whet.api.autotune:open_bench"
_FUNCTION_TARGET = "whet.api.autotune:open_function_bench"
# Fraction of the memory that is free at the start. A bench that exceeds it is stopped before the kernel's out-of-memory
# killer picks a process.
_MAX_MEMORY_SHARE = 0.9


def recipe_bench(what: str, resolved: ResolvedConfig[Any], *, device: str) -> ProcessStepBench:
    """Return a bench that times the steps of a recipe. Its process starts when the bench is entered."""
    arguments = {
        "recipe": what,
        "config": resolved.config.model_dump(mode="json"),
        "given": list(resolved.given),
        "device": device,
        "global_batch_size": resolved.config.global_batch_size,
    }
    return _process_bench(_BENCH_TARGET, arguments)


def function_bench(training: ScriptTraining, *, device: str) -> ProcessStepBench:
    """Return a bench that times the steps of a training function."""
    return _process_bench(_FUNCTION_TARGET, {"function": training.target, "device": device})


def _process_bench(target: str, arguments: Mapping[str, Any]) -> ProcessStepBench:
    free = read_system_state().memory_available_bytes
    max_bytes = int(_MAX_MEMORY_SHARE * free) if free else None
    return ProcessStepBench(target, arguments, environment=env.child_environment(), max_bytes=max_bytes)


def open_bench(arguments: Mapping[str, Any]) -> Any:
    """Set up the training run of a recipe, ready to run steps. Called in the child process."""
    from whet.device.environment import configure_before_torch

    recipe = load_recipe(arguments["recipe"])
    config = recipe.Config.model_validate(arguments["config"])
    config = config.model_copy(update={"global_batch_size": arguments["global_batch_size"]})
    configure_before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # These modules import torch, which must see the environment set above. A user recipe may have imported it already.
    from whet.device.open import current_machine
    from whet.plan.plan import make_plan
    from whet.recipes.runner import limit_default_batch, prepare_recipe
    from whet.training.step_bench import LocalStepBench
    from whet.training.training_config import parse_training_config

    # Time the steps of a real run, with the same data, model and optimizer as in training.
    data = recipe.data(config)
    resolved = limit_default_batch(ResolvedConfig(config=config, given=tuple(arguments["given"])), data)
    made = prepare_recipe(recipe, resolved.config, data=data)
    machine, system_state = current_machine()
    overrides = resolved.overrides
    if arguments["device"] != "auto":
        overrides = {**overrides, "device": arguments["device"]}
    plan = make_plan(machine, made.workload, overrides=overrides, system_state=system_state)
    training = parse_training_config(made.training)
    return LocalStepBench(
        made.model, made.optimizer, made.data.train, training, loss=made.loss, plan=plan, may_compile=True
    )


def open_function_bench(arguments: Mapping[str, Any]) -> Any:
    """Set up the training run of a function, ready to run steps. Called in the child process."""
    from whet.device.open import current_machine
    from whet.plan.plan import make_plan
    from whet.training.step_bench import LocalStepBench

    training = load_training(arguments["function"])
    assert isinstance(training, ScriptTraining), "the parent process has called the function already"
    config = training.config
    device = {} if arguments["device"] == "auto" else {"device": arguments["device"]}
    machine, system_state = current_machine()
    workload = config.workload.model_copy(update={"recipe": training.name})
    plan = make_plan(machine, workload, overrides={**config.overrides, **device}, system_state=system_state)
    bench = LocalStepBench(
        config.model,
        config.optimizer,
        config.data,
        config.training,
        loss=training.loss,
        plan=plan,
        may_compile=True,
    )
    # A process that is restarted continues with the batch size of its predecessor.
    if "global_batch_size" in arguments:
        bench.use_batch(arguments["global_batch_size"])
    return bench


def restore_auto_batch(path: Path, resolved: ResolvedConfig[Any]) -> ResolvedConfig[Any] | None:
    """Return the config with the global batch size of an existing run, or None if the folder holds no run."""
    chosen = recorded_batch_size(path, base_rates=[resolved.config.lr])
    return None if chosen is None else resolved.with_batch(chosen)


def find_batch_size(
    bench: ProcessStepBench,
    resolved: ResolvedConfig[Any],
    *,
    budget_seconds: float,
    on_progress: ProgressCallback | None = None,
) -> AutoBatch:
    """Search for the global batch size with an open bench, and leave the bench at that size."""
    config = resolved.config
    return choose_batch_size(
        bench,
        base_rates=[config.lr],
        scaling=lr_scaling(config.optimizer),
        budget_seconds=budget_seconds,
        on_progress=on_progress,
    )


def resolve_auto_batch_size(
    what: str, resolved: ResolvedConfig[Any], *, device: str, on_progress: ProgressCallback | None = None
) -> ResolvedConfig[Any]:
    """Return the config with a measured global batch size and the learning rate scaled to match."""
    budget = BATCH_SIZE_BUDGET_SECONDS
    try:
        with recipe_bench(what, resolved, device=device) as bench:
            return resolved.with_batch(find_batch_size(bench, resolved, budget_seconds=budget, on_progress=on_progress))
    except ProbeFailedError as error:
        raise WhetError(
            "the global batch size could not be measured", got=error.reason, try_="global_batch_size=N"
        ) from None
