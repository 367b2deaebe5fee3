"""What is told of a contest: a table as markdown, and what was not equal, missing or otherwise than planned."""

import math
from collections.abc import Iterator

from side_by_side.losses import Agreement
from side_by_side.timing import Contest, Taken
from whet.autotune.statistics import median_interval, ratio_interval
from whet.base.units import format_bytes

HEAD = (
    "way",
    "samples/s",
    "95 % interval",
    "x best peer",
    "x best HF Trainer",
    "share of the matmul ceiling",
    "first step after",
    "set-up in all",
    "memory held",
    "memory used",
)


def table(contest: Contest) -> Iterator[str]:
    """Rows in the order in which ways are listed."""
    peers = [found for found in contest.taken if not found.way.startswith("whet")]
    trainers = [found for found in peers if found.way.startswith("trainer")]
    yield f"### {contest.spec.work}: global batch {contest.taken[0].batch}, {contest.spec.precision}"
    yield ""
    yield contest.words + "."
    yield ""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| --- |" + " ---: |" * (len(HEAD) - 1)
    for found in contest.taken:
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
                    f"{contest.flops / seconds.median / contest.ceiling:.1%}",
                    f"{found.first_step:.1f} s",
                    f"{found.setup:.1f} s",
                    format_bytes(found.held),
                    format_bytes(found.used),
                )
            )
            + " |"
        )
    yield ""
    ceiling = contest.ceiling / 1e12
    yield (
        f"{len(contest.taken[0].blocks)} rounds of {contest.block_steps} steps each; "
        f"matmul ceiling {ceiling:,.3g} TFLOP/s; {contest.flops / 1e9:,.4g} GFLOP in a step without padding."
    )
    for found in contest.taken:
        if plan := found.notes.get("plan"):
            yield f"- {found.name}: " + ", ".join(f"{name}={value}" for name, value in plan.items())
        for change in found.notes.get("changes", []):
            yield f"- {found.name}: {change}"
    for name, why in contest.missing.items():
        yield f"- {name}: {why}"
    yield ""


def _ratio(found: Taken, rivals: list[Taken]) -> str:
    """How many times as fast as the fastest of them, taken inside each round."""
    if not rivals:
        return ""
    best = min(rivals, key=lambda rival: rival.step_seconds)
    if best is found:
        return "1"
    pairs = zip(found.blocks, best.blocks, strict=True)
    gain = ratio_interval([math.log(ours / theirs) for ours, theirs in pairs])
    return f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def agreement(found: Agreement) -> Iterator[str]:
    """How far the losses of all ways are from the first one's, in float32 where that was computed."""
    if not found.losses:
        yield "No losses to compare."
        return
    # The first way of all was asked for float32, also where it fails in half precision.
    of = found.names[next(iter(found.losses if found.exact is None else found.names))]
    of += "" if found.exact is None else " in fp32"
    noise = "" if found.noise is None else f"; {found.precision} takes others up to {found.noise:.1e} away"
    yield (
        f"The first {found.steps} losses without dropout in {found.precision}, largest relative difference from the "
        f"{of} (bound {found.bound:.1e}{noise}):"
    )
    for way, losses in found.losses.items():
        verdict = "" if found.agrees(way) else " **NOT EQUAL**"
        yield f"- {found.names[way]}: {found.difference(way):.1e} ({losses[0]:.4f} to {losses[-1]:.4f}){verdict}"
    for name, why in found.problems.items():
        yield f"- {name}: {why}"
    yield ""
