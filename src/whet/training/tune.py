"""Measure plans for a training run: the fastest settings and the global batch size."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from typing import Any, Literal, Never

from torch import nn
from torch.optim import Optimizer

from whet.autotune import cache
from whet.autotune.candidates import candidates, device_kind
from whet.autotune.process_bench import EarlyProcess
from whet.autotune.result import TuningResult, budget_seconds, compile_budget_seconds, cuda_budget_seconds
from whet.autotune.search import search
from whet.autotune.statistics import steps_per_visit
from whet.autotune.step_bench import ProbeFailedError, ProgressCallback, StepBench, TuningProgress
from whet.base.errors import UsageError, WhetError
from whet.base.units import GB, format_seconds
from whet.config.options import SchedulerObject
from whet.distributed.group import current_group
from whet.machine.pressure import read_system_state
from whet.plan.plan import Plan, make_plan_again, with_auto_batch
from whet.plan.setting import Scalar
from whet.plan.values import names_of
from whet.plan.workload import Workload
from whet.step.loss import LossFunction
from whet.training import intercept
from whet.training.auto_batch_size import is_auto_batch, measure_batch_size, with_batch_size
from whet.training.callbacks.event_log import EventHandler, emit_event
from whet.training.callbacks.progress_line import ProgressLine
from whet.training.keywords import SessionKeywords
from whet.training.measurement import (
    check_rereadable,
    local_bench,
    progress_callback,
    report_lines,
    stopped_by_ctrl_c,
)
from whet.training.optimizer_set import AnyOptimizer
from whet.training.resume import run_exists
from whet.training.run_config import RunConfig, is_rereadable, make_run_config, plan_from_rules
from whet.training.run_context import RunContext
from whet.training.shipped_bench import shipped_bench, start_early
from whet.training.step_bench import LocalStepBench, evidence_key

MIN_BUDGET_SECONDS = 5.0
"""The smallest useful budget in seconds; a shorter search finds almost nothing."""
_BATCH_SHARE = 1 / 3
"""Maximum fraction of a tuning budget for finding the global batch size."""
_MIN_SHIPPING_SECONDS = 15.0
"""Minimum budget in seconds for another process: with less, starting it would leave no time for trials."""
_MIN_STEPS_TO_START_EARLY, _MIN_CORES_TO_START_EARLY = 20_000, 4
_MIN_MEMORY_TO_START_EARLY = 8 * GB
"""Runs with at least this many steps are probably measured in another process. On a GPU with enough free cores and
memory, it is started early, while the first steps are timed."""
_MAX_START_SHARE = 1 / 4
"""Maximum fraction of the budget for starting another process. Beyond it, this process measures instead."""
_MIN_SEARCH_SHARE = 1 / 2
"""Minimum fraction of a budget that remains for the search, however long the process takes to start."""
_TIMED_VISITS, _TIMED_SECONDS = 5, 0.3
"""Minimum number of visits to time when estimating the length of a run, and their minimum total seconds.

