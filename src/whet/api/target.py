"""Resolve the target of a command: a recipe, a training function, or a function that returns a model.

`path.py`, `path.py:function` and `module:function` mean the same for every command. A training function calls
`whet.train` or `whet.Session`. It is called here and stopped before its first step, and nothing is written.
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
"""Names of functions that `path.py` without a function refers to, in commands that train."""
MODEL_NAMES = ("recipe", "model", "main")
"""Names of functions that `path.py` without a function refers to, in commands that verify a model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptTraining:
    """The training run of a function, with the arguments it passed to `whet.train` or `whet.Session`."""

    target: str
    """The function as `path.py:function` or `module:function`, valid in any working directory."""
    name: str
    """The name of the file, used for run folders and reports."""
    config: "RunConfig"
    loss: "LossFunction"


def load_training(target: str) -> Recipe | ScriptTraining:
    """Return the recipe named by `target`, or the training run that its function starts."""
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
    """Return the workload of a script with measured memory and FLOPs per sample, for planning on other machines.

    A few samples are computed on this machine. Values that cannot be measured stay unknown.
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
        # An iterable dataset cannot be read twice, so the run itself must choose the micro-batch.
        workload = config.workload
    return workload.model_copy(update={"recipe": training.name})


def load_function(target: str, *, default: tuple[str, ...]) -> Callable[[], Any]:
    """Import the function named by `target`. It must take no arguments and must not run when its file is imported."""
    try:
        with intercept(Interception()), script_arguments(target):
            function = load_factory(target, default=default)
    except FirstStepReached:
        raise UsageError(
            f"{target} trains when it is imported",
            got="whet.train or whet.Session outside a function",
            try_='def main(): ... and if __name__ == "__main__": main()',
        ) from None
    check_no_arguments(function, target)
    return function


def call_function(function: Callable[[], Any], target: str) -> Any:
    """Call a function and return its result, or a ScriptTraining if the function trains."""
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
    """Raise an error for a function that has required arguments."""
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
