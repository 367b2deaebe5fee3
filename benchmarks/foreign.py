"""whet beside a plain loop, experts and other trainers, on models that whet did not write.

    python benchmarks/foreign.py --device cuda [--model gpt2 mlp ...] [--loops ...] [--rounds 8] [--seconds 2] [--write]

All loops train the same model from the same weights on the same batches, with AdamW, clipping and a linear schedule: a
plain loop; an expert's loop (torch.compile, fused AdamW, autocast to bf16 on a GPU, channels_last for convolutions) and
the same with mode="reduce-overhead"; HF Trainer for Transformers models, Lightning for the others; and a user's
script with whet.train, without and with measuring. Each runs in its own process with its own caches, and only one
computes at a time, in random order in each round. A model or loop whose package is missing is listed with the reason.

"First step after" starts with a built model, loaded data and an initialized device; with measuring it includes it.
"Second start" is the first step of the measured training in a new process with the caches of the first one; with
--starts 3 there is a third one without the cached measurements, which measures again with cached compiled code. With
--caches DIR, compiled code is kept there, and --fill only compiles: several models at once, before they are timed one
after the other. --limit ends a loop whose steps take longer than that.

Ratios are computed within each round. Memory is the peak of a timed block, in brackets that since the start, with
measuring and checks: of tensors on a GPU, of the process on a CPU. The losses of the first steps of these processes are
compared with those of the first loop. `--small` is a smoke test; its times mean nothing. `--write` writes the result
into docs/bench/.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from side_by_side.losses import BOUND, largest_difference
from side_by_side.options import complete, make_parser, print_and_exit, report_head
from side_by_side.spec import FOREIGN_LOOPS, Spec
from side_by_side.timing import LoopComparison, LoopTimes, NoLoopError, compare_loops, fill_caches
from side_by_side.workloads.foreign import MODELS, OF_TRANSFORMERS

from whet.autotune.statistics import median_interval, ratio_interval
from whet.base import env
from whet.base.units import format_bytes

MAX_STEPS = 100_000
NUM_LOSSES = 10
MEASURED = "whet_train-measured"
DEFAULT_LOOPS = tuple(loop for loop in FOREIGN_LOOPS if loop != "whet_train-compiled")
HEAD = (
    "loop",
    "samples/s",
    "95 % interval",
    "x plain loop",
    "x better expert",
    "first step after",
    "of it measuring",
    "second start",
    "measuring again",
    "memory",
    "losses differ by",
)


def specs_of(model: str, given: argparse.Namespace) -> Iterator[Spec]:
    for loop in given.loops:
        if (loop == "trainer") > (model in OF_TRANSFORMERS) or (loop == "lightning") > (model not in OF_TRANSFORMERS):
            continue
        if loop == "expert-compiled-overhead" and given.device != "cuda":
            # The mode captures CUDA graphs, and is the default mode elsewhere.
            continue
        yield Spec(
            loop=loop,
            workload=f"foreign-{model}",
            device=given.device,
            scale=given.scale,
            precision=given.precision,
            total_steps=MAX_STEPS,
            has_dropout=False,
            workers=0,
            threads=given.threads,
            first_losses=NUM_LOSSES,
        )


def report(given: argparse.Namespace) -> Iterator[str]:
    yield from report_head("Models that whet did not write", "foreign", given)
    # A user's script has none of whet's variables before it loads torch.
    variables: dict[str, str | None] = dict.fromkeys(env.BRIEF_SPIN)
    for model in given.model:
        if given.fill:
            specs = specs_of(model, given)
            lines = fill_caches(
                specs,
                caches=given.caches,
                variables=variables,
                limit=given.limit,
                compiled_as={MEASURED: "whet_train-compiled"},
            )
            yield from (f"{model}: {line}" for line in lines)
            continue
        try:
            comparison = compare_loops(
                specs_of(model, given),
                rounds=given.rounds,
                seconds=given.seconds,
                max_warmup=given.warmup,
                log=lambda line, model=model: print(f"{model}: {line}", file=sys.stderr, flush=True),
                has_ceiling=False,
                variables=variables,
                caches=given.caches,
                limit=given.limit,
                started_again=MEASURED if given.starts > 1 else None,
                measures_again=given.starts > 2,
            )
        except NoLoopError as error:
            yield f"### {model}: {error}"
            yield ""
            continue
        yield from table(model, comparison)


def table(model: str, comparison: LoopComparison) -> Iterator[str]:
    yield f"### {model}: global batch {comparison.times[0].batch}, {comparison.spec.precision}"
    yield ""
    yield comparison.description + "."
    yield ""
    yield "| " + " | ".join(HEAD) + " |"
    yield "| --- |" + " ---: |" * (len(HEAD) - 1)
    plain = [times for times in comparison.times if times.loop == "plain"]
    experts = [times for times in comparison.times if times.loop.startswith("expert")]
    best = min(experts, key=lambda times: times.step_seconds, default=None)
    for times in comparison.times:
        yield "| " + " | ".join(_row(times, plain[0] if plain else None, best, comparison)) + " |"
    yield ""
    yield f"{len(comparison.times[0].blocks)} rounds of {comparison.block_steps} steps each."
    for times in comparison.times:
        if plan := times.notes.get("plan"):
            yield f"- {times.name}: " + ", ".join(f"{name}={value}" for name, value in plan.items())
        if timeline := times.notes.get("timeline"):
            yield f"- {times.name}, until its first step: " + "; ".join(timeline)
        for trial in times.notes.get("trials", []):
            yield f"- {times.name}, measurement: {trial}"
        for change in times.notes.get("changes", []):
            yield f"- {times.name}: {change}"
    if timeline := comparison.second_notes.get("timeline"):
        yield "- second start, until its first step: " + "; ".join(timeline)
    for name, why in comparison.missing.items():
        yield f"- {name}: {why}"
    yield ""


def _row(times: LoopTimes, plain: LoopTimes | None, best: LoopTimes | None, comparison: LoopComparison) -> list[str]:
    seconds = median_interval(times.blocks)
    again, warm = (comparison.second_start, comparison.warm_measuring) if times.loop == MEASURED else (None, None)
    measuring = times.notes.get("measuring")
    return [
        times.name,
        f"{times.batch / seconds.median:,.0f}",
        f"{times.batch / seconds.high:,.0f} to {times.batch / seconds.low:,.0f}",
        _ratio(times, plain),
        _ratio(times, best),
        f"{times.first_step:.1f} s",
        "" if measuring is None else f"{measuring:.0f} s",
        "" if again is None else f"{again:.1f} s",
        "" if warm is None else f"{warm:.1f} s",
        f"{format_bytes(times.used)} ({format_bytes(times.peak)})",
        _loss_difference(times, comparison),
    ]


def _ratio(times: LoopTimes, rival: LoopTimes | None) -> str:
    """Speed relative to a rival, computed within each round."""
    if rival is None or rival is times:
        return "" if rival is None else "1"
    pairs = zip(times.blocks, rival.blocks, strict=True)
    gain = ratio_interval([math.log(ours / theirs) for ours, theirs in pairs])
    return f"{gain.median:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def _loss_difference(times: LoopTimes, comparison: LoopComparison) -> str:
    """Return the largest relative difference from the losses of the first loop, and whether it is too large."""
    first = comparison.times[0]
    if times is first:
        return ""
    if "losses" not in times.notes or "losses" not in first.notes:
        return "unknown"
    difference = largest_difference(times.notes["losses"], first.notes["losses"])
    is_fp32 = times.notes.get("plan", {}).get("precision", comparison.spec.precision) == "fp32"
    bound = BOUND["fp32" if is_fp32 and comparison.spec.precision == "fp32" else "bf16"]
    return f"{difference:.1e}" + ("" if difference <= bound else " **NOT EQUAL**")


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, warmup=64)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--loops", nargs="+", choices=list(FOREIGN_LOOPS), default=list(DEFAULT_LOOPS))
    parser.add_argument("--caches", type=Path, help="a folder for compiled code, kept between calls")
    parser.add_argument("--limit", type=float, help="maximum seconds from a command to a loop until its answer")
    parser.add_argument("--fill", action="store_true", help="only compile, with --caches")
    parser.add_argument("--starts", type=int, choices=(1, 2, 3), default=2, help="starts of the measured training")
    return complete(parser.parse_args(args), smoke_warmup=NUM_LOSSES)


if __name__ == "__main__":
    options = parse()
    print_and_exit(report(options), name="foreign", device=options.device, is_written=options.write, out=options.out)
