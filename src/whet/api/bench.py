"""Benchmark a recipe or a training function: its plan and sweeps over settings, within one time budget."""

import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from whet.api.autotune import find_batch_size, function_bench, recipe_bench
from whet.api.target import ScriptTraining
from whet.autotune.batch_size import measure_batch_sizes
from whet.autotune.benchmark import BenchmarkContext, disturbances, measure_sweep
from whet.autotune.candidates import memory_limit, plan_with
from whet.autotune.process_bench import ProcessStepBench
from whet.autotune.search import search
from whet.autotune.step_bench import ProbeFailedError, ProgressCallback, Settings
from whet.autotune.sweeps import Variant, batch_sizes_to_sweep, plain_loop, select_sweeps, sweep_variants
from whet.base.errors import WhetError
from whet.config.resolve import ResolvedConfig
from whet.machine.load import cpu_percent
from whet.machine.pressure import SystemStateReader
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.workload import AutoBatch, BatchPoint
from whet.recipes.recipe import Recipe
from whet.run.bench_result import BenchInterval, BenchResult, BenchRow, BenchSweep
from whet.run.folder import installed_versions

# Fraction of the budget after which a running measurement is stopped. The extra 5 % let the last one finish.
_DEADLINE_SHARE = 1.05
# Fractions of the remaining time: for finding the fastest plan, and for choosing the batch size.
_SEARCH_SHARE = 0.4
_BATCH_SHARE = 0.25
# Fraction of the remaining time for a sweep of global batch sizes if there are other sweeps.
_BATCH_SWEEP_SHARE = 0.5
BATCH = "global_batch_size"
# Relative time per sweep (default 1). These sweeps have more values or matter more.
_WEIGHTS = {"micro_batch": 2.0, "against": 2.0}

LogLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """The training run, the sweeps and the time budget of a benchmark."""

    what: str
    """The recipe or training function, as accepted by `load_training`."""
    training: Recipe | ScriptTraining
    resolved: ResolvedConfig[Any] | None = None
    """The config of a recipe, or None for a function."""
    device: str = "auto"
    sweeps: Mapping[str, Sequence[Scalar]] = field(default_factory=dict)
    """The settings to sweep, with their values. whet chooses the values of a setting that maps to an empty sequence."""
    is_against_naive: bool = False
    is_searched: bool = False
    budget_seconds: float = 120.0


def bench(request: BenchRequest, *, log: LogLine, on_progress: ProgressCallback | None = None) -> BenchResult:
    """Run a benchmark: start a process for the training run and measure it. The time budget starts with this call."""
    started = time.perf_counter()
    ends_at = started + request.budget_seconds
    sweeps: list[BenchSweep] = []
    chosen: AutoBatch | None = None
    own: Settings = {}
    with _open_bench(request, started) as steps:
        if request.resolved is not None and request.resolved.is_batch_open:
            log("finding the global batch size first ...")
            share = _BATCH_SHARE * (ends_at - steps.clock())
            chosen = find_batch_size(steps, request.resolved, budget_seconds=share, on_progress=on_progress)
            _log_all(chosen.lines, log)
            sweeps.append(_batch_sweep(chosen.points, steps.plan, note="one batch size after another"))
        if BATCH in request.sweeps:
            sweeps.append(_sweep_batch_sizes(request, steps, ends_at=ends_at, log=log, on_progress=on_progress))
        if request.is_searched:
            log("searching for the fastest plan first ...")
            budget = _SEARCH_SHARE * (ends_at - steps.clock())
            result = search(steps.plan, steps, budget_seconds=budget, on_progress=on_progress)
            own = result.settings
            _log_all(result.summary, log)
        context = BenchmarkContext(bench=steps, rule_plan=steps.plan, own=own, read_system_state=SystemStateReader())
        # Sample the CPU load before and after the sweeps. Other processes distort the results, so the load is reported.
        context.cpu_use.append(cpu_percent() or 0.0)
        sweeps += _measure_sweeps(request, context, ends_at=ends_at, log=log)
        context.cpu_use.append(cpu_percent() or 0.0)
        plan = plan_with(steps.plan, own)
        noted = tuple(disturbances(context))
    return BenchResult(
        created=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        machine=plan.machine,
        workload=plan.workload.model_copy(update={"batch": chosen}),
        plan={name: setting.value for name, setting in plan.settings.items()},
        plan_source="measured" if own else "rules",
        limit_bytes=memory_limit(plan),
        budget_seconds=request.budget_seconds,
        spent_seconds=time.perf_counter() - started,
        sweeps=tuple(sweeps),
        disturbances=noted,
        # Omit the platform, because `machine` already describes it.
        versions={name: version for name, version in installed_versions().items() if name != "platform"},
    )