A visit is one step, or as many steps of a tiny model as take 20 ms. Pauses of a busy core hit few of such steps and
still take much of their time, so leaving out the slowest steps would leave out the pauses.
"""
_SILENT_SECONDS = 1.0
"""Progress of the timed steps is reported after this many seconds."""
_MIN_STEPS = 100
"""Runs with fewer steps are not measured."""
_MIN_STEPS_TO_ADVISE = 1_000
_MIN_SECONDS_TO_ADVISE = 60.0
"""For runs shorter than this many seconds, measuring is not recommended."""

OpenStepBench = Callable[[], AbstractContextManager[StepBench]]
"""A function that opens the same training run in a separate process."""


def tune(
    model: nn.Module,
    data: Any,
    *,
    loss: LossFunction,
    optimizer: AnyOptimizer,
    budget: float = 60.0,
    on_event: EventHandler | Literal["line"] | None = "line",
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
    device: str = "auto",
    overrides: Mapping[str, Scalar] | None = None,
    workload: Workload | None = None,
    # end generated keywords
    **unknown: Never,
) -> Plan:
    """Search for the fastest plan of a training run within `budget` seconds and return it with its measurements.

    The search times real optimizer steps of your model on your data. Afterward, it restores the model, the optimizer
    and the random generators. Pass the plan to `train` or `Session` as `plan=`. `plan.precision` is a setting, and
    `plan.settings["precision"].reason` is its reason. Progress and results are printed to standard error; pass a
    function as `on_event` to receive them instead, or None for no output.

    With global_batch_size="auto", the search first finds the global batch size in at most a third of the budget. It is
    stored in `plan.workload.batch`, together with your learning rate scaled from `lr_batch` samples to that size.
    `train` uses both if you pass this plan and global_batch_size="auto".

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
        device: auto, mps, cuda, cuda:1 or cpu. Default: "auto".
        overrides: Settings of the plan that you fix: {"micro_batch": 8, "precision": "bf16"} (docs/rules).
        workload: Description of the training run for the plan; by default it is derived from the model and the data.
    """
    handler = ProgressLine("tune") if on_event == "line" else on_event
    keywords = SessionKeywords.from_call({**locals(), "on_event": handler})
    has_auto_batch = is_auto_batch(keywords)
    if has_auto_batch:
        keywords = with_batch_size(keywords, lr_batch)
    config = make_run_config(model, optimizer, data, keywords)
    if not (isinstance(budget, int | float) and budget > 0):
        raise UsageError("budget must be above 0", got=repr(budget), try_="budget=60, in seconds")
    check_rereadable(data)
    if intercept.active() is not None:
        # While the calling function is proved or benchmarked, another measurement would only cost time.
        if has_auto_batch:
            intercept.check_fixed_batch()
        return plan_from_rules(config)
    watch = progress_callback(handler)
    with local_bench(config, loss, plan_from_rules(config)) as bench:
        batch, left = None, budget
        if has_auto_batch:
            batch = measure_batch_size(bench, optimizer, budget=_BATCH_SHARE * budget, watch=watch)
            left -= batch.spent_seconds
            report_lines(handler, *batch.lines)
    config = replace(config, training=bench.training)
    result = _search(config, loss, bench.plan, budget=left, watch=watch)
    if result.trials:
        cache.save(bench.about, result)
    report_lines(handler, *result.summary)
    return with_auto_batch(result.applied_to(bench.plan), batch)


def with_measured_plan(config: RunConfig, loss: LossFunction, *, open_bench: OpenStepBench | None = None) -> RunConfig:
    """Return the config of a new run with the fastest plan, if the run is long enough to repay measuring."""
    group = current_group()
    if not group.is_single_process:
        if group.is_rank_zero:
            report_lines(config.on_event, "not measured: the steps of several ranks are planned by rules")
        return config
    if config.plan is not None or run_exists(config.path) or intercept.active() is not None:
        return config
    with stopped_by_ctrl_c(config.on_event):
        plan = tuned_plan(config, loss, open_bench=open_bench)
    return replace(config, plan=plan)


def tune_first_step(run: RunContext, loss: LossFunction) -> None:
    """Measure the plan of a custom loop at its first step, when the loss is known.

    Its device and data stay the same.
    """
    config = run.config
    if not (config.is_custom_loop and run.is_new and run.state.step == 0 and config.plan is None):
        return
    if intercept.active() is not None or not run.group.is_single_process:
        return
    if not config.measure:
        _advise(config)
        return
    if config.optimizers.others:
        run.log.event("plan", step=0, message="not measured: only the steps of a single optimizer are")
        return
    if not isinstance(config.optimizer, Optimizer):
        return

    def watch(kind: str, fields: dict[str, Any]) -> None:
        if kind == "measuring" and run.is_stop_requested:
            raise WhetError("the measurement was stopped", got="a stop was requested")
        if kind == "estimate" and fields.get("untried"):
            # The summary of the plan, with the estimated time, has been printed already: report this by itself.
            kind, fields = "tuning", {"message": f"not measured: {fields['message']}"}
        emit_event(config.on_event, kind, fields)

    plan = tuned_plan(replace(config, on_event=watch), loss)
    if plan is None:
        return
    # A custom loop has read its first batch already.
    fixed = ("device", *names_of(lambda setting: setting.is_data))
    measured = {name: value for name, value in plan.measured.items() if name not in fixed}
    if plan.device == run.plan.device and measured:
        run.replan(make_plan_again(run.plan, workload=plan.workload, measured=measured, trials=plan.trials))


def tuned_plan(config: RunConfig, loss: LossFunction, *, open_bench: OpenStepBench | None = None) -> Plan | None:
    """Measure the plan of a new run. Return None if the run is too short to repay measuring or if measuring fails."""
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
        report_lines(on_event, f"not measured: {_reason(error)}")
        return None
    if measured is None:
        return None
    plan, result = measured
    # The first line is the result. `whet plan RUN` and the report show what else was tried.
    report_lines(on_event, *result.summary[:1])
    if not result.trials:
        return None
    cache.save(about, result)
    return result.applied_to(plan)


def _measure(
    config: RunConfig, loss: LossFunction, plan: Plan, num_steps: int, *, open_bench: OpenStepBench | None
) -> tuple[Plan, TuningResult] | None:
    """Return the plan and its search result; None if the run is too short to repay measuring."""
    with ExitStack() as stack:
        early = None
        if open_bench is None and _may_start_early(plan, num_steps):
            with suppress(OSError):
                early = start_early(config.model)
                stack.callback(early.close)
        return _measure_with(config, loss, plan, num_steps, open_bench=open_bench, early=early)


def _may_start_early(plan: Plan, num_steps: int) -> bool:
    if device_kind(plan) != "cuda" or num_steps < _MIN_STEPS_TO_START_EARLY:
        return False
    free = read_system_state().memory_available_bytes or 0
    return free >= _MIN_MEMORY_TO_START_EARLY and (plan.machine.cpu.logical_cores or 1) >= _MIN_CORES_TO_START_EARLY


def _measure_with(
    config: RunConfig,
    loss: LossFunction,
    plan: Plan,
    num_steps: int,
    *,
    open_bench: OpenStepBench | None,
    early: EarlyProcess | None,
) -> tuple[Plan, TuningResult] | None:
    watch = progress_callback(config.on_event)
    with local_bench(config, loss, plan) as bench:
        plan = bench.plan
        preparation_seconds, step_seconds = _time_steps(bench, config.on_event)
        seconds = preparation_seconds + num_steps * step_seconds
        budget = budget_seconds(seconds)
        compile_budget = compile_budget_seconds(seconds) if budget >= _MIN_SHIPPING_SECONDS else 0.0
        if device_kind(plan) == "cuda":
            budget, compile_budget = cuda_budget_seconds(seconds)
        length = f"about {format_seconds(seconds)}" if seconds >= 1 else "less than a second"
        is_too_short = budget < MIN_BUDGET_SECONDS
        more = untried_note(plan) if seconds >= _MIN_SECONDS_TO_ADVISE else ""
        why_not = f", too short to measure which settings are fastest{more}" if is_too_short else ""
        untried = is_too_short and bool(more)
        emit_event(
            config.on_event, "estimate", {"seconds": seconds, "message": f"{length}{why_not}", "untried": untried}
        )
        if is_too_short:
            return None
        more = f", and {format_seconds(compile_budget)} to compile" if compile_budget else ""
        limit = f"{format_seconds(budget)} at most{more}; this run would take {length}"
        emit_event(config.on_event, "measuring", {"message": f"measuring which plan is fastest, {limit}"})
    if open_bench is not None:
        return plan, _search_in_process(open_bench, plan, budget=budget, compile_budget=compile_budget, watch=watch)
    return plan, _search(
        config,
        loss,
        plan,
        budget=budget,
        compile_budget=compile_budget,
        watch=watch,
        step_seconds=step_seconds,
        early=early,
    )


def report_unmeasured(config: RunConfig) -> None:
    """Report the settings that a measurement could try, if a new run with measure=False is long enough to benefit."""
    is_new = config.plan is None and not run_exists(config.path) and intercept.active() is None
    if is_new and current_group().is_single_process:
        _advise(config)


def _advise(config: RunConfig) -> None:
    if not is_rereadable(config.data):
        return
    plan = plan_from_rules(config)
    if (plan.workload.num_steps or 0) >= _MIN_STEPS_TO_ADVISE and (more := untried_note(plan)):
        report_lines(config.on_event, f"not measured: measure=False{more}")


_GAINS = {
    # From docs/lab.md and docs/bench: GPT-2, ResNet-50, ViT-B/16 and an MLP on an H200; a GPT-2 shape, a convolutional
    # net and an LSTM on 2 cores.
    "cuda": "about a minute, 1 to 2.8 times as fast for usual models on an H200",
    "cpu": "up to 4 minutes, 1 to 1.4 times as fast for small models on 2 cores",
}


def untried_note(plan: Plan) -> str:
    """Describe the settings that a measurement could try on this device, with gains measured on similar devices."""
    tried = {"precision": "bf16", "layout": "channels_last", "compile": "compile"}
    open_settings = {
        about: word
        for about, word in tried.items()
        if any(candidate.value in (word, "on") for candidate in candidates(plan, about))
    }
    gain = _GAINS.get(device_kind(plan))
    if not open_settings or gain is None:
        return ""
    *others, last = open_settings.values()
    words = f"{', '.join(others)} and {last}" if others else last
    return f"; whet.tune could try {words}: {gain}, and is remembered for the next run"


def _search(
    config: RunConfig,
    loss: LossFunction,
    plan: Plan,
    *,
    budget: float,
    compile_budget: float = 0.0,
    watch: ProgressCallback | None,
    step_seconds: float | None = None,
    early: EarlyProcess | None = None,
) -> TuningResult:
    """Search in a separate process, where a compilation can be killed, or in this one if the run cannot be sent."""
    if budget < _MIN_SHIPPING_SECONDS:
        if early is not None:
            early.close()
        with local_bench(config, loss, plan) as local:
            return search(plan, local, budget_seconds=budget, compile_seconds=compile_budget, on_progress=watch)
    start, is_shipped = time.perf_counter(), True
    with ExitStack() as stack:
        try:
            if watch is not None:
                watch(TuningProgress(doing="starting a process", spent_seconds=0.0, budget_seconds=budget))
            shipped = shipped_bench(
                config.model,
                config.optimizer,
                config.data,
                config.training,
                loss=loss,
                plan=plan,
                step_seconds=step_seconds,
                early=early,
            )
            bench: StepBench = stack.enter_context(shipped)
            if bench.recovery_seconds > _MAX_START_SHARE * (budget + compile_budget):
                # The same time is reserved for killing a trial, so hardly anything could be tried.
                stack.close()
                raise ProbeFailedError(
                    f"another process took {format_seconds(bench.recovery_seconds)} to start", kind="timeout"
                )
        except (WhetError, OSError) as error:
            is_shipped = False
            if early is not None:
                early.close()
            report_lines(config.on_event, f"measured in this process: {_reason(error)}")
            bench = stack.enter_context(local_bench(config, loss, plan))
        left = max(_MIN_SEARCH_SHARE * budget, budget - (time.perf_counter() - start))
        result = search(bench.plan, bench, budget_seconds=left, compile_seconds=compile_budget, on_progress=watch)
        return result if is_shipped else result.model_copy(update={"is_complete": False})


def _reason(error: Exception) -> str:
    """Return the reason why a measurement failed, in one line."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, ProbeFailedError):
        reason = error.reason
    elif isinstance(error, WhetError):
        reason = error.got or error.what
    return (reason.splitlines() or [reason])[0]


