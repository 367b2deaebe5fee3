"""`whet.train`: train a model, or a recipe by name."""

import functools
import multiprocessing
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, overload

from whet.base.errors import UsageError
from whet.config.options import SchedulerObject
from whet.machine.pressure import ReadSystemState
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.training import loop
from whet.training.callback import Callback
from whet.training.callbacks.event_log import EventHandler
from whet.training.callbacks.progress_line import ProgressLine
from whet.training.loop import TrainResult
from whet.training.measurement import MeasurementStoppedError
from whet.training.tune import OpenStepBench

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from whet.config.resolve import ResolvedConfig
    from whet.step.loss import LossFunction
    from whet.step.optimizers import OptimizerChoice
    from whet.training.evaluator import Evaluate


@overload
def train(
    model: "nn.Module",
    data: Any,
    *,
    loss: "LossFunction",
    optimizer: "Optimizer | OptimizerChoice",
    evaluate: "Evaluate | None" = None,
    val: Any = None,
    test: Any = None,
    on_event: EventHandler | Literal["line"] | None = "line",
    measure: bool = True,
    open_bench: OpenStepBench | None = None,
    # begin generated keywords (tools/keywords.py)
    global_batch_size: int | Literal["auto"] | None = None,
    epochs: int = 1,
    max_steps: int | None = None,
    schedule: Literal["constant", "linear", "cosine", "plateau"]
    | Callable[[int], float]
    | SchedulerObject
    | dict[str, Any] = "constant",
    warmup_steps: int = 0,
    clip: float | None = None,
    ema: bool = False,
    verify_resume: bool = False,
    seed: int = 0,
    eval_every: int | Literal["auto"] = "auto",
    patience: int | None = None,
    epochs_per_session: int | None = None,
    schedule_interval: Literal["step", "epoch", "auto"] = "auto",
    shuffle: bool | Literal["auto"] = "auto",
    collate_fn: Callable[[Any], Any] | None = None,
    split_batch: bool | Literal["auto"] = "auto",
    lr_batch: int = 32,
    run: str | Path | None = None,
    device: str = "auto",
    overrides: Mapping[str, Scalar] | None = None,
    plan: Plan | None = None,
    workload: Workload | None = None,
    goal: str | None = None,
    mode: Literal["auto", "min", "max"] = "auto",
    init_from: str | Path | None = None,
    allow: Collection[str] = (),
    callbacks: Sequence[Callback] = (),
    register: Mapping[str, Any] | None = None,
    read_sensors: ReadSystemState | None = None,
    outputs: Callable[[Any], Any] | None = None,
    # end generated keywords
    **unknown: Never,
) -> TrainResult: ...
@overload
def train(
    model: str,
    data: str | Path | None = None,
    *,
    run: str | Path | None = None,
    device: str = "auto",
    allow: Collection[str] = (),
    on_event: EventHandler | Literal["line"] | None = "line",
    measure: bool = True,
    config: str | Path | None = None,
    **settings: Any,
) -> TrainResult: ...


# help() shows the signature of the first overload.
@functools.wraps(loop.train, assigned=())
def train(model: Any, data: Any = None, **keywords: Any) -> TrainResult:
    """Train a model: probe the machine, plan, train and save checkpoints. The same call with the same `run` resumes.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> data = (torch.rand(64, 2), torch.rand(64, 1))
    >>> result = train(
    ...     model,
    ...     data,
    ...     loss=lambda micro: torch.nn.functional.mse_loss(model(micro.x), micro.y),
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     global_batch_size=16,
    ...     epochs=2,
    ...     on_event=None,
    ... )
    >>> result.step, result.state
    (8, 'done')

    A recipe is trained by its name or file, with the options of `whet train` as keywords (docs/keys.md); options in a
    group are a dict. Without `run`, the next runs/NAME-NNN is used, as on the command line:

    >>> train("text", data="reviews.csv", epochs=3, arch={"layers": 2})  # doctest: +SKIP

    Args:
        model: An nn.Module, or the name of a recipe.
        data: A DataLoader, tensors, arrays, a dict of them, a dataset or an iterable (docs/data.md); of a recipe, a
            file or folder.
        loss: Called with a micro-batch. Returns the mean over its samples, a pair (sum, weight), a dict with "loss" or
            an output with `.loss`. A torch loss such as F.cross_entropy is called as loss(model(x), y).
        optimizer: An optimizer of torch over the parameters of the model, or a `whet.OptimizerChoice`.
        evaluate: Called with the model and micro-batches of `val`. Returns metrics, optionally with a confusion matrix
            and samples (training/metrics.py).
        val: Data that is evaluated during training.
        test: Data that is evaluated once after the last step, with the weights of the best `goal` on `val`.
        on_event: Called with every event. "line" draws a progress line on standard error; None is silent.
        measure: Let a new run that is long enough measure first which plan is fastest. The measured steps do not affect
            training (docs/measure.md).
        open_bench: Opens the same training run in a separate process for measuring.
        config: Of a recipe: a TOML or YAML file with options.

    With global_batch_size="auto", the batch size is measured on this machine, and your learning rate is scaled from
    `lr_batch` samples to that size. The run records both values.

    Keywords:
        global_batch_size: Samples per optimizer step; taken from a DataLoader; auto measures a size and scales lr.
        epochs: Passes over the training data. Default: 1.
        max_steps: Stop after this many optimizer steps, if earlier.
        schedule: How the learning rate falls after the warm-up: a name, a function, a torch scheduler, or a dict of
            them for several optimizers. Default: "constant".
        warmup_steps: Steps until the full learning rate. Default: 0.
        clip: Maximum gradient norm; not clipped if unset.
        ema: Evaluate with an exponential moving average of the weights. Default: False.
        verify_resume: When a run resumes, first repeat the steps between its last two checkpoints and compare. Default:
            False.
        seed: Decides the order of samples, the initial weights and all random draws. Default: 0.
        eval_every: Steps between evaluations; auto: once per epoch. Default: "auto".
        patience: Stop after this many evaluations without a better goal.
        epochs_per_session: Stop after this many epochs; the same command resumes.
        schedule_interval: When a torch scheduler steps; auto only for OneCycleLR, CyclicLR and ReduceLROnPlateau.
            Default: "auto".
        shuffle: Reshuffle the samples every epoch; auto: yes, or as the DataLoader does. Default: "auto".
        collate_fn: Makes a batch from a list of samples, as for a DataLoader; called once per global batch.
        split_batch: Whether the loss of a batch is the mean over its samples, so that it may be computed in parts;
            auto: tested before the first step; False: the loss needs the whole batch. Default: "auto".
        lr_batch: With global_batch_size="auto": the batch size that the learning rate is meant for. Default: 32.
        run: Run folder; without one, nothing is written. The same call with the same folder resumes.
        device: auto, mps, cuda, cuda:1 or cpu. Default: "auto".
        overrides: Settings of the plan that you fix: {"micro_batch": 8, "precision": "bf16"} (docs/rules).
        plan: Plan of a new run, made by `whet.tune` or `whet.make_plan`.
        workload: Description of the training run for the plan; by default it is derived from the model and the data.
        goal: Metric that selects the best checkpoint and drives early stopping.
        mode: Whether a lower ("min") or a higher ("max") goal is better; "auto" follows from its name. Default: "auto".
        init_from: Run or import whose weights a new run starts with.
        allow: What may differ from the original run when it resumes: "data", "batch" or "lr".
        callbacks: Instances of `whet.Callback` (docs/callbacks.md).
        register: Your own objects with state, by name, which are saved and restored with the run (docs/own-loops.md).
        read_sensors: Function that reads heat, power and memory pressure; by default from the sensors of this machine.
        outputs: For causal models: a function from a micro-batch to outputs (batch, length, ...), to verify causality.
    """
    _check_not_imported_by_a_worker()
    if isinstance(model, str):
        return train_by_name(model, data, **keywords)
    return loop.train(model, data, **keywords)


