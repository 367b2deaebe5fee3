"""Training beside busy loops on the same cores, with threads that wait for each other in several ways.

    python benchmarks/busy.py [--workloads text32 chat hex] [--loops 0 2 3 4] [--rounds 5] [--seconds 1] [--write]

Every way trains the same workload with whet's default plan in its own process; only one trains at a time. For each
number of busy loops, which this benchmark starts and ends, all ways run blocks of the same steps in random order, once
per round. A block takes `--seconds` without busy loops. "Command line" is what `whet train` does: whet sets the
variables before torch is loaded. "Python" has none of them and loads torch before whet, like a script. The last lines
compare the worst round of both with the median of the best way. `--write` writes the result into docs/bench/.
"""

import argparse
import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from results import at_least, head
from side_by_side.options import print_and_exit
from side_by_side.process import LoopProcess
from side_by_side.spec import WORKLOADS, Spec

MAX_STEPS = 1_000_000
WARMUP_STEPS = 64
TARGET = 1.4


@dataclass(kw_only=True)
class Way:
    """How threads wait: variables for the process, and its number of threads."""

    name: str
    variables: Mapping[str, str | None]
    threads: int | None = None
    blocks: dict[int, list[float]] = field(default_factory=dict)
    """Seconds per step of each round, by the number of busy loops."""


def ways() -> list[Way]:
    unset = {"OMP_WAIT_POLICY": None, "GOMP_SPINCOUNT": None, "KMP_BLOCKTIME": None}
    return [
        Way(name="300,000 turns (libgomp's default)", variables={**unset, "GOMP_SPINCOUNT": "300000"}),
        # Not 10,000, which is whet's own value: a value of the user's is never changed.
        Way(name="9,999 turns", variables={**unset, "GOMP_SPINCOUNT": "9999"}),
        Way(name="0 turns", variables={**unset, "GOMP_SPINCOUNT": "0"}),
        Way(name="one thread", variables={**unset, "GOMP_SPINCOUNT": "9999"}, threads=1),
        Way(name=f"{FOLLOWED}, command line", variables={**unset, "GOMP_SPINCOUNT": "10000"}),
        Way(name=f"{FOLLOWED}, Python", variables=unset),
    ]


FOLLOWED = "whet (follows contention)"


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep `count` processes busy while entered."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(workload: str, given: argparse.Namespace) -> tuple[list[Way], int]:
    """Return the ways with their times, and the number of steps of a block."""
    tried = ways()
    with ExitStack() as stack:
        trainings = [
            LoopProcess(
                Spec(
                    loop="whet",
                    workload=workload,
                    device="cpu",
                    scale="tiny" if given.small else "cpu",
                    precision="fp32",
                    total_steps=MAX_STEPS,
                    has_dropout=True,
                    workers=0,
                    threads=way.threads,
                ),
                variables=way.variables,
            )
            for way in tried
        ]
        for training in trainings:
            stack.callback(training.close)
        for training in trainings:
            training.wait_made()
            training.steps(4 if given.small else WARMUP_STEPS)
        block = max(2, round(given.seconds / median(training.steps(4)["seconds"] / 4 for training in trainings)))
        rng = random.Random(0)
        for count in given.loops:
            with busy_loops(count):
                for _ in range(given.rounds):
                    for way, training in rng.sample(list(zip(tried, trainings, strict=True)), len(tried)):
                        way.blocks.setdefault(count, []).append(training.steps(block)["seconds"] / block)
            # A benchmark that is stopped leaves what it has.
            cells = "; ".join(f"{way.name} {_cell(way.blocks[count])}" for way in tried)
            print(f"{workload}: {count} busy loops: {cells}", file=sys.stderr, flush=True)
    return tried, block


def report(given: argparse.Namespace) -> Iterator[str]:
    yield from head("Beside busy loops", "cpu", f"python benchmarks/busy.py {' '.join(sys.argv[1:])}")
    yield "Milliseconds of a step: the median of the rounds (the fastest to the slowest)."
    yield ""
    for workload in given.workloads:
        tried, block = measure(workload, given)
        yield f"### {workload}: {given.rounds} rounds of {block} steps"
        yield ""
        yield "| waiting threads spin for | " + " | ".join(f"{count} busy loops" for count in given.loops) + " |"
        yield "| --- |" + " ---: |" * len(given.loops)
        for way in tried:
            cells = (way.blocks[count] for count in given.loops)
            yield f"| {way.name} | " + " | ".join(map(_cell, cells)) + " |"
        yield ""
        for way in (way for way in tried if way.name.startswith(FOLLOWED)):
            yield from _verdicts(way, tried, given.loops)
        yield ""


def _cell(blocks: list[float]) -> str:
    low, middle, high = (1e3 * number for number in (min(blocks), median(blocks), max(blocks)))
    return f"{middle:.1f} ({low:.1f} to {high:.1f})"


def _verdicts(way: Way, tried: list[Way], counts: list[int]) -> Iterator[str]:
    """Compare the worst round of a way with the median of the best way; without busy loops the medians."""
    ratios = []
    for count in counts:
        best = min(median(other.blocks[count]) for other in tried)
        worst = (max if count else median)(way.blocks[count]) / best
        ratios.append(f"{worst:.2f}{' **ABOVE TARGET**' if count and worst > TARGET else ''} ({count})")
    yield f"- {way.name}, worst round over the best median (0: median): {', '.join(ratios)}"


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["text32", "chat", "hex"])
    parser.add_argument("--loops", nargs="+", type=at_least(0), default=[0, 2, 3, 4], help="numbers of busy loops")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of a block without busy loops")
    parser.add_argument("--small", action="store_true", help="a smoke test; its times mean nothing")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result, beside the screen")
    return parser.parse_args(args)


if __name__ == "__main__":
    options = parse()
    # Busy loops must end with this process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print_and_exit(report(options), name="busy", device="cpu", is_written=options.write, out=options.out)
