"""Measure plans for a training: the fastest settings, and the global batch size."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from whet.autotune import cache
from whet.autotune.batch_size import choose_batch_size, lr_scaling, recorded_batch_size
from whet.autotune.result import TuningResult, budget_seconds
from whet.autotune.search import search
from whet.autotune.step_bench import ProbeFailedError, ProgressCallback, StepBench
from whet.base.errors import UsageError
from whet.base.units import format_seconds
from whet.plan.plan import Plan, with_auto_batch
from whet.plan.setting import Scalar
from whet.plan.workload import AutoBatch
from whet.step.loss import LossFunction
from whet.step.optimizers import OptimizerChoice, set_learning_rate
from whet.training.callbacks.event_log import EventHandler, emit_event
from whet.training.callbacks.progress import ProgressLine
from whet.training.checks import check_types
from whet.training.setup import RunConfig, is_rereadable, make_run_config, plan_from_rules
from whet.training.step_bench import LocalStepBench, evidence_key
from whet.training.training_config import TrainingConfig, parse_training_config
from whet.training.workload import describe_workload

LR_BATCH = 32
"""The global batch that a learning rate is taken to be meant for, unless said otherwise."""
MAX_BATCH_SECONDS = 20.0
"""What finding it may take before a training; mostly it is much less."""

AnyOptimizer = Optimizer | OptimizerChoice


def is_auto_batch(options: dict[str, Any]) -> bool:
    """Whether the global batch is left to whet."""
    return bool(options.get("global_batch_size") == "auto")


def measure_batch_size(
    rig: LocalStepBench, optimizer: AnyOptimizer, *, budget: float, watch: ProgressCallback | None = None
) -> AutoBatch:
    """The knee around the rig's own batch, which the rates are meant for; the rig is left at it."""
    name = optimizer.name if isinstance(optimizer, OptimizerChoice) else type(optimizer).__name__
    return choose_batch_size(
        rig, base_rates=_learning_rates(optimizer), scaling=lr_scaling(name), budget_seconds=budget, on_progress=watch
    )


@contextlib.contextmanager
def resolve_auto_batch_size(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: AnyOptimizer,
    options: dict[str, Any],
    may_measure: bool,
    show: EventHandler | None = None,
) -> Iterator[tuple[AnyOptimizer, dict[str, Any]]]:
    """Optimizer and options of a training with a number for "auto"; an optimizer of yours has its own rates afterwards.

    The number is the run's own where one goes on, the plan's where one is given, else it is measured.
    """
    if not is_auto_batch(options):
        yield optimizer, options
        return
    options = dict(options)
    lr_batch = options.pop("lr_batch", LR_BATCH)
    run, plan = options.get("run"), options.get("plan")
    rates = _learning_rates(optimizer) if isinstance(optimizer, OptimizerChoice) else None
    chosen = recorded_batch_size(None if run is None else Path(run), plan=plan, base_rates=rates)
    words = {field.name: options[field.name] for field in fields(TrainingConfig) if field.name in options}
    if chosen is None:
        if not may_measure:
            raise UsageError(
                'global_batch_size="auto" has to be measured', got="measure=False", try_="global_batch_size=N"
            )
        training = parse_training_config({**words, "global_batch_size": lr_batch})
        how = {name: options[name] for name in ("device", "wishes", "workload") if name in options}
        asked = make_run_config(model, optimizer, data, training, **how)
        check_rereadable(data)
        with LocalStepBench(model, optimizer, data, training, loss=loss, plan=plan_from_rules(asked)) as rig:
            chosen = measure_batch_size(rig, optimizer, budget=MAX_BATCH_SECONDS, watch=progress_callback(show))
        report_lines(show, *chosen.lines)
    options["global_batch_size"] = chosen.batch
    training = parse_training_config({**words, "global_batch_size": chosen.batch})
    workload = options.get("workload") or describe_workload(
        model, data, training, recipe=options.get("recipe", "session")
    )
    num_steps = training.total_steps(workload.num_samples) or None
    numbers = {"global_batch_size": chosen.batch, "num_steps": num_steps, "batch": chosen}
    options["workload"] = workload.model_copy(update=numbers)
    with _scale_learning_rate(optimizer, chosen) as scaled:
        yield scaled, options


def report_lines(show: EventHandler | None, *lines: str) -> None:
    """Says what was measured, as events of a run are told."""
    for line in lines:
        emit_event(show, "plan", {"message": line})


def progress_callback(show: EventHandler | None) -> ProgressCallback | None:
    """How far a measurement is, told as an event."""
    return None if show is None else lambda progress: emit_event(show, "measuring", progress.as_event())


def check_rereadable(data: Any) -> None:
    """A stream is used up by whoever reads it first."""
    if not is_rereadable(data):
        raise UsageError("a stream cannot be measured", got=type(data).__name__, try_="tensors or a map-style dataset")


@contextlib.contextmanager
def _scale_learning_rate(optimizer: AnyOptimizer, chosen: AutoBatch) -> Iterator[AnyOptimizer]:
    if isinstance(optimizer, OptimizerChoice):
        yield replace(optimizer, lr=chosen.rates[0])
        return
    own = _learning_rates(optimizer)
    set_learning_rate(optimizer, chosen.factor, own)
    try:
        yield optimizer
    finally:
        set_learning_rate(optimizer, 1.0, own)


def _learning_rates(optimizer: AnyOptimizer) -> list[float]:
    if isinstance(optimizer, OptimizerChoice):
        return [optimizer.lr]
    return [float(group["lr"]) for group in optimizer.param_groups]