def _check_not_imported_by_a_worker() -> None:
    """Raise UsageError in a spawned process that imports the user's program and thereby starts training again."""
    # multiprocessing uses the same attribute for its own error about a missing `if __name__ == "__main__":`.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "a data worker imported this program and would train again",
            got="whet.train outside a function, in a process that was spawned",
            try_='def main(): ... and if __name__ == "__main__": main()',
        )


def train_by_name(
    what: str,
    data: str | Path | None = None,
    *,
    run: str | Path | None = None,
    device: str = "auto",
    allow: Collection[str] = (),
    on_event: EventHandler | Literal["line"] | None = "line",
    measure: bool = True,
    config: str | Path | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a recipe, given by name or file, in this process, like `whet train`."""
    # Imported here, because training your own model needs no recipe.
    from whet.api.autotune import recipe_bench
    from whet.config.resolve import resolve_config
    from whet.recipes.recipe import load_recipe
    from whet.recipes.runner import train_recipe
    from whet.run.folder import next_run_path

    recipe = load_recipe(what)
    file = None if config is None else Path(config)
    values = {**({} if data is None else {"data": str(data)}), **settings}
    resolved = resolve_config(recipe.Config, values=values, file=file, can_measure=True)
    recipe.describe(resolved.config)
    recipe.check_installed(resolved.config)
    path = Path(run) if run is not None else next_run_path(Path("runs"), recipe=recipe.name)
    command = _command(what, values, file, device=device, run=path)
    for key, is_wanted in (("seeds", resolved.config.seeds > 1), ("selfplay", getattr(resolved.config, "selfplay", 0))):
        if is_wanted:
            got = f"{key}={getattr(resolved.config, key)}"
            raise UsageError("this is for the command line: it trains several runs", got=got, try_=shlex.join(command))
    line = ProgressLine(recipe.name, epochs=resolved.config.epochs)
    handler = line if on_event == "line" else on_event
    if resolved.is_batch_open:
        resolved = _resolve_batch(what, resolved, path, device=device, measure=measure)
    try:
        result = train_recipe(
            recipe,
            resolved,
            run=path,
            device=device,
            command=command,
            on_event=handler,
            allow=(allow,) if isinstance(allow, str) else tuple(allow),
            open_bench=partial(recipe_bench, what, resolved, device=device) if measure else None,
        )
    except MeasurementStoppedError as stop:
        return loop.measurement_stopped(stop)
    if on_event == "line" and result.state == "done":
        line.print_line(loop.describe_result(result))
    return result


def _resolve_batch(
    what: str, resolved: "ResolvedConfig[Any]", path: Path, *, device: str, measure: bool
) -> "ResolvedConfig[Any]":
    """Replace global_batch_size=auto with the batch size of the existing run or with a measured one."""
    from whet.api.autotune import resolve_auto_batch_size, restore_auto_batch
    from whet.config.resolve import auto_batch_error

    existing = restore_auto_batch(path, resolved)
    if existing is None and not measure:
        raise auto_batch_error("measure=False")
    return existing or resolve_auto_batch_size(what, resolved, device=device)


def _command(what: str, values: Mapping[str, Any], file: Path | None, *, device: str, run: Path) -> list[str]:
    """Return the command line of the same training run, which also resumes it."""
    from whet.config.sources import as_argument, flatten

    settings = [as_argument(key, value) for key, value in flatten(dict(values)).items()]
    options = [*(["--config", str(file)] if file else []), *(["--device", device] if device != "auto" else [])]
    return ["whet", "train", what, *settings, *options, "--run", str(run)]
