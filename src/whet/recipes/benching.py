"""How is a recipe benchmarked? Its plan, its sweeps and its presets, all within one budget."""

import datetime as dt
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whet.base.errors import UsageError, WhetError
from whet.base.units import show_count
from whet.config.resolve import Resolved, resolve
from whet.machine.conditions import cpu_use
from whet.machine.vitals import Vitals
from whet.measure.benching import Table, measure_sweep
from whet.measure.candidates import memory_limit, planned
from whet.measure.disturbance import strain
from whet.measure.progress import Watch
from whet.measure.remote import RemoteRig
from whet.measure.rig import ProbeFailedError, Settings
from whet.measure.search import search
from whet.measure.sweeps import Arm, arms, chosen_sweeps, plain_loop
from whet.plan.chosen_batch import ChosenBatch
from whet.plan.plan import Plan
from whet.recipes.batch import measured_batch
from whet.recipes.measuring import rig_of
from whet.recipes.recipe import Recipe
from whet.run.bench_result import BenchResult, Interval, Row, Sweep
from whet.run.folder import versions

_WALL = 1.05
"""Of the budget: then whatever still runs is ended."""
_SEARCH_SHARE = 0.4
_BATCH_SHARE = 0.25
_PRESET_SHARE = 0.5
"""Of the budget, for models of other sizes: each starts a process of its own."""
_WEIGHTS = {"micro_batch": 2.0, "against": 2.0}
"""How the time is shared: these have more values, or matter more."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for."""

    word: str
    recipe: Recipe
    resolved: Resolved[Any]
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
    found = getattr(recipe, "presets", None) or {}
    if not isinstance(found, Mapping) or not all(isinstance(changes, Mapping) for changes in found.values()):
        raise UsageError("presets of a recipe must be a dict of dicts", got=repr(found)[:200], try_=_PRESETS)
    return found


def bench(request: Request, *, say: Say, watch: Watch | None = None) -> BenchResult:
    """Starts a process for the recipe, and measures; the clock runs from here."""
    started = time.perf_counter()
    ends_at = started + request.budget_seconds
    sizes = presets(request.recipe) if "arch" in request.sweeps else {}
    if "arch" in request.sweeps and not sizes:
        raise UsageError("this recipe has no sizes to sweep", got=f"{request.word} declares no presets", try_=_PRESETS)
    found: list[Sweep] = []
    chosen: ChosenBatch | None = None
    with _opened(request, started) as rig:
        own: Settings = {}
        if request.resolved.is_batch_open:
            say("finding the global batch first ...")
            share = _BATCH_SHARE * (ends_at - rig.clock())
            chosen = measured_batch(rig, request.resolved, budget_seconds=share, watch=watch)
            for line in chosen.lines:
                say(line)
            found.append(batch_sweep(chosen, rig.plan))
        if request.is_searched:
            say("searching for the fastest plan first ...")
            result = search(rig.plan, rig, budget_seconds=_SEARCH_SHARE * (ends_at - rig.clock()), watch=watch)
            own = result.settings
            for line in result.words:
                say(line)
        table = Table(rig=rig, rule_plan=rig.plan, own=own, watch=Vitals())
        jobs = list(_jobs(request, table))
        table.cpu_use.append(cpu_use() or 0.0)
        last = ends_at - (_PRESET_SHARE * request.budget_seconds if sizes else 0.0)
        for number, (name, lanes) in enumerate(jobs):
            say(f"measuring {name}: {', '.join(str(arm.value) for arm in lanes)} ...")
            weights = [_WEIGHTS.get(other, 1.0) for other, _ in jobs[number:]]
            share = (last - rig.clock()) * weights[0] / sum(weights)
            found.append(measure_sweep(table, name, lanes, until=rig.clock() + share))
        table.cpu_use.append(cpu_use() or 0.0)
        plan = planned(rig.plan, own)
        disturbances = tuple(strain(table))
    if sizes:
        found.append(_sizes(request, sizes, chosen, started=started, say=say))
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
        strain=disturbances,
        # The machine's own record says enough about the system.
        versions={name: version for name, version in versions().items() if name != "platform"},
    )


@contextmanager
def _opened(request: Request, started: float) -> Iterator[RemoteRig]:
    rig = rig_of(request.word, request.resolved, device=request.device)
    rig.ends_at = started + _WALL * request.budget_seconds
    try:
        rig.__enter__()
    except ProbeFailedError as error:
        raise WhetError("nothing could be measured", got=error.reason, try_="a larger --budget SECONDS") from None
    try:
        yield rig
    finally:
        rig.__exit__(None, None, None)


def _jobs(request: Request, table: Table) -> Iterator[tuple[str, list[Arm]]]:
    plan = table.plan_with(table.own)
    itself = Arm(value="plan", settings=table.own, is_plan=True)
    if request.is_against_naive:
        yield "against", [plain_loop(table.rule_plan, table.own), itself]
    asked = [name for name in request.sweeps if name != "arch"]
    is_open = not request.sweeps and not request.is_against_naive
    names = chosen_sweeps(plan, asked) if asked or is_open else []
    for name in names:
        yield name, arms(table.rule_plan, table.own, name)
    if not names and not request.is_against_naive:
        yield "plan", [itself]


def batch_sweep(chosen: ChosenBatch, plan: Plan) -> Sweep:
    """The curve whose knee was taken."""
    rows = []
    for point in chosen.points:
        rate = None
        if point.samples_per_second and point.low and point.high:
            rate = Interval(
                middle=point.samples_per_second,
                low=point.low,
                high=point.high,
                confidence=point.confidence,
                repeats=point.steps,
            )
        rows.append(
            Row(
                value=point.batch,
                is_plan=point.batch == chosen.batch,
                execution={"device": plan.value("device"), "micro_batch": point.micro_batch},
                outcome="measured" if rate else "failed",
                words=point.words,
                samples_per_second=rate,
                peak_bytes=point.peak_bytes,
            )
        )
    return Sweep(setting="global_batch_size", rows=tuple(rows), note="by the rules' plan, one batch after another")


def _sizes(
    request: Request,
    sizes: Mapping[str, Mapping[str, object]],
    chosen: ChosenBatch | None,
    *,
    started: float,
    say: Say,
) -> Sweep:
    """Models of other sizes, each by its own plan, one after another."""
    rows: list[Row] = []
    ends_at = started + request.budget_seconds
    for number, (name, changes) in enumerate(sizes.items()):
        say(f"measuring arch: {name} ...")
        words = [*request.words, *(f"{key}={value}" for key, value in changes.items())]
        resolved = resolve(request.recipe.Config, words, file=request.config_file, can_measure=True)
        resolved = resolved.with_batch(chosen) if chosen else resolved
        until = time.perf_counter() + max(0.0, ends_at - time.perf_counter()) / (len(sizes) - number)
        rig = rig_of(request.word, resolved, device=request.device)
        rig.ends_at = until
        try:
            with rig:
                table = Table(rig=rig, rule_plan=rig.plan, own={})
                row = measure_sweep(table, "arch", [Arm(value=name, settings={}, is_plan=True)], until=until).rows[0]
                size = f"{show_count(rig.plan.workload.num_parameters)} parameters"
                rows.append(
                    row.model_copy(update={"is_plan": False, "words": "; ".join(filter(None, (size, row.words)))})
                )
        except ProbeFailedError as error:
            rows.append(Row(value=name, execution={}, outcome="failed", words=error.reason))
    return Sweep(setting="arch", rows=tuple(rows))


_PRESETS = 'presets = {"small": {"arch.layers": 2}} in the recipe, or another --sweep'
