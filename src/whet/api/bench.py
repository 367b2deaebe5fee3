"""Benchmark a recipe: its plan, sweeps over settings, and presets, within one time budget."""

import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whet.api.autotune import find_batch_size, recipe_bench
from whet.autotune.benchmark import BenchmarkContext, disturbances, measure_sweep
from whet.autotune.candidates import memory_limit, plan_with
from whet.autotune.process_bench import ProcessStepBench
from whet.autotune.search import search
from whet.autotune.step_bench import ProbeFailedError, ProgressCallback, Settings
from whet.autotune.sweeps import Variant, plain_loop, select_sweeps, sweep_variants
from whet.base.errors import UsageError, WhetError
from whet.base.units import format_count
from whet.config.resolve import ResolvedConfig, resolve_config
from whet.machine.load import cpu_percent
from whet.machine.pressure import ConditionsReader
from whet.plan.plan import Plan
from whet.plan.workload import AutoBatch
from whet.recipes.recipe import Recipe
from whet.run.bench_result import BenchInterval, BenchResult, BenchRow, BenchSweep
from whet.run.folder import installed_versions

_DEADLINE_SHARE = 1.05
"""Of the budget: then whatever still runs is ended."""
_SEARCH_SHARE = 0.4
_BATCH_SHARE = 0.25
_PRESET_SHARE = 0.5
"""Of the budget, for models of other sizes: each starts a process of its own."""
_WEIGHTS = {"micro_batch": 2.0, "against": 2.0}
"""How the time is shared: these have more values, or matter more."""

LogLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """What was asked for."""

    word: str
    recipe: Recipe
    resolved: ResolvedConfig[Any]
    words: Sequence[str]
    """The settings as they were given, for presets to be put behind."""
    config_file: Any = None
    device: str = "auto"
    sweeps: Sequence[str] = ()
    is_against_naive: bool = False
    is_searched: bool = False
    budget_seconds: float = 120.0


def presets(recipe: Recipe) -> Mapping[str, Mapping[str, object]]:
    """Sizes of the model by name, where a recipe has them: `presets = {"small": {"arch.layers": 2}}`."""
    found = recipe.presets
    if not isinstance(found, Mapping) or not all(isinstance(changes, Mapping) for changes in found.values()):
        raise UsageError("presets of a recipe must be a dict of dicts", got=repr(found)[:200], try_=_PRESETS_HINT)
    return found


def bench(request: BenchRequest, *, say: LogLine, watch: ProgressCallback | None = None) -> BenchResult:
    """Starts a process for the recipe, and measures; the clock runs from here."""
    started = time.perf_counter()
    ends_at = started + request.budget_seconds
    sizes = presets(request.recipe) if "arch" in request.sweeps else {}
    if "arch" in request.sweeps and not sizes:
        raise UsageError(
            "this recipe has no sizes to sweep", got=f"{request.word} declares no presets", try_=_PRESETS_HINT
        )
    found: list[BenchSweep] = []
    chosen: AutoBatch | None = None
    with _open_bench(request, started) as rig:
        own: Settings = {}
        if request.resolved.is_batch_open:
            say("finding the global batch first ...")
            share = _BATCH_SHARE * (ends_at - rig.clock())
            chosen = find_batch_size(rig, request.resolved, budget_seconds=share, watch=watch)
            for line in chosen.lines:
                say(line)
            found.append(batch_sweep(chosen, rig.plan))
        if request.is_searched:
            say("searching for the fastest plan first ...")
            result = search(rig.plan, rig, budget_seconds=_SEARCH_SHARE * (ends_at - rig.clock()), on_progress=watch)
            own = result.settings
            for line in result.words:
                say(line)
        table = BenchmarkContext(bench=rig, rule_plan=rig.plan, own=own, read_conditions=ConditionsReader())
        jobs = list(_planned_sweeps(request, table))
        table.cpu_use.append(cpu_percent() or 0.0)
        last = ends_at - (_PRESET_SHARE * request.budget_seconds if sizes else 0.0)
        for number, (name, lanes) in enumerate(jobs):
            say(f"measuring {name}: {', '.join(str(arm.value) for arm in lanes)} ...")
            weights = [_WEIGHTS.get(other, 1.0) for other, _ in jobs[number:]]
            share = (last - rig.clock()) * weights[0] / sum(weights)
            found.append(measure_sweep(table, name, lanes, until=rig.clock() + share))
        table.cpu_use.append(cpu_percent() or 0.0)
        plan = plan_with(rig.plan, own)
        noted = tuple(disturbances(table))
    if sizes:
        found.append(_sweep_presets(request, sizes, chosen, started=started, say=say))
    return BenchResult(
        created=dt.datetime.now(tz=dt.UTC).date().isoformat(),
        machine=plan.machine,
        workload=plan.workload.model_copy(update={"batch": chosen}),
        plan={name: setting.value for name, setting in plan.settings.items()},
        plan_source="measured" if own else "rules",
        limit_bytes=memory_limit(plan),
        budget_seconds=request.budget_seconds,
        spent_seconds=time.perf_counter() - started,
        sweeps=tuple(found),
        strain=noted,
        # The machine's own record says enough about the system.
        versions={name: version for name, version in installed_versions().items() if name != "platform"},
    )