def _search_in_process(
    open_bench: OpenStepBench, plan: Plan, *, budget: float, compile_budget: float, watch: ProgressCallback | None
) -> TuningResult:
    """Search in a separate process. If it cannot start, return an empty result, which keeps the plan from rules."""
    try:
        with open_bench() as bench:
            return search(plan, bench, budget_seconds=budget, compile_seconds=compile_budget, on_progress=watch)
    except ProbeFailedError as error:
        return TuningResult(summary=(f"not measured: {error.reason}",))


def _time_steps(bench: LocalStepBench, on_event: EventHandler | None) -> tuple[float, float]:
    """Return the seconds that the plan from rules takes to prepare and the seconds per step."""
    start = bench.clock()
    prepared = bench.prepare({}, seconds=MIN_BUDGET_SECONDS)
    visits: list[float] = []
    steps = steps_per_visit(prepared.step_seconds)
    while len(visits) < _TIMED_VISITS or steps * sum(visits) < _TIMED_SECONDS:
        num_done = steps * len(visits)
        # Steps of a large model take seconds each, and nothing else is printed in the meantime.
        if bench.clock() - start >= _SILENT_SECONDS:
            emit_event(on_event, "measuring", {"message": f"timing steps before the start, {num_done} done"})
        # A coarse clock may report zero.
        visits.append(max(sum(prepared.step(num_done + index) for index in range(steps)) / steps, 1e-6))
    prepared.close()
    # Leave out the slowest quarter: the first steps warm up, and other programs interrupt some of them.
    usual = sorted(visits)[: math.ceil(0.75 * len(visits))]
    return prepared.preparation_seconds, sum(usual) / len(usual)
