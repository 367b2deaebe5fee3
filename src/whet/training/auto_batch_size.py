"""Measure the global batch size for global_batch_size="auto" and scale the learning rate to match."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from whet.autotune.batch_size import choose_batch_size, lr_scaling, recorded_batch_size
from whet.autotune.step_bench import ProgressCallback
from whet.base.errors import UsageError
from whet.config.options import SchedulerObject
from whet.plan.workload import AutoBatch
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice
from whet.training import intercept
from whet.training.keywords import SessionKeywords
from whet.training.measurement import (
    check_rereadable,
    local_bench,
    progress_callback,
    report_lines,
    stopped_by_ctrl_c,
)
from whet.training.optimizer_set import AnyOptimizer
from whet.training.run_config import make_run_config, plan_from_rules
from whet.training.schedule import set_learning_rate
from whet.training.step_bench import LocalStepBench
from whet.training.training_config import parse_training_config
from whet.training.workload import describe_workload

MAX_BATCH_SECONDS = 20.0
"""Time limit, in seconds, for finding the global batch size before a training run. It usually takes much less."""


def is_auto_batch(keywords: SessionKeywords) -> bool:
    """Return whether the global batch size is "auto"."""
    return bool(keywords.training.get("global_batch_size") == "auto")


def with_batch_size(keywords: SessionKeywords, size: int) -> SessionKeywords:
    """Return the keywords with a different global batch size."""
    return replace(keywords, training={**keywords.training, "global_batch_size": size})


def measure_batch_size(
    bench: LocalStepBench, optimizer: AnyOptimizer, *, budget: float, watch: ProgressCallback | None = None
) -> AutoBatch:
    """Find the global batch size, starting from the bench's own, for which the learning rates were chosen."""
    name = optimizer.name if isinstance(optimizer, OptimizerChoice) else type(optimizer).__name__
    return choose_batch_size(
        bench, base_rates=_learning_rates(optimizer), scaling=lr_scaling(name), budget_seconds=budget, on_progress=watch
    )


@contextmanager
def resolve_auto_batch_size(
    model: nn.Module,
    data: Any,
    keywords: SessionKeywords,
    *,
    loss: LossFunction,
    optimizer: AnyOptimizer,
    may_measure: bool,
) -> Iterator[tuple[AnyOptimizer, SessionKeywords]]:
    """Inside the `with` block, replace global_batch_size="auto" with a number and scale the learning rate to match.

    A resumed run uses its saved batch size, and a given plan provides its own. Otherwise the batch size is measured.
    """
    if not is_auto_batch(keywords):
        yield optimizer, keywords
        return
    intercept.check_fixed_batch()
    run = keywords.run
    if isinstance(keywords.training.get("schedule"), SchedulerObject):
        raise UsageError(
            "the rates of a torch scheduler cannot be scaled to a measured batch size",
            got=f'global_batch_size="auto" with {type(keywords.training["schedule"]).__name__}',
            try_="global_batch_size=N, or a schedule by name or function",
        )
    rates = _learning_rates(optimizer) if isinstance(optimizer, OptimizerChoice) else None
    batch = recorded_batch_size(None if run is None else Path(run), plan=keywords.plan, base_rates=rates)
    if batch is None:
        if not may_measure:
            raise UsageError(
                'global_batch_size="auto" has to be measured', got="measure=False", try_="global_batch_size=N"
            )
        config = make_run_config(model, optimizer, data, with_batch_size(keywords, keywords.lr_batch))
        check_rereadable(data)
        with (
            stopped_by_ctrl_c(config.on_event),
            local_bench(config, loss, plan_from_rules(config)) as bench,
        ):
            batch = measure_batch_size(
                bench, optimizer, budget=MAX_BATCH_SECONDS, watch=progress_callback(config.on_event)
            )
        report_lines(config.on_event, *batch.lines)
    keywords = with_batch_size(keywords, batch.batch)
    training = parse_training_config(keywords.training)
    workload = keywords.workload or describe_workload(model, data, training, recipe=keywords.recipe)
    size = workload.num_samples
    num_steps = training.total_steps(None if size is None else -(-size // batch.batch)) or None
    described = workload.model_copy(update={"global_batch_size": batch.batch, "num_steps": num_steps, "batch": batch})
    with _scale_learning_rate(optimizer, batch) as scaled:
        yield scaled, replace(keywords, workload=described)


@contextmanager
def _scale_learning_rate(optimizer: AnyOptimizer, batch: AutoBatch) -> Iterator[AnyOptimizer]:
    if isinstance(optimizer, OptimizerChoice):
        yield replace(optimizer, lr=batch.rates[0])
        return
    own = _learning_rates(optimizer)
    set_learning_rate(optimizer, batch.factor, own)
    try:
        yield optimizer
    finally:
        set_learning_rate(optimizer, 1.0, own)


def _learning_rates(optimizer: AnyOptimizer) -> list[float]:
    if isinstance(optimizer, OptimizerChoice):
        return [optimizer.lr]
    return [float(group["lr"]) for group in optimizer.param_groups]
