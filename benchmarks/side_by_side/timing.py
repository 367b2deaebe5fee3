"""Time all loops: warm them up one after the other, then run blocks of the same batches in random order."""

import contextlib
import math
import random
import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from side_by_side.process import LoopFailedError, LoopProcess
from side_by_side.spec import Spec

_MIN_STEPS = 4
_PASSES, _PASSES_CAPTURED = 1, 4
"""Passes over the data before timing, so that every shape was seen. whet captures a shape when it occurs again, and
recaptures all when a larger one occurs."""


@dataclass(kw_only=True)
class LoopTimes:
    """The times and memory of one loop."""

    loop: str
    name: str
    batch: int
    first_step: float
    """Seconds until the first step was done."""
    warmup_steps: int
    warmup_seconds: float
    estimate: float
    """Seconds per step, estimated before the timed rounds."""
    blocks: list[float] = field(default_factory=list)
    """Mean seconds per step of each block."""
    held: int = 0
    """Peak bytes reserved by the process."""
    used: int = 0
    """Peak bytes of its tensors in a timed block; on a CPU the resident set."""
    peak: int = 0
    """The same since the start, with measuring and checks."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.blocks)

    @property
    def setup(self) -> float:
        """Extra seconds until every shape was seen, compared with steady steps."""
        return max(0.0, self.first_step + self.warmup_seconds - (1 + self.warmup_steps) * self.step_seconds)


@dataclass(frozen=True, kw_only=True)
class LoopComparison:
    """The results for one workload."""

    spec: Spec
    description: str
    flops: float
    ceiling: float | None
    """Matmul FLOP/s measured in the same run; None if it was not measured."""
    times: list[LoopTimes]
    missing: dict[str, str]
    """Ways that are not here, or failed, and why."""
    block_steps: int
    second_start: float | None = None
    """Seconds until the first step of `started_again`, in a new process with the same caches."""
    second_notes: dict[str, Any] = field(default_factory=dict)
    """What that process noted until then."""
    warm_measuring: float | None = None
    """The same without cached measurements, so that it measures again with cached compiled code."""


class NoLoopError(SystemExit):
    """No loop could be started. The message says why."""


def compare_loops(
    specs: Iterable[Spec],
    *,
    rounds: int,
    seconds: float,
    max_warmup: int,
    log: Any,
    has_ceiling: bool = True,
    variables: Mapping[str, str | None] | None = None,
    started_again: str | None = None,
    measures_again: bool = False,
    caches: Path | None = None,
    limit: float | None = None,
) -> LoopComparison:
    """Compare all loops; a block of the slowest takes `seconds`.

    `variables` are environment variables of their processes, and `started_again` is a loop that is started twice, and a
    third time with `measures_again`. `caches` has compiled code of `fill_caches`. A loop that takes longer than `limit`
    seconds to answer is ended.
    """
    specs = list(specs)
    missing: dict[str, str] = {}
    with ExitStack() as exit_stack:
        times: dict[str, LoopTimes] = {}
        # Imports and initialization are not timed, so all processes do them concurrently.
        started = [*([_ceiling_of(specs[0])] if has_ceiling else []), *specs]
        loops = {
            spec.loop: LoopProcess(spec, variables=variables, cache=_cache_of(spec, caches), limit=limit)
            for spec in started
        }
        for loop in loops.values():
            exit_stack.callback(loop.close)
        _drop_absent(loops, missing)
        product = loops.pop("ceiling", None)
        ceiling = None if product is None else _ready(product, max_warmup=10)
        _compile_first(loops)
        for name, loop in list(loops.items()):
            try:
                times[name] = _ready(loop, max_warmup=max_warmup)
                log(f"{loop.spec.name}: first step after {times[name].first_step:.1f} s")
            except LoopFailedError as error:
                missing[loop.spec.name] = str(error)
                del loops[name]
                log(f"{loop.spec.name}: {error}")
        if not times:
            raise NoLoopError("; ".join(sorted(set(missing.values()))) or "no loop could be started")
        slowest = max(each.estimate for each in times.values())
        block = max(_MIN_STEPS, round(seconds / slowest))
        first = next(iter(loops.values()))
        rng = random.Random(0)
        for number in range(rounds):
            # Before the loops in random order, so that no single loop always follows the matrix products.
            if product is not None and ceiling is not None:
                ceiling.blocks.append(_block(product, max(10, round(0.2 / ceiling.estimate))))
            for name in rng.sample(list(loops), len(loops)):
                try:
                    times[name].blocks.append(_block(loops[name], block, into=times[name]))
                except LoopFailedError as error:
                    missing[loops[name].spec.name] = f"in round {number + 1}: {error}"
                    del loops[name], times[name]
        second, warm, notes = None, None, {}
        if started_again in loops:
            second, notes = _start_again(loops[started_again], variables)
        if measures_again and started_again in loops:
            _forget_measurements(loops[started_again].cache)
            warm, _ = _start_again(loops[started_again], variables)
        return LoopComparison(
            spec=first.spec,
            description=str(first.made["description"]),
            flops=float(first.made["flops"]),
            ceiling=float(product.made["flops"]) / min(ceiling.blocks) if product and ceiling else None,
            times=list(times.values()),
            missing=missing,
            block_steps=block,
            second_start=second,
            second_notes=notes,
            warm_measuring=warm,
        )


def fill_caches(
    specs: Iterable[Spec],
    *,
    caches: Path,
    variables: Mapping[str, str | None] | None,
    limit: float | None,
    compiled_as: Mapping[str, str],
) -> Iterator[str]:
    """Run the first step of each loop, all at once, to fill its cache of compiled code. Yields what each one did.

    `compiled_as` names the loop that fills the cache of another one: what a measurement compiles depends on its times,
    and they mean nothing while other loops compile.
    """
    missing: dict[str, str] = {}
    loops = {
        spec.loop: LoopProcess(
            replace(spec, loop=compiled_as.get(spec.loop, spec.loop)),
            variables=variables,
            cache=_cache_of(spec, caches),
            limit=limit,
        )
        for spec in specs
    }
    _drop_absent(loops, missing)
    for loop in loops.values():
        loop.order(steps=1)
    for loop in loops.values():
        try:
            answer = loop.answer()
            yield f"{loop.spec.name}: first step after {answer['seconds']:.1f} s"
            yield from answer["notes"].get("trials") or loop.output.strip().splitlines()[-6:]
        except LoopFailedError as error:
            yield f"{loop.spec.name}: {error}"
            yield from loop.output.strip().splitlines()[-30:]
        _forget_measurements(loop.cache)
        loop.close()
    yield from (f"{name}: {why}" for name, why in missing.items())


def _cache_of(spec: Spec, caches: Path | None) -> Path | None:
    if caches is None:
        return None
    folder = caches / spec.workload / spec.loop
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _forget_measurements(cache: Path) -> None:
    shutil.rmtree(cache / "whet" / "evidence", ignore_errors=True)


def _start_again(loop: LoopProcess, variables: Mapping[str, str | None] | None) -> tuple[float, dict[str, Any]]:
    """Return the seconds until the first step in a new process with the same caches, and its notes."""
    again = LoopProcess(loop.spec, variables=variables, cache=loop.cache, limit=loop.limit)
    try:
        again.wait_made()
        answer = again.steps(1)
        return float(answer["seconds"]), answer["notes"]
    except LoopFailedError as error:
        return math.nan, {"timeline": [str(error)]}
    finally:
        again.close()


def _drop_absent(loops: dict[str, LoopProcess], missing: dict[str, str]) -> None:
    """Remove loops that are not installed or failed."""
    for name, loop in list(loops.items()):
        try:
            absent = loop.wait_made().get("absent")
            why = f"not installed: {absent}" if absent else None
        except LoopFailedError as error:
            why = str(error)
        if why:
            missing[loop.spec.name] = why
            del loops[name]


def _compile_first(loops: dict[str, LoopProcess]) -> None:
    """On a GPU, run the first steps of compiled loops concurrently: compilation needs CPU cores, not the GPU."""
    ordered = [loop for loop in loops.values() if loop.spec.is_compiled and loop.spec.device != "cpu"]
    for loop in ordered:
        with contextlib.suppress(LoopFailedError):
            loop.order(steps=1)
    for loop in ordered:
        with contextlib.suppress(LoopFailedError):
            loop.first = loop.answer()


def _ready(loop: LoopProcess, *, max_warmup: int) -> LoopTimes:
    """Warm up a loop until it has seen every batch, at most `max_warmup` steps."""
    made = loop.made
    first = loop.first or loop.steps(1)
    passes = _PASSES_CAPTURED if loop.spec.loop.startswith("whet") else _PASSES
    warmup = min(max_warmup, passes * int(made["epoch"]))
    warm = loop.steps(warmup)
    return LoopTimes(
        loop=loop.spec.loop,
        name=loop.spec.name,
        batch=int(made["batch"]),
        first_step=first["seconds"],
        warmup_steps=warmup,
        warmup_seconds=warm["seconds"],
        estimate=_block(loop, _MIN_STEPS),
        notes=first["notes"],
    )


def _block(loop: LoopProcess, steps: int, *, into: LoopTimes | None = None) -> float:
    answer = loop.steps(steps)
    if into is not None:
        into.held, into.used, into.peak = int(answer["held"]), int(answer["used"]), int(answer["peak"])
        into.notes = answer["notes"]
    return float(answer["seconds"]) / steps


def _ceiling_of(spec: Spec) -> Spec:
    return Spec(**{**spec.as_json(), "loop": "ceiling"})