MIN_BUDGET_SECONDS = 5.0
"""A search that may take less finds out next to nothing."""
_TIMED_STEPS = 5
_BATCH_SHARE = 1 / 3
_MIN_STEPS = 100
"""Your loss is not called for measuring where a run is shorter."""

OpenStepBench = Callable[[], AbstractContextManager[StepBench]]
"""How the same training is opened in a process of its own, where it can be."""


def tune(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: Optimizer | OptimizerChoice,
    device: str = "auto",
    overrides: Mapping[str, Scalar] | None = None,
    budget: float = 60.0,
    show: EventHandler | Literal["line"] | None = "line",
    lr_batch: int = LR_BATCH,
    **training: Any,
) -> Plan:
    """The fastest plan that could be found for a training within `budget` seconds, with its evidence.

    Times real optimizer steps of your model on your data; model, optimizer and generators are afterwards as they were.
    Give the plan to `train` or `Session` as `plan=`. All other keywords are those of `train` that decide what is
    trained (global_batch_size, epochs, max_steps, clip, ema, ...). `plan.precision` is a setting,
    `plan.settings["precision"].reason` why. How far it is, and what was found, is said on standard error; `show` may be
    a function that is told instead, or None for silence.

    With global_batch_size="auto" the knee of the curve is found first, in a third of the budget: `plan.workload.batch`
    has it, and your learning rate for it, which is taken to be meant for `lr_batch` samples. `train` with this plan and
    global_batch_size="auto" takes both.
    """
    check_types(model, optimizer, "max")
    has_open_batch = is_auto_batch(training)
    if has_open_batch:
        training = {**training, "global_batch_size": lr_batch}
    asked = make_run_config(model, optimizer, data, parse_training_config(training), device=device, overrides=overrides)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UsageError("budget must be above 0", got=repr(budget), try_="budget=60, in seconds")
    check_rereadable(data)
    told = ProgressLine("tune") if show == "line" else show
    watch = progress_callback(told)
    with _bench(asked, loss, plan_from_rules(asked)) as rig:
        chosen, left = None, budget
        if has_open_batch:
            chosen = measure_batch_size(rig, optimizer, budget=_BATCH_SHARE * budget, watch=watch)
            left -= chosen.spent_seconds
            report_lines(told, *chosen.lines)
        found = search(rig.plan, rig, budget_seconds=left, on_progress=watch)
    if found.trials:
        cache.save(rig.about, found)
    report_lines(told, *found.words)
    return with_auto_batch(found.applied_to(rig.plan), chosen)


def tuned_plan(
    asked: RunConfig, loss: LossFunction, *, open_bench: OpenStepBench | None = None, show: EventHandler | None = None
) -> Plan | None:
    """The plan for a new run, measured if the run is long enough to earn it back; None, and why, if it is not."""
    plan = plan_from_rules(asked)
    num_steps = plan.workload.num_steps
    if num_steps is None or num_steps < _MIN_STEPS or not is_rereadable(asked.data):
        return None
    about = evidence_key(plan, asked.model)
    found = cache.load(about)
    if found is not None:
        report_lines(show, f"measured before on this machine: {found.words[0]}")
        return found.applied_to(plan)
    try:
        measured = _measure(asked, loss, plan, num_steps, open_bench=open_bench, show=show)
    except Exception as error:
        # Where the run itself fails too, it will say so in its own words.
        reason = error.reason if isinstance(error, ProbeFailedError) else f"{type(error).__name__}: {error}"
        report_lines(show, f"not measured: {(reason.splitlines() or [reason])[0]}")
        return None
    if measured is None:
        return None
    plan, found = measured
    report_lines(show, *found.words)
    if not found.trials:
        return None
    cache.save(about, found)
    return found.applied_to(plan)


def _measure(
    asked: RunConfig,
    loss: LossFunction,
    plan: Plan,
    num_steps: int,
    *,
    open_bench: OpenStepBench | None,
    show: EventHandler | None,
) -> tuple[Plan, TuningResult] | None:
    """What was found, and the plan it is about; None, and why, for a run that would not earn it back."""
    with _bench(asked, loss, plan) as rig:
        plan = rig.plan
        seconds = _run_seconds(rig, num_steps)
        budget = budget_seconds(seconds)
        if budget < MIN_BUDGET_SECONDS:
            report_lines(show, f"not measured: a run of about {format_seconds(seconds)} would not earn it back")
            return None
        expected = f"this run would take about {format_seconds(seconds)}"
        report_lines(show, f"measuring what is fastest here, {format_seconds(budget)} at most; {expected}")
        if open_bench is None:
            return plan, search(plan, rig, budget_seconds=budget, on_progress=progress_callback(show))
    return plan, _search_in_process(open_bench, plan, budget=budget, watch=progress_callback(show))


def _bench(asked: RunConfig, loss: LossFunction, plan: Plan) -> LocalStepBench:
    return LocalStepBench(asked.model, asked.optimizer, asked.data, asked.training, loss=loss, plan=plan)


def _search_in_process(
    open_bench: OpenStepBench, plan: Plan, *, budget: float, watch: ProgressCallback | None
) -> TuningResult:
    """In a process of its own; one that cannot even start is told of, and the rules hold."""
    try:
        with open_bench() as rig:
            return search(plan, rig, budget_seconds=budget, on_progress=watch)
    except ProbeFailedError as error:
        return TuningResult(words=(f"not measured: {error.reason}",))


def _run_seconds(rig: LocalStepBench, num_steps: int) -> float:
    """How long all steps will take by the rules, from a few of them."""
    prepared = rig.prepare({}, seconds=MIN_BUDGET_SECONDS)
    seconds = median(prepared.step(index) for index in range(_TIMED_STEPS))
    prepared.close()
    return prepared.preparation_seconds + num_steps * seconds
