"""Train a recipe in a run folder."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from whet.base.errors import DataChangedError, UsageError
from whet.config.options import TrainingOptions
from whet.config.resolve import ResolvedConfig
from whet.data.columns import count_samples
from whet.device.rng import seed_everything
from whet.plan.workload import Workload
from whet.recipes.recipe import Recipe, Splits
from whet.run.folder import RECIPE_FILE, open_run
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training.callbacks.event_log import EventHandler, emit_event
from whet.training.keywords import SessionKeywords
from whet.training.loop import TrainResult, train_run
from whet.training.run_config import make_run_config
from whet.training.session import Session
from whet.training.training_config import parse_training_config
from whet.training.tune import OpenStepBench
from whet.training.workload import count_parameters, describe_workload, layer_kinds

# The fraction of all steps used for warm-up with warmup_steps=auto.
_WARMUP_SHARE = 0.06
# Metadata keys of a recipe that define the meaning of the model's inputs and outputs.
_VOCABULARY_KEYS = ("tokenizer", "classes")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRecipe:
    """A recipe's data and model, and the options that training and autotuning need."""

    data: Splits
    model: Any
    loss: LossFunction
    optimizer: OptimizerChoice
    workload: Workload
    training: dict[str, Any]
    """The training keyword arguments of `whet.Session`."""


def prepare_recipe(recipe: Recipe, config: Any, *, data: Splits | None = None) -> PreparedRecipe:
    """Read the data, unless it is given, and build the model."""
    data = recipe.data(config) if data is None else data
    # Seed after the data is read, so that the initial weights do not depend on how it was read.
    seed_everything(config.seed)
    model = recipe.model(config, data)
    workload = _workload(recipe, config, data, model)
    return PreparedRecipe(
        data=data,
        model=model,
        loss=partial(recipe.loss, model),
        optimizer=recipe.optimizer(config),
        workload=workload,
        training=_training_keywords(config, workload.num_steps),
    )


def limit_default_batch(resolved: ResolvedConfig[Any], data: Splits) -> ResolvedConfig[Any]:
    """Return a copy whose default global batch size does not exceed the number of training samples.

    A size given by the user is kept. If it is too large, data/adapters.py raises an error before the first step.
    """
    num_samples = count_samples(data.train)
    if "global_batch_size" in resolved.given or not num_samples or num_samples >= resolved.config.global_batch_size:
        return resolved
    return replace(resolved, config=resolved.config.model_copy(update={"global_batch_size": num_samples}))


def describe_recipe(recipe: Recipe, config: Any, data: Splits | None = None) -> Workload:
    """Describe the workload of a recipe that does not override `describe`: read its data and build its model."""
    return prepare_recipe(recipe, config, data=data).workload


def train_recipe(
    recipe: Recipe,
    resolved: ResolvedConfig[Any],
    *,
    run: Path,
    device: str = "auto",
    command: Sequence[str] = (),
    on_event: EventHandler | None = None,
    allow: Sequence[str] = (),
    open_bench: OpenStepBench | None = None,
    data: Splits | None = None,
) -> TrainResult:
    """Train a recipe in a run folder, or resume it. With `open_bench`, a new run is autotuned first."""
    data = recipe.data(resolved.config) if data is None else data
    default_batch = resolved.config.global_batch_size
    resolved = limit_default_batch(resolved, data)
    config = resolved.config
    made = prepare_recipe(recipe, config, data=data)
    is_resumed = (run / RECIPE_FILE).exists()
    if "data" in allow and is_resumed:
        _check_vocabulary(open_run(run).metadata, recipe.metadata(config, made.data))
    notes = getattr(made.data, "notes", ())
    if config.global_batch_size < default_batch:
        notes = (*notes, f"global_batch_size={config.global_batch_size}: all samples (the default is {default_batch})")
    if notes:
        emit_event(on_event, "data", {"notes": notes})
    keywords = replace(
        _session_keywords(recipe, resolved, made, run=run, device=device),
        command=command,
        init_from=config.init_from,
        allow=allow,
    )
    if is_resumed:
        # The metadata of a resumed run is already in its folder and must not change.
        keywords = replace(keywords, attach={})
    with _explain_changed_data(recipe, config, run):
        return train_run(
            made.model,
            made.data.train,
            keywords,
            loss=made.loss,
            optimizer=made.optimizer,
            evaluate=recipe_evaluation(recipe),
            val=made.data.val,
            test=made.data.test,
            on_event=on_event,
            measure=open_bench is not None,
            open_bench=open_bench,
        )


