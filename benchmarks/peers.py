"""whet compared with other training loops: same model, data, order, global batch and precision, interleaved in one run.

    python benchmarks/peers.py --device cuda [--workloads text32 text256 hex chat] [--loops ...] [--seconds 2] [--write]

The loops are a bare loop, an expert's loop, HF Trainer, Accelerate, Lightning, Fabric and whet. Each runs in
its own process, and only one computes at a time; loops whose package is missing are listed. Every loop first does one
step, then a pass over the data, so that it has seen every shape (four passes for whet, which captures a shape when it
occurs again). Then all loops run blocks of the same steps in random order; a block of the slowest takes `--seconds`.

"First step after" starts with a built model, loaded data and an initialized device (on a GPU, compiled loops compile
concurrently). "Set-up in total" is the extra time of the first passes over later ones. No loop writes anything. Ratios
are computed within each round. Memory is a peak: reserved by the process, and used by tensors (on a CPU: the resident
set). Finally, the losses of the first steps without dropout are compared. `--small` is a smoke test; its times mean
nothing. `--write` writes the result into docs/bench/.
"""

import argparse
import sys
from collections.abc import Iterator

from results import at_least
from side_by_side.losses import check
from side_by_side.options import complete, make_parser, print_and_exit, report_head
from side_by_side.spec import LOOPS, WORKLOADS, Spec
from side_by_side.table import agreement, table
from side_by_side.timing import compare_loops

MAX_STEPS = 1_000_000


def specs_of(workload: str, given: argparse.Namespace, *, records_losses: bool) -> Iterator[Spec]:
    for loop in given.loops:
        if (loop == "whet-graph" and given.device != "cuda") or (
            loop == "trainer-fixed" and not workload.startswith("text")
        ):
            continue
        yield Spec(
            loop=loop,
            workload=workload,
            device=given.device,
            scale=given.scale,
            precision=given.precision,
            total_steps=given.losses if records_losses else MAX_STEPS,
            has_dropout=not records_losses,
            workers=given.workers,
            threads=given.threads,
            records_losses=records_losses,
        )


def report(given: argparse.Namespace) -> Iterator[str]:
    yield from report_head("Comparison with other loops", "peers", given)
    for workload in given.workloads:
        yield from one_workload(workload, given)


def one_workload(workload: str, given: argparse.Namespace) -> Iterator[str]:
    if not list(specs_of(workload, given, records_losses=False)):
        yield f"### {workload}: none of {', '.join(given.loops)} can train it on {given.device}"
        yield ""
        return
    if not given.only_losses:
        comparison = compare_loops(
            specs_of(workload, given, records_losses=False),
            rounds=given.rounds,
            seconds=given.seconds,
            max_warmup=given.warmup,
            log=lambda line: print(f"{workload}: {line}", file=sys.stderr, flush=True),
        )
        yield from table(comparison)
    if given.losses:
        yield from agreement(check(specs_of(workload, given, records_losses=True), at_once=given.at_once))


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, warmup=1024)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--loops", nargs="+", choices=list(LOOPS), default=list(LOOPS))
    parser.add_argument("--losses", type=at_least(0), default=30, help="number of losses to compare; 0: none")
    parser.add_argument("--only-losses", action="store_true")
    parser.add_argument("--at-once", type=at_least(1), help="concurrent processes while losses are compared")
    parser.add_argument("--workers", type=int, help="DataLoader workers; 0 on a CPU, else 4")
    given = complete(parser.parse_args(args), smoke_warmup=4)
    is_cpu = given.device == "cpu"
    given.workers = (0 if is_cpu else 4) if given.workers is None else given.workers
    given.at_once = (1 if is_cpu else 6) if given.at_once is None else given.at_once
    given.losses = min(given.losses, 6) if given.small else given.losses
    return given


if __name__ == "__main__":
    options = parse()
    print_and_exit(report(options), name="peers", device=options.device, is_written=options.write, out=options.out)
