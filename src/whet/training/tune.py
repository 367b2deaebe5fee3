"""Measure plans for a training: the fastest settings, and the global batch size."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
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
from whet.training.setup import RunConfig, is_rereadable, make_run_config, plan_from_rules
from whet.training.step_bench import LocalStepBench, evidence_key
from whet.training.training_config import TrainingConfig, parse_training_config
from whet.training.workload import describe_workload

LR_BATCH = 32
"""The global batch size that a learning rate is assumed to be tuned for; `lr_batch` replaces it."""
MAX_BATCH_SECONDS = 20.0
"""Time limit for finding the global batch size before a training. It usually takes much less."""
MIN_BUDGET_SECONDS = 5.0
"""The smallest useful budget: a shorter search finds almost nothing."""
_BATCH_SHARE = 1 / 3
"""The largest share of a tuning budget that finding the global batch size may take."""
_TIMED_STEPS = 5
"""Number of steps that estimate the duration of a run."""
_MIN_STEPS = 100
"""A run with fewer steps is not measured."""

AnyOptimizer = Optimizer | OptimizerChoice

OpenStepBench = Callable[[], AbstractContextManager[StepBench]]
"""Opens the same training in a separate process."""


def tune(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: AnyOptimizer,
    device: str = "auto",
    overrides: Mapping[str, Scalar] | None = None,
    budget: float = 60.0,
    on_event: EventHandler | Literal["line"] | None = "line",
    lr_batch: int = LR_BATCH,
    **training: Any,
) -> Plan:
    """Search for the fastest plan of a training within `budget` seconds, and return it with its measurements.

    The search times real optimizer steps of your model on your data. It restores the model, the optimizer and the
    random generators afterwards. Pass the plan to `train` or `Session` as `plan=`. All other keywords are those of
    `train` that define the training (global_batch_size, epochs, max_steps, clip, ema, ...). `plan.precision` is a
    setting, and `plan.settings["precision"].reason` is its reason. Progress and results are printed to standard error;
    `on_event` replaces that with a function, or with None for silence.

    global_batch_size="auto" finds the global batch size first, in at most a third of the budget. It is stored in
    `plan.workload.batch`, together with your learning rate scaled from `lr_batch` samples to that size. `train` uses
    both if you pass this plan and global_batch_size="auto".
    """
    has_auto_batch = is_auto_batch(training)
    if has_auto_batch:
        training = {**training, "global_batch_size": lr_batch}
    handler = ProgressLine("tune") if on_event == "line" else on_event
    config = make_run_config(
        model,
        optimizer,
        data,
        parse_training_config(training),
        device=device,
        overrides=overrides,
        on_event=handler,
    )
    if not (isinstance(budget, int | float) and budget > 0):
        raise UsageError("budget must be above 0", got=repr(budget), try_="budget=60, in seconds")
    check_rereadable(data)
    watch = progress_callback(handler)
    with _bench(config, loss, plan_from_rules(config)) as bench:
        batch, left = None, budget
        if has_auto_batch:
            batch = measure_batch_size(bench, optimizer, budget=_BATCH_SHARE * budget, watch=watch)
            left -= batch.spent_seconds
            report_lines(handler, *batch.lines)
        result = search(bench.plan, bench, budget_seconds=left, on_progress=watch)
    if result.trials:
        cache.save(bench.about, result)
    report_lines(handler, *result.summary)
    return with_auto_batch(result.applied_to(bench.plan), batch)


def tuned_plan(config: RunConfig, loss: LossFunction, *, open_bench: OpenStepBench | None = None) -> Plan | None:
    """Measure the plan of a new run. Return None if the run is too short to repay it or if measuring fails."""
    plan, on_event = plan_from_rules(config), config.on_event
    num_steps = plan.workload.num_steps
    if num_steps is None or num_steps < _MIN_STEPS or not is_rereadable(config.data):
        return None
    about = evidence_key(plan, config.model)
    known = cache.load(about)
    if known is not None:
        report_lines(on_event, f"measured before on this machine: {known.summary[0]}")
        return known.applied_to(plan)
    try:
        measured = _measure(config, loss, plan, num_steps, open_bench=open_bench)
    except Exception as error:
        # A failed measurement must not stop the run. If the run fails for the same reason, it raises the error itself.
        reason = error.reason if isinstance(error, ProbeFailedError) else f"{type(error).__name__}: {error}"
        report_lines(on_event, f"not measured: {(reason.splitlines() or [reason])[0]}")
        return None
    if measured is None:
        return None
    plan, result = measured
    report_lines(on_event, *result.summary)
    if not result.trials:
        return None
    cache.save(about, result)
    return result.applied_to(plan)


def _measure(
    config: RunConfig, loss: LossFunction, plan: Plan, num_steps: int, *, open_bench: OpenStepBench | None
) -> tuple[Plan, TuningResult] | None:
    """Return the plan and its search result; None if the run is too short to repay measuring."""
    watch = progress_callback(config.on_event)
    with _bench(config, loss, plan) as bench:
        plan = bench.plan
        seconds = _estimate_run_seconds(bench, num_steps)
        budget = budget_seconds(seconds)
        length = f"about {format_seconds(seconds)}"
        if budget < MIN_BUDGET_SECONDS:
            report_lines(config.on_event, f"not measured: a run of {length} would not repay it")
            return None
        report_lines(
            config.on_event,
            f"measuring which plan is fastest, {format_seconds(budget)} at most; this run would take {length}",
        )
        if open_bench is None:
            return plan, search(plan, bench, budget_seconds=budget, on_progress=watch)
    return plan, _search_in_process(open_bench, plan, budget=budget, watch=watch)


def _bench(config: RunConfig, loss: LossFunction, plan: Plan) -> LocalStepBench:
    return LocalStepBench(config.model, config.optimizer, config.data, config.training, loss=loss, plan=plan)


def _search_in_process(
    open_bench: OpenStepBench, plan: Plan, *, budget: float, watch: ProgressCallback | None
) -> TuningResult:
    """Search in a separate process. If it cannot start, return an empty result, which keeps the plan from rules."""
    try:
        with open_bench() as bench:
            return search(plan, bench, budget_seconds=budget, on_progress=watch)
    except ProbeFailedError as error:
        return TuningResult(summary=(f"not measured: {error.reason}",))


def _estimate_run_seconds(bench: LocalStepBench, num_steps: int) -> float:
    """Estimate the duration of the whole run under the rule-based plan by timing a few steps."""
    prepared = bench.prepare({}, seconds=MIN_BUDGET_SECONDS)
    seconds = median(prepared.step(index) for index in range(_TIMED_STEPS))
    prepared.close()
    return prepared.preparation_seconds + num_steps * seconds


# --- the global batch size --------------------------------------------------------------------------------------------


def is_auto_batch(options: Mapping[str, Any]) -> bool:
    """Return whether the global batch size is "auto"."""
    return bool(options.get("global_batch_size") == "auto")


def measure_batch_size(
    bench: LocalStepBench, optimizer: AnyOptimizer, *, budget: float, watch: ProgressCallback | None = None
) -> AutoBatch:
    """Find the global batch size. The search starts from that of the bench, which the learning rates are tuned for."""
    name = optimizer.name if isinstance(optimizer, OptimizerChoice) else type(optimizer).__name__
    return choose_batch_size(
        bench, base_rates=_learning_rates(optimizer), scaling=lr_scaling(name), budget_seconds=budget, on_progress=watch
    )


@contextmanager
def resolve_auto_batch_size(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: AnyOptimizer,
    options: dict[str, Any],
    may_measure: bool,
    on_event: EventHandler | None = None,
) -> Iterator[tuple[AnyOptimizer, dict[str, Any]]]:
    """Replace global_batch_size="auto" with a number, and scale the learning rate for it while entered.

    A resumed run uses its saved number, and a given plan provides its number. Otherwise the number is measured.
    """
    if not is_auto_batch(options):
        yield optimizer, options
        return
    options = dict(options)
    lr_batch = options.pop("lr_batch", LR_BATCH)
    run, plan = options.get("run"), options.get("plan")
    rates = _learning_rates(optimizer) if isinstance(optimizer, OptimizerChoice) else None
    batch = recorded_batch_size(None if run is None else Path(run), plan=plan, base_rates=rates)
    training = {name: options[name] for name in TrainingConfig.model_fields if name in options}
    if batch is None:
        if not may_measure:
            raise UsageError(
                'global_batch_size="auto" has to be measured', got="measure=False", try_="global_batch_size=N"
            )
        base = parse_training_config({**training, "global_batch_size": lr_batch})
        given = {name: options[name] for name in ("device", "overrides", "workload") if name in options}
        config = make_run_config(model, optimizer, data, base, **given)
        check_rereadable(data)
        with _bench(config, loss, plan_from_rules(config)) as bench:
            batch = measure_batch_size(bench, optimizer, budget=MAX_BATCH_SECONDS, watch=progress_callback(on_event))
        report_lines(on_event, *batch.lines)
    options["global_batch_size"] = batch.batch
    resolved = parse_training_config({**training, "global_batch_size": batch.batch})
    workload = options.get("workload")
    if workload is None:
        workload = describe_workload(model, data, resolved, recipe=options.get("recipe", "session"))
    num_steps = resolved.total_steps(workload.num_samples) or None
    options["workload"] = workload.model_copy(
        update={"global_batch_size": batch.batch, "num_steps": num_steps, "batch": batch}
    )
    with _scale_learning_rate(optimizer, batch) as scaled:
        yield scaled, options


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


# --- reports ----------------------------------------------------------------------------------------------------------


def report_lines(on_event: EventHandler | None, *lines: str) -> None:
    """Emit each line as an event of kind "plan"."""
    for line in lines:
        emit_event(on_event, "plan", {"message": line})


def progress_callback(on_event: EventHandler | None) -> ProgressCallback | None:
    """Return a callback that emits the progress of a measurement as events; None without a handler."""
    return None if on_event is None else lambda progress: emit_event(on_event, "measuring", progress.as_event())


def check_rereadable(data: Any) -> None:
    """Raise for an iterable dataset: measuring would consume samples that training needs."""
    if not is_rereadable(data):
        raise UsageError("a stream cannot be measured", got=type(data).__name__, try_="tensors or a map-style dataset")