def create_run(
    recipe: Recipe, resolved: ResolvedConfig[Any], *, run: Path, load: Callable[[Any], None], device: str = "auto"
) -> dict[str, float]:
    """Create a run at step 0 whose weights are set by `load(model)`, and return the validation and test metrics."""
    data = recipe.data(resolved.config)
    resolved = limit_default_batch(resolved, data)
    made = prepare_recipe(recipe, resolved.config, data=data)
    load(made.model)
    keywords = _session_keywords(recipe, resolved, made, run=run, device=device)
    evaluate = recipe_evaluation(recipe)
    with Session.from_config(make_run_config(made.model, made.optimizer, made.data.train, keywords)) as session:
        metrics = session.evaluate(evaluate, made.data.val)
        return metrics | session.evaluate(evaluate, made.data.test, prefix="test_")


def _session_keywords(
    recipe: Recipe, resolved: ResolvedConfig[Any], made: PreparedRecipe, *, run: Path, device: str
) -> SessionKeywords:
    config = resolved.config
    return SessionKeywords(
        training=made.training,
        run=run,
        device=device,
        overrides=resolved.overrides,
        workload=made.workload.model_copy(update={"batch": resolved.batch}),
        goal=recipe.selected_goal(config),
        mode=recipe.mode,
        recipe=recipe.name,
        config=config.model_dump(mode="json"),
        attach={RECIPE_FILE: json.dumps(recipe.metadata(config, made.data)).encode()},
        outputs=partial(recipe.outputs, made.model) if recipe.supports("outputs") else None,
    )


class SharedEvaluation:
    """A recipe's evaluation, which can be distributed over several processes (training/evaluator.py)."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def __call__(self, model: Any, micro_batches: Any, /) -> dict[str, Any]:
        return self._recipe.evaluate(model, micro_batches)

    def partial_metrics(self, model: Any, micro_batches: Any, /) -> Any:
        return self._recipe.partial_metrics(model, micro_batches)

    def merge_metrics(self, model: Any, parts: list[Any], /) -> dict[str, Any]:
        return self._recipe.merge_metrics(model, parts)


def recipe_evaluation(recipe: Recipe) -> Any:
    """Return the recipe's evaluation, distributed if it has `partial_metrics`; None if it has no evaluation."""
    if recipe.supports("partial_metrics"):
        return SharedEvaluation(recipe)
    return recipe.evaluate if recipe.supports("evaluate") else None


def _workload(recipe: Recipe, config: Any, data: Splits, model: Any) -> Workload:
    if recipe.supports("describe"):
        workload = recipe.describe(config, data)
    else:
        # The description does not depend on the number of warm-up steps, which is not known yet.
        training = parse_training_config(_training_keywords(config, None))
        workload = describe_workload(model, data.train, training, recipe=recipe.name)
    # Replace the described parameter counts and layers with those of the actual model.
    counted, frozen = count_parameters(model)
    layers = tuple(sorted({*workload.layers, *layer_kinds(model)}))
    workload = workload.model_copy(update={"num_parameters": max(1, counted), "num_frozen": frozen, "layers": layers})
    if getattr(data, "is_part", False) and (samples := count_samples(data.train)) is not None:
        # A trial of a search trains on fewer samples than the recipe describes (api/trial.py).
        workload = workload.model_copy(update={"num_samples": samples, "num_steps": config.count_steps(samples)})
    return workload


def _training_keywords(config: Any, num_steps: int | None) -> dict[str, Any]:
    # Only the text recipe has an option `warmup_share`.
    share = getattr(config, "warmup_share", _WARMUP_SHARE)
    warmup = int(share * (num_steps or 0)) if config.warmup_steps == "auto" else config.warmup_steps
    options = {name: getattr(config, name) for name in TrainingOptions.model_fields}
    # Recipe.loss returns a mean over samples or a pair (sum, weight), so a batch can be split into micro-batches.
    return {**options, "warmup_steps": warmup, "split_batch": True}


@contextmanager
def _explain_changed_data(recipe: Recipe, config: Any, run: Path) -> Iterator[None]:
    """Let the recipe explain why its data differs from the data at the start of the run."""
    try:
        yield
    except DataChangedError as error:
        raise recipe.explain_changed_data(error, config, open_run(run).versions) from None


def _check_vocabulary(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Reject data with a different tokenizer or different classes: the trained weights depend on them."""
    changed = [
        # Convert through JSON, because the stored metadata has lists instead of tuples.
        name
        for name in _VOCABULARY_KEYS
        if name in before and before[name] != json.loads(json.dumps(now.get(name)))
    ]
    if changed:
        raise UsageError(
            f"this data does not have the {' and '.join(changed)} of the run",
            got="--allow data",
            try_="a new run, or data with the same; the trained weights would mean something else",
        )