@contextmanager
def _open_bench(request: BenchRequest, started: float) -> Iterator[ProcessStepBench]:
    rig = recipe_bench(request.word, request.resolved, device=request.device)
    rig.ends_at = started + _DEADLINE_SHARE * request.budget_seconds
    try:
        rig.__enter__()
    except ProbeFailedError as error:
        raise WhetError("nothing could be measured", got=error.reason, try_="a larger --budget SECONDS") from None
    try:
        yield rig
    finally:
        rig.__exit__(None, None, None)


def _planned_sweeps(request: BenchRequest, table: BenchmarkContext) -> Iterator[tuple[str, list[Variant]]]:
    plan = table.plan_with(table.own)
    itself = Variant(value="plan", settings=table.own, is_plan=True)
    if request.is_against_naive:
        yield "against", [plain_loop(table.rule_plan, table.own), itself]
    asked = [name for name in request.sweeps if name != "arch"]
    is_open = not request.sweeps and not request.is_against_naive
    names = select_sweeps(plan, asked) if asked or is_open else []
    for name in names:
        yield name, sweep_variants(table.rule_plan, table.own, name)
    if not names and not request.is_against_naive:
        yield "plan", [itself]


def batch_sweep(chosen: AutoBatch, plan: Plan) -> BenchSweep:
    """The curve whose knee was taken."""
    rows = []
    for point in chosen.points:
        rate = None
        if point.samples_per_second and point.low and point.high:
            rate = BenchInterval(
                middle=point.samples_per_second,
                low=point.low,
                high=point.high,
                confidence=point.confidence,
                repeats=point.steps,
            )
        rows.append(
            BenchRow(
                value=point.batch,
                is_plan=point.batch == chosen.batch,
                execution={"device": plan.device, "micro_batch": point.micro_batch},
                outcome="measured" if rate else "failed",
                words=point.words,
                samples_per_second=rate,
                peak_bytes=point.peak_bytes,
            )
        )
    return BenchSweep(setting="global_batch_size", rows=tuple(rows), note="by the rules' plan, one batch after another")


def _sweep_presets(
    request: BenchRequest,
    sizes: Mapping[str, Mapping[str, object]],
    chosen: AutoBatch | None,
    *,
    started: float,
    say: LogLine,
) -> BenchSweep:
    """Models of other sizes, each by its own plan, one after another."""
    rows: list[BenchRow] = []
    ends_at = started + request.budget_seconds
    for number, (name, changes) in enumerate(sizes.items()):
        say(f"measuring arch: {name} ...")
        words = [*request.words, *(f"{key}={value}" for key, value in changes.items())]
        resolved = resolve_config(request.recipe.Config, words, file=request.config_file, can_measure=True)
        resolved = resolved.with_batch(chosen) if chosen else resolved
        until = time.perf_counter() + max(0.0, ends_at - time.perf_counter()) / (len(sizes) - number)
        rig = recipe_bench(request.word, resolved, device=request.device)
        rig.ends_at = until
        try:
            with rig:
                table = BenchmarkContext(bench=rig, rule_plan=rig.plan, own={})
                row = measure_sweep(table, "arch", [Variant(value=name, settings={}, is_plan=True)], until=until).rows[
                    0
                ]
                size = f"{format_count(rig.plan.workload.num_parameters)} parameters"
                rows.append(
                    row.model_copy(update={"is_plan": False, "words": "; ".join(filter(None, (size, row.words)))})
                )
        except ProbeFailedError as error:
            rows.append(BenchRow(value=name, execution={}, outcome="failed", words=error.reason))
    return BenchSweep(setting="arch", rows=tuple(rows))


_PRESETS_HINT = 'presets = {"small": {"arch.layers": 2}} in the recipe, or another --sweep'