def _batch_sweep(points: Sequence[BatchPoint], plan: Plan, *, note: str) -> BenchSweep:
    """Convert the result of the batch size finder to a sweep of the report."""
    rows = []
    for point in points:
        rate = None
        if point.samples_per_second and point.low and point.high:
            rate = BenchInterval(
                median=point.samples_per_second,
                low=point.low,
                high=point.high,
                confidence=point.confidence,
                repeats=point.steps,
            )
        rows.append(
            BenchRow(
                value=point.batch,
                is_plan=point.batch == plan.workload.global_batch_size,
                execution={"device": plan.device, "micro_batch": point.micro_batch},
                outcome="measured" if rate else "no time" if "no time" in point.note else "failed",
                note=point.note or f"micro-batch {point.micro_batch}",
                samples_per_second=rate,
                peak_bytes=point.peak_bytes,
            )
        )
    return BenchSweep(setting=BATCH, rows=tuple(rows), note=f"{note}, each with its rule-based plan")


def _sweep_batch_sizes(
    request: BenchRequest,
    steps: ProcessStepBench,
    *,
    ends_at: float,
    log: LogLine,
    on_progress: ProgressCallback | None,
) -> BenchSweep:
    sizes = batch_sizes_to_sweep(steps.plan, request.sweeps[BATCH])
    log(f"measuring {BATCH}: {', '.join(map(str, sizes))} ...")
    # Leave time for the other sweeps.
    share = _BATCH_SWEEP_SHARE if len(request.sweeps) > 1 or request.is_against_naive else 1.0
    budget = share * (ends_at - steps.clock())
    points = measure_batch_sizes(steps, sizes, budget_seconds=budget, on_progress=on_progress)
    note = "a different batch size changes training (learning rate, steps per epoch); sizes are measured up and down"
    return _batch_sweep(points, steps.plan, note=note)


@contextmanager
def _open_bench(request: BenchRequest, started: float) -> Iterator[ProcessStepBench]:
    if isinstance(request.training, ScriptTraining):
        steps = function_bench(request.training, device=request.device)
    else:
        assert request.resolved is not None
        steps = recipe_bench(request.what, request.resolved, device=request.device)
    # A hard limit, because a step that hangs would block the whole benchmark.
    steps.ends_at = started + _DEADLINE_SHARE * request.budget_seconds
    try:
        steps.__enter__()
    except ProbeFailedError as error:
        raise WhetError("nothing could be measured", got=error.reason, try_="a larger --budget SECONDS") from None
    try:
        yield steps
    finally:
        steps.__exit__(None, None, None)


def _measure_sweeps(
    request: BenchRequest, context: BenchmarkContext, *, ends_at: float, log: LogLine
) -> Iterator[BenchSweep]:
    """Measure the sweeps one after another, each within its share of the remaining time."""
    clock = context.bench.clock
    planned = list(_planned_sweeps(request, context))
    for number, (name, variants) in enumerate(planned):
        log(f"measuring {name}: {', '.join(str(variant.value) for variant in variants)} ...")
        weights = [_WEIGHTS.get(other, 1.0) for other, _ in planned[number:]]
        share = (ends_at - clock()) * weights[0] / sum(weights)
        yield measure_sweep(context, name, variants, until=clock() + share)


def _planned_sweeps(request: BenchRequest, context: BenchmarkContext) -> Iterator[tuple[str, list[Variant]]]:
    plan = context.plan_with(context.own)
    itself = Variant(value="plan", settings=context.own, is_plan=True)
    if request.is_against_naive:
        yield "against", [plain_loop(context.rule_plan, context.own), itself]
    requested = [name for name in request.sweeps if name != BATCH]
    is_default = not request.sweeps and not request.is_against_naive
    names = select_sweeps(plan, requested) if requested or is_default else []
    for name in names:
        yield name, sweep_variants(context.rule_plan, context.own, name, request.sweeps.get(name, ()))
    if not names and not request.is_against_naive and BATCH not in request.sweeps:
        yield "plan", [itself]


def _log_all(lines: Sequence[str], log: LogLine) -> None:
    for line in lines:
        log(line)
