"""Your own training with global_batch_size="auto": which batch, and which learning rates go with it?"""

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from whet.base.errors import UsageError
from whet.engine.recorder import Show, show_if_it_can
from whet.engine.request import can_be_read_again, make_request, plan_by_rules
from whet.engine.rig import StepRig
from whet.engine.training import Training, read_training
from whet.engine.workload import describe
from whet.measure.batches import choose_batch
from whet.measure.kept_batch import kept_batch
from whet.measure.knee import scaling_of
from whet.measure.progress import Watch
from whet.plan.chosen_batch import ChosenBatch
from whet.step.loss import LossFunction
from whet.step.optimizer import OptimizerChoice, set_rate

LR_BATCH = 32
"""The global batch that a learning rate is taken to be meant for, unless said otherwise."""
MOST_SECONDS = 20.0
"""What finding it may take before a training; mostly it is much less."""

Given = Optimizer | OptimizerChoice


def is_open(options: dict[str, Any]) -> bool:
    """Whether the global batch is left to whet."""
    return bool(options.get("global_batch_size") == "auto")


def find_batch(rig: StepRig, optimizer: Given, *, budget: float, watch: Watch | None = None) -> ChosenBatch:
    """The knee around the rig's own batch, which the rates are meant for; the rig is left at it."""
    name = optimizer.name if isinstance(optimizer, OptimizerChoice) else type(optimizer).__name__
    return choose_batch(rig, base_rates=_rates(optimizer), scaling=scaling_of(name), budget_seconds=budget, watch=watch)


@contextlib.contextmanager
def settled(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: Given,
    options: dict[str, Any],
    may_measure: bool,
    show: Show | None = None,
) -> Iterator[tuple[Given, dict[str, Any]]]:
    """Optimizer and options of a training with a number for "auto"; an optimizer of yours has its own rates afterwards.

    The number is the run's own where one goes on, the plan's where one is given, else it is measured.
    """
    if not is_open(options):
        yield optimizer, options
        return
    options = dict(options)
    lr_batch = options.pop("lr_batch", LR_BATCH)
    run, plan = options.get("run"), options.get("plan")
    rates = _rates(optimizer) if isinstance(optimizer, OptimizerChoice) else None
    chosen = kept_batch(None if run is None else Path(run), plan=plan, base_rates=rates)
    words = {field.name: options[field.name] for field in fields(Training) if field.name in options}
    if chosen is None:
        if not may_measure:
            raise UsageError(
                'global_batch_size="auto" has to be measured', got="measure=False", try_="global_batch_size=N"
            )
        training = read_training({**words, "global_batch_size": lr_batch})
        how = {name: options[name] for name in ("device", "wishes", "workload") if name in options}
        asked = make_request(model, optimizer, data, training, **how)
        refuse_stream(data)
        with StepRig(model, optimizer, data, training, loss=loss, plan=plan_by_rules(asked)) as rig:
            chosen = find_batch(rig, optimizer, budget=MOST_SECONDS, watch=watch_of(show))
        tell(show, *chosen.lines)
    options["global_batch_size"] = chosen.batch
    training = read_training({**words, "global_batch_size": chosen.batch})
    workload = options.get("workload") or describe(model, data, training, recipe=options.get("recipe", "session"))
    num_steps = training.total_steps(workload.num_samples) or None
    numbers = {"global_batch_size": chosen.batch, "num_steps": num_steps, "batch": chosen}
    options["workload"] = workload.model_copy(update=numbers)
    with _scaled(optimizer, chosen) as scaled:
        yield scaled, options


def tell(show: Show | None, *lines: str) -> None:
    """Says what was measured, as events of a run are told."""
    for line in lines:
        show_if_it_can(show, "plan", {"changed": line})


def watch_of(show: Show | None) -> Watch | None:
    """How far a measurement is, told as an event."""
    return None if show is None else lambda progress: show_if_it_can(show, "measuring", progress.as_event())


def refuse_stream(data: Any) -> None:
    """A stream is used up by whoever reads it first."""
    if not can_be_read_again(data):
        raise UsageError("a stream cannot be measured", got=type(data).__name__, try_="tensors or a map-style dataset")


@contextlib.contextmanager
def _scaled(optimizer: Given, chosen: ChosenBatch) -> Iterator[Given]:
    if isinstance(optimizer, OptimizerChoice):
        yield replace(optimizer, lr=chosen.rates[0])
        return
    own = _rates(optimizer)
    set_rate(optimizer, chosen.factor, own)
    try:
        yield optimizer
    finally:
        set_rate(optimizer, 1.0, own)


def _rates(optimizer: Given) -> list[float]:
    if isinstance(optimizer, OptimizerChoice):
        return [optimizer.lr]
    return [float(group["lr"]) for group in optimizer.param_groups]
