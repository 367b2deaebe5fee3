"""Format a comparison as Markdown: a table, and notes on differences, missing loops and plan changes."""

import math
from collections.abc import Iterator

from side_by_side.losses import Agreement
from side_by_side.timing import LoopComparison, LoopTimes
from whet.autotune.statistics import median_interval, ratio_interval
from whet.base.units import format_bytes

HEAD = (
    "loop",
    "samples/s",
    "95 % interval",
    "x best peer",
    "x best HF Trainer",
    "share of the matmul ceiling",
    "first step after",
    "set-up in total",
    "memory held",
    "memory used",
)


def table(comparison: LoopComparison) -> Iterator[str]:
    """Format the table, one row per loop."""
    peers = [times for times in comparison.times if not times.loop.startswith("whet")]
    trainers = [times for times in peers if times.loop.startswith("trainer")]
    yield f"### {comparison.spec.workload}: global batch {comparison.times[0].batch}, {comparison.spec.precision}"
    yield ""
    yield comparison.description + "."
    yield ""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| --- |" + " ---: |" * (len(HEAD) - 1)
    for times in comparison.times:
        seconds = median_interval(times.blocks)
        yield (
            "| "
            + " | ".join(
                (
                    times.name,
                    f"{times.batch / seconds.median:,.0f}",
                    f"{times.batch / seconds.high:,.0f} to {times.batch / seconds.low:,.0f}",
                    _ratio(times, peers),
                    _ratio(times, trainers),
                    f"{comparison.flops / seconds.median / (comparison.ceiling or math.inf):.1%}",
                    f"{times.first_step:.1f} s",
                    f"{times.setup:.1f} s",
                    format_bytes(times.held),
                    format_bytes(times.used),
                )
            )
            + " |"
        )
    yield ""
    ceiling = (comparison.ceiling or 0.0) / 1e12
    yield (
        f"{len(comparison.times[0].blocks)} rounds of {comparison.block_steps} steps each; "
        f"matmul ceiling {ceiling:,.3g} TFLOP/s; {comparison.flops / 1e9:,.4g} GFLOP in a step without padding."
    )
    for times in comparison.times:
        if plan := times.notes.get("plan"):
            yield f"- {times.name}: " + ", ".join(f"{name}={value}" for name, value in plan.items())
        for change in times.notes.get("changes", []):
            yield f"- {times.name}: {change}"
    for name, why in comparison.missing.items():
        yield f"- {name}: {why}"
    yield ""


def _ratio(times: LoopTimes, rivals: list[LoopTimes]) -> str:
    """Speed relative to the fastest rival, computed within each round."""
    if not rivals:
        return ""
    best = min(rivals, key=lambda rival: rival.step_seconds)
    if best is times:
        return "1"
    pairs = zip(times.blocks, best.blocks, strict=True)
    gain = ratio_interval([math.log(ours / theirs) for ours, theirs in pairs])
    return f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def agreement(result: Agreement) -> Iterator[str]:
    """Format the differences of all loops from the reference losses."""
    if not result.losses:
        yield "No losses to compare."
        return
    # The reference is the first loop, even if it failed in half precision.
    of = result.names[next(iter(result.losses if result.exact is None else result.names))]
    of += "" if result.exact is None else " in fp32"
    noise = "" if result.noise is None else f"; {result.precision} moves peers up to {result.noise:.1e} away"
    yield (
        f"The first {result.steps} losses without dropout in {result.precision}, largest relative difference from the "
        f"{of} (bound {result.bound:.1e}{noise}):"
    )
    for loop, losses in result.losses.items():
        verdict = "" if result.agrees(loop) else " **NOT EQUAL**"
        yield f"- {result.names[loop]}: {result.difference(loop):.1e} ({losses[0]:.4f} to {losses[-1]:.4f}){verdict}"
    for name, why in result.problems.items():
        yield f"- {name}: {why}"
    yield ""
