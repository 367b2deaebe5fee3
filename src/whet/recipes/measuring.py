"""How a recipe is measured: in a process of its own, on its real model and data."""

from collections.abc import Mapping
from typing import Any

from whet.base import env
from whet.config.resolve import Resolved
from whet.machine.vitals import read_vitals
from whet.measure.remote import RemoteRig
from whet.recipes.recipe import load_recipe

TARGET = "whet.recipes.measuring:open_rig"
_MOST_MEMORY = 0.9
"""Of what is free at the start: a probe that takes more is ended before the system ends something else."""


def rig_of(word: str, resolved: Resolved[Any], *, device: str) -> RemoteRig:
    """A rig for a recipe with its settings; enter it to start the process."""
    arguments = {
        "recipe": word,
        "config": resolved.config.model_dump(mode="json"),
        "given": list(resolved.given),
        "device": device,
        "global_batch_size": resolved.config.global_batch_size,
    }
    free = read_vitals().memory_available_bytes
    most_bytes = int(_MOST_MEMORY * free) if free else None
    return RemoteRig(TARGET, arguments, environment=env.for_child(), most_bytes=most_bytes)


def open_rig(arguments: Mapping[str, Any]) -> Any:
    """In the child: the recipe's training, ready to be stepped."""
    from whet.device.environment import before_torch

    recipe = load_recipe(arguments["recipe"])
    config = recipe.Config.model_validate(arguments["config"])
    config = config.model_copy(update={"global_batch_size": arguments["global_batch_size"]})
    before_torch(mps_fallback=config.mps_fallback == "on", deterministic=config.deterministic == "on")
    # torch is loaded from here on, unless a recipe of yours has done so.
    from whet.device.machine_here import machine_here
    from whet.engine.rig import StepRig
    from whet.engine.training import read_training
    from whet.plan.plan import make_plan
    from whet.recipes.train import ingredients

    made = ingredients(recipe, config)
    machine, conditions = machine_here()
    wishes = Resolved(config=config, given=tuple(arguments["given"])).wishes
    if arguments["device"] != "auto":
        wishes = {**wishes, "device": arguments["device"]}
    plan = make_plan(machine, made.workload, wishes=wishes, conditions=conditions)
    training = read_training(made.training)
    return StepRig(made.model, made.optimizer, made.data.train, training, loss=made.loss, plan=plan, may_compile=True)
