"""Train a recipe in a run folder with the public `train`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from whet.base.errors import DataChangedError, UsageError
from whet.config.resolve import ResolvedConfig
from whet.data.columns import count_samples
from whet.device.rng import seed_everything
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe, Splits
from whet.run.folder import RECIPE_FILE, open_run
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training.callbacks.event_log import EventHandler, emit_event
from whet.training.loop import TrainResult, train
from whet.training.tune import OpenStepBench
from whet.training.workload import count_parameters, layer_kinds


def recipe_optimizer(recipe: Recipe, config: Any) -> OptimizerChoice:
    choose = getattr(recipe, "optimizer", None)
    if choose is not None:
        return cast(OptimizerChoice, choose(config))
    return OptimizerChoice(name=config.optimizer, lr=config.lr, weight_decay=config.weight_decay)


WARMUP_SHARE = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRecipe:
    """What a recipe gives for its config: all that `train` and `tune` need."""

    data: Splits
    model: Any
    loss: LossFunction
    optimizer: OptimizerChoice
    workload: Workload
    training: dict[str, Any]
    """The keywords of `whet.training.training_config.TrainingConfig`."""


def prepare_recipe(recipe: Recipe, config: Any, *, data: Splits | None = None) -> PreparedRecipe:
    """Reads the data, unless it is given, and makes the model."""
    data = recipe.data(config) if data is None else data
    seed_everything(config.seed)
    model = recipe.model(config, data)
    # Counted, whatever the description says.
    counted, frozen = count_parameters(model)
    workload = recipe.describe(config, data)
    layers = tuple(sorted({*workload.layers, *layer_kinds(model)}))
    workload = workload.model_copy(update={"num_parameters": max(1, counted), "num_frozen": frozen, "layers": layers})
    if getattr(data, "is_part", False) and (samples := count_samples(data.train)) is not None:
        # Less than the recipe may have counted (api/trial.py).
        steps = config.epochs * -(-samples // config.global_batch_size)
        workload = workload.model_copy(
            update={"num_samples": samples, "num_steps": min(steps, config.max_steps or steps)}
        )
    share = getattr(config, "warmup_share", WARMUP_SHARE)
    warmup = int(share * (workload.num_steps or 0)) if config.warmup_steps == "auto" else config.warmup_steps
    return PreparedRecipe(
        data=data,
        model=model,
        loss=partial(recipe.loss, model),
        optimizer=recipe_optimizer(recipe, config),
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
            "epochs_per_session": config.epochs_per_session,
        },
    )


_MEANING_KEYS = ("tokenizer", "classes")
"""What a model's numbers stand for, as recipes keep it."""


class SharedEvaluation:
    """A recipe's evaluation that several processes can share (training/evaluator.py)."""

    def __init__(self, recipe: Any) -> None:
        self._recipe = recipe

    def __call__(self, model: Any, micro_batches: Any, /) -> dict[str, Any]:
        found: dict[str, Any] = self._recipe.evaluate(model, micro_batches)
        return found

    def tally(self, model: Any, micro_batches: Any, /) -> Any:
        return self._recipe.tally(model, micro_batches)

    def conclude(self, model: Any, tallies: list[Any], /) -> dict[str, Any]:
        found: dict[str, Any] = self._recipe.conclude(model, tallies)
        return found


def recipe_evaluation(recipe: Recipe) -> Any:
    """How a recipe is evaluated: by several processes together, if it says how."""
    can_share = hasattr(recipe, "tally") and hasattr(recipe, "conclude")
    return SharedEvaluation(recipe) if can_share else recipe.evaluate


def train_recipe(
    recipe: Recipe,
    resolved: ResolvedConfig[Any],
    *,
    run: Path,
    device: str = "auto",
    command: Sequence[str] = (),
    show: EventHandler | None = None,
    allow: Sequence[str] = (),
    open_bench: OpenStepBench | None = None,
    data: Splits | None = None,
) -> TrainResult:
    """Trains a recipe in a run folder, or goes on with it; measured before if `open_bench` says how."""
    config = resolved.config
    made = prepare_recipe(recipe, config, data=data)
    goes_on = (run / RECIPE_FILE).exists()
    if "data" in allow and goes_on:
        _check_meanings(open_run(run).kept, recipe.keep(config, made.data))
    if notes := getattr(made.data, "notes", ()):
        emit_event(show, "data", {"notes": notes})
    outputs = getattr(recipe, "outputs", None)
    goal = getattr(config, "goal", recipe.goal)
    with _explain_changed_data(recipe, config, run):
        return train(
            made.model,
            made.data.train,
            loss=made.loss,
            optimizer=made.optimizer,
            evaluate=recipe_evaluation(recipe),
            val=made.data.val,
            test=made.data.test,
            attach={} if goes_on else {RECIPE_FILE: json.dumps(recipe.keep(config, made.data)).encode()},
            run=run,
            device=device,
            overrides=resolved.overrides,
            workload=made.workload.model_copy(update={"batch": resolved.batch}),
            goal=goal,
            mode="min" if goal in getattr(recipe, "lower_is_better", ()) else "max",
            recipe=recipe.name,
            config=config.model_dump(mode="json"),
            command=list(command),
            init_from=config.init_from,
            show=show,
            measure=open_bench is not None,
            open_bench=open_bench,
            allow=allow,
            outputs=None if outputs is None else partial(outputs, made.model),
            **made.training,
        )


@contextmanager
def _explain_changed_data(recipe: Recipe, config: Any, run: Path) -> Iterator[None]:
    """A refusal of other data with the reason that the recipe may know."""
    try:
        yield
    except DataChangedError as error:
        explain = getattr(recipe, "explain_changed_data", None)
        raise error if explain is None else explain(error, config, open_run(run).versions) from None


def _check_meanings(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Weights that go on know the tokens and classes that they began with, whatever data is allowed."""
    others = [
        name for name in _MEANING_KEYS if name in before and before[name] != json.loads(json.dumps(now.get(name)))
    ]
    if others:
        raise UsageError(
            f"this data does not have the {' and '.join(others)} of the run",
            got="--allow data",
            try_="a new run, or data with the same; the numbers that the model has learnt would mean something else",
        )
