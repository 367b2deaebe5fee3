"""Resolve the target of a command: a recipe, a function that trains, or a function that makes a model.

`path.py`, `path.py:function` and `module:function` mean the same for every command. A function that trains calls
`whet.train` or `whet.Session`. It is called here and stopped before its first step; nothing is written.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError
from whet.recipes.recipe import BUILT_IN, Recipe, load_factory, script_arguments, validate_recipe
from whet.training.intercept import FirstStepReached, Interception, intercept

if TYPE_CHECKING:
    from whet.plan.workload import Workload
    from whet.step.loss import LossFunction
    from whet.training.run_config import RunConfig

TRAINING_NAMES = ("recipe", "main")
"""Functions that `path.py` alone may mean, for commands that train."""
MODEL_NAMES = ("recipe", "model", "main")
"""Functions that `path.py` alone may mean, for commands that verify a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptTraining:
    """The training run of a function, as it called `whet.train` or `whet.Session`."""

    target: str
    """The function as `path.py:function` or `module:function`, valid in any working folder."""
    name: str
    """A name for run folders and reports: that of the file."""
    config: "RunConfig"
    loss: "LossFunction"


def load_training(target: str) -> Recipe | ScriptTraining:
    """Return the recipe that `target` names, or the training run that a function makes."""
    if target in BUILT_IN:
        return validate_recipe(load_factory(target)(), target)
    made = call_function(load_function(target, default=TRAINING_NAMES), target)
    if made is None or isinstance(made, tuple | list) or hasattr(made, "parameters"):
        got = "it returned without training" if made is None else f"it returned a {type(made).__name__}"
        raise UsageError(
            f"{target} does not train",
            got=got,
            try_="a function that calls whet.train(...); or a recipe",
        )
    return made if isinstance(made, ScriptTraining) else validate_recipe(made, target)


def measured_workload(training: ScriptTraining) -> "Workload":
    """Return the workload of a script, with the memory and FLOPs per sample, to plan for other machines.

    A few samples are computed on this machine. What cannot be measured stays unknown.
    """
    from whet.training.run_config import plan_from_rules
    from whet.training.step_bench import LocalStepBench

    config = training.config
    bench = LocalStepBench(
        config.model,
        config.optimizer,
        config.data,
        config.training,
        loss=training.loss,
        plan=plan_from_rules(config),
    )
    try:
        with bench:
            workload = bench.workload_for_other_machines()
    except Exception:
        # An iterable dataset cannot be read twice. The plan then leaves the micro-batch to the run.
        workload = config.workload
    return workload.model_copy(update={"recipe": training.name})


def load_function(target: str, *, default: tuple[str, ...]) -> Callable[[], Any]:
    """Return the function that `target` names: one that takes no arguments, of a file that only defines it."""
    try:
        with intercept(Interception()), script_arguments(target):
            function = load_factory(target, default=default)
    except FirstStepReached:
        raise UsageError(
            f"{target} trains when it is imported",
            got="whet.train or whet.Session outside of a function",
            try_='def main(): ... and if __name__ == "__main__": main()',
        ) from None
    check_no_arguments(function, target)
    return function


def call_function(function: Callable[[], Any], target: str) -> Any:
    """Call a function and return its result, or a ScriptTraining if it trains."""
    try:
        with intercept(Interception()), script_arguments(target):
            return function()
    except FirstStepReached as reached:
        place, _, name = target.partition(":")
        place = str(Path(place).absolute()) if place.endswith(".py") else place
        return ScriptTraining(
            target=f"{place}:{name or function.__name__}",
            name=Path(place).stem,
            config=reached.config,
            loss=reached.loss,
        )


def check_no_arguments(function: Callable[..., Any], target: str) -> None:
    """Raise for a function that cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in optional]
    if required:
        name = getattr(function, "__name__", "main")
        defaults = ", ".join(f"{parameter}=..." for parameter in required)
        raise UsageError(
            f"{target} must be callable without arguments",
            got=", ".join(required),
            try_=f"defaults: def {name}({defaults})",
        )
