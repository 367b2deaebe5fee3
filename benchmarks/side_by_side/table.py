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
    peers = [found for found in comparison.times if not found.loop.startswith("whet")]
    trainers = [found for found in peers if found.loop.startswith("trainer")]
    yield f"### {comparison.spec.workload}: global batch {comparison.times[0].batch}, {comparison.spec.precision}"
    yield ""
    yield comparison.description + "."
    yield ""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| --- |" + " ---: |" * (len(HEAD) - 1)
    for found in comparison.times:
        seconds = median_interval(found.blocks)
        yield (
            "| "
            + " | ".join(
                (
                    found.name,
                    f"{found.batch / seconds.median:,.0f}",
                    f"{found.batch / seconds.high:,.0f} to {found.batch / seconds.low:,.0f}",
                    _ratio(found, peers),
                    _ratio(found, trainers),
                    f"{comparison.flops / seconds.median / comparison.ceiling:.1%}",
                    f"{found.first_step:.1f} s",
                    f"{found.setup:.1f} s",
                    format_bytes(found.held),
                    format_bytes(found.used),
                )
            )
            + " |"
        )
    yield ""
    ceiling = comparison.ceiling / 1e12
    yield (
        f"{len(comparison.times[0].blocks)} rounds of {comparison.block_steps} steps each; "
        f"matmul ceiling {ceiling:,.3g} TFLOP/s; {comparison.flops / 1e9:,.4g} GFLOP in a step without padding."
    )
    for found in comparison.times:
        if plan := found.notes.get("plan"):
            yield f"- {found.name}: " + ", ".join(f"{name}={value}" for name, value in plan.items())
        for change in found.notes.get("changes", []):
            yield f"- {found.name}: {change}"
    for name, why in comparison.missing.items():
        yield f"- {name}: {why}"
    yield ""


def _ratio(found: LoopTimes, rivals: list[LoopTimes]) -> str:
    """Speed relative to the fastest rival, computed within each round."""
    if not rivals:
        return ""
    best = min(rivals, key=lambda rival: rival.step_seconds)
    if best is found:
        return "1"
    pairs = zip(found.blocks, best.blocks, strict=True)
    gain = ratio_interval([math.log(ours / theirs) for ours, theirs in pairs])
    return f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def agreement(found: Agreement) -> Iterator[str]:
    """Format the differences of all loops from the reference losses."""
    if not found.losses:
        yield "No losses to compare."
        return
    # The reference is the first loop, even if it failed in half precision.
    of = found.names[next(iter(found.losses if found.exact is None else found.names))]
    of += "" if found.exact is None else " in fp32"
    noise = "" if found.noise is None else f"; {found.precision} moves peers up to {found.noise:.1e} away"
    yield (
        f"The first {found.steps} losses without dropout in {found.precision}, largest relative difference from the "
        f"{of} (bound {found.bound:.1e}{noise}):"
    )
    for loop, losses in found.losses.items():
        verdict = "" if found.agrees(loop) else " **NOT EQUAL**"
        yield f"- {found.names[loop]}: {found.difference(loop):.1e} ({losses[0]:.4f} to {losses[-1]:.4f}){verdict}"
    for name, why in found.problems.items():
        yield f"- {name}: {why}"
    yield ""
