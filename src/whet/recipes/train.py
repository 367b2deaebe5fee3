"""How a recipe is trained: with the public `train`, and nothing behind its back."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from whet.base.errors import OtherDataError, UsageError
from whet.checkpoint.randomness import seed_randomness
from whet.config.resolve import Resolved
from whet.data.subset import num_samples
from whet.engine.loop import Result, train
from whet.engine.recorder import Show, show_if_it_can
from whet.engine.tuning import OpenRig
from whet.engine.workload import num_trained, seen_layers
from whet.plan.workload import Workload
from whet.recipes.learning import optimizer_of
from whet.recipes.recipe import Recipe, Splits
from whet.run.folder import KEPT_FILE, open_run
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice

WARMUP_SHARE = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingredients:
    """What a recipe gives for its config: all that `train` and `tune` need."""

    data: Splits
    model: Any
    loss: LossFunction
    optimizer: OptimizerChoice
    workload: Workload
    training: dict[str, Any]
    """The keywords of `whet.engine.training.Training`."""


def ingredients(recipe: Recipe, config: Any, *, data: Splits | None = None) -> Ingredients:
    """Reads the data, unless it is given, and makes the model."""
    data = recipe.data(config) if data is None else data
    seed_randomness(config.seed)
    model = recipe.model(config, data)
    # Counted, whatever the description says.
    counted, frozen = num_trained(model)
    workload = recipe.describe(config, data)
    layers = tuple(sorted({*workload.layers, *seen_layers(model)}))
    workload = workload.model_copy(update={"num_parameters": max(1, counted), "num_frozen": frozen, "layers": layers})
    if getattr(data, "is_part", False) and (samples := num_samples(data.train)) is not None:
        # Less than the recipe may have counted (recipes/trial.py).
        steps = config.epochs * -(-samples // config.global_batch_size)
        workload = workload.model_copy(
            update={"num_samples": samples, "num_steps": min(steps, config.max_steps or steps)}
        )
    share = getattr(config, "warmup_share", WARMUP_SHARE)
    warmup = int(share * (workload.num_steps or 0)) if config.warmup_steps == "auto" else config.warmup_steps
    return Ingredients(
        data=data,
        model=model,
        loss=partial(recipe.loss, model),
        optimizer=optimizer_of(recipe, config),
        workload=workload,
        training={
            "global_batch_size": config.global_batch_size,
            "epochs": config.epochs,
            "max_steps": config.max_steps,
            "seed": config.seed,
            "schedule": config.schedule,
            "warmup_steps": warmup,
            "clip": config.clip,
            "ema": config.ema,
            "eval_every": None if config.eval_every == "auto" else config.eval_every,
            "patience": config.patience,
            "epochs_per_sitting": config.epochs_per_sitting,
        },
    )


_MEANINGS = ("tokenizer", "classes")
"""What a model's numbers stand for, as recipes keep it."""


class SharedEvaluation:
    """A recipe's evaluation that several processes can share (engine/evaluating.py)."""

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe

    def __call__(self, model: Any, micros: Any, /) -> dict[str, Any]:
        found: dict[str, Any] = self._recipe.evaluate(model, micros)
        return found

    def tally(self, model: Any, micros: Any, /) -> Any:
        return self._recipe.tally(model, micros)

    def conclude(self, model: Any, tallies: list[Any], /) -> dict[str, Any]:
        found: dict[str, Any] = self._recipe.conclude(model, tallies)
        return found


def evaluation_of(recipe: Recipe) -> Any:
    """How a recipe is evaluated: by several processes together, if it says how."""
    can_share = hasattr(recipe, "tally") and hasattr(recipe, "conclude")
    return SharedEvaluation(recipe) if can_share else recipe.evaluate


def train_recipe(
    recipe: Recipe,
    resolved: Resolved[Any],
    *,
    run: Path,
    device: str = "auto",
    command: Sequence[str] = (),
    show: Show | None = None,
    allow: Sequence[str] = (),
    open_rig: OpenRig | None = None,
    data: Splits | None = None,
) -> Result:
    """Trains a recipe in a run folder, or goes on with it; measured before if `open_rig` says how."""
    config = resolved.config
    made = ingredients(recipe, config, data=data)
    goes_on = (run / KEPT_FILE).exists()
    if "data" in allow and goes_on:
        _refuse_other_meanings(open_run(run).kept, recipe.keep(config, made.data))
    if notes := getattr(made.data, "notes", ()):
        show_if_it_can(show, "data", {"notes": notes})
    outputs = getattr(recipe, "outputs", None)
    goal = getattr(config, "goal", recipe.goal)
    with _explained(recipe, config, run):
        return train(
            made.model,
            made.data.train,
            loss=made.loss,
            optimizer=made.optimizer,
            evaluate=evaluation_of(recipe),
            dev=made.data.dev,
            test=made.data.test,
            attach={} if goes_on else {KEPT_FILE: json.dumps(recipe.keep(config, made.data)).encode()},
            run=run,
            device=device,
            wishes=resolved.wishes,
            workload=made.workload.model_copy(update={"batch": resolved.batch}),
            goal=goal,
            goal_is="min" if goal in getattr(recipe, "lower_is_better", ()) else "max",
            recipe=recipe.name,
            config=config.model_dump(mode="json"),
            command=list(command),
            init_from=config.init_from,
            show=show,
            measure=open_rig is not None,
            open_rig=open_rig,
            allow=allow,
            outputs=None if outputs is None else partial(outputs, made.model),
            **made.training,
        )


@contextmanager
def _explained(recipe: Recipe, config: Any, run: Path) -> Iterator[None]:
    """A refusal of other data with the reason that the recipe may know."""
    try:
        yield
    except OtherDataError as error:
        explain = getattr(recipe, "explain_other_data", None)
        raise error if explain is None else explain(error, config, open_run(run).versions) from None


def _refuse_other_meanings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Weights that go on know the tokens and classes that they began with, whatever data is allowed."""
    others = [name for name in _MEANINGS if name in before and before[name] != json.loads(json.dumps(now.get(name)))]
    if others:
        raise UsageError(
            f"this data does not have the {' and '.join(others)} of the run",
            got="--allow data",
            try_="a new run, or data with the same; the numbers that the model has learnt would mean something else",
        )
