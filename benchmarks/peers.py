"""whet beside other loops: the same model, data, order, global batch and precision, in turns in one run.

    python benchmarks/peers.py --device cuda [--workloads text32 text256 hex chat] [--ways ...] [--seconds 2] [--write]

Ways are a bare loop, an expert's, Hugging Face's Trainer, Accelerate, Lightning, Fabric and whet, each in a process of
its own; only one computes at a time. Those whose package is not installed are named. Every way first makes one step,
then a pass over the data, so that it has met every shape (four for whet, which captures them when they come again);
then all make blocks of the same steps in tossed order, as long as the slowest needs `--seconds` for. "First step after"
counts from a made model and read data, with the device woken up (on a GPU those that compile do so at once); "set-up in
all" is what these passes took more than later ones do. No way writes anything. Ratios are taken inside a round. Memory
is a peak: what the device holds for the process, and what tensors used of it (on a CPU: the whole process). In the end
the losses of the first steps without dropout are compared. `--small` tries this file itself; its times mean nothing.
`--write` writes the result into docs/bench/.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from results import FALLS_SHORT, at_least, head, write
from side_by_side.losses import check
from side_by_side.spec import WAYS, WORKS, Spec
from side_by_side.table import agreement, table
from side_by_side.timing import hold

MOST_STEPS = 1_000_000


def specs_of(work: str, given: argparse.Namespace, *, takes_losses: bool) -> Iterator[Spec]:
    scale = "tiny" if given.small else "cpu" if given.device == "cpu" else "full"
    for way in given.ways:
        if (way == "whet-graph" and given.device != "cuda") or (way == "trainer-fixed" and not work.startswith("text")):
            continue
        yield Spec(
            way=way,
            work=work,
            device=given.device,
            scale=scale,
            precision=given.precision or ("fp32" if given.device == "cpu" else "bf16"),
            total_steps=given.losses if takes_losses else MOST_STEPS,
            has_dropout=not takes_losses,
            workers=given.workers,
            threads=given.threads,
            takes_losses=takes_losses,
        )


def report(given: argparse.Namespace) -> Iterator[str]:
    words = [word for word in sys.argv[1:] if given.out is None or word not in ("--out", str(given.out))]
    yield from head("Beside other loops", given.device, f"python benchmarks/peers.py {' '.join(words)}")
    yield "What the columns mean is said there."
    yield ""
    for work in given.workloads:
        yield from one_work(work, given)


def one_work(work: str, given: argparse.Namespace) -> Iterator[str]:
    if not list(specs_of(work, given, takes_losses=False)):
        yield f"### {work}: none of {', '.join(given.ways)} can train it on {given.device}"
        yield ""
        return
    if not given.only_losses:
        contest = hold(
            specs_of(work, given, takes_losses=False),
            rounds=given.rounds,
            seconds=given.seconds,
            most_warmup=given.warmup,
            tell=lambda line: print(f"{work}: {line}", file=sys.stderr, flush=True),
        )
        yield from table(contest)
    if given.losses:
        yield from agreement(check(specs_of(work, given, takes_losses=True), at_once=given.at_once))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--workloads", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block of the slowest way")
    parser.add_argument("--rounds", type=at_least(1), default=8)
    parser.add_argument("--warmup", type=at_least(1), default=1024, help="steps before, at most")
    parser.add_argument("--losses", type=at_least(0), default=30, help="how many are compared; 0: none")
    parser.add_argument("--only-losses", action="store_true")
    parser.add_argument("--at-once", type=at_least(1), help="processes while losses are compared")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="fp32 on a CPU, else bf16")
    parser.add_argument("--workers", type=int, help="processes that read data for a DataLoader; 0 on a CPU, else 4")
    parser.add_argument("--threads", type=int, help="of every way on a CPU; as many as torch takes if not given")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", type=Path, help="a file for the result, beside the screen")
    given = parser.parse_args(words)
    is_cpu = given.device == "cpu"
    given.workers = (0 if is_cpu else 4) if given.workers is None else given.workers
    given.at_once = (1 if is_cpu else 6) if given.at_once is None else given.at_once
    if given.small:
        given.seconds, given.rounds, given.warmup = min(given.seconds, 0.05), min(given.rounds, 2), 4
        given.losses = min(given.losses, 6)
    return given


def main() -> None:
    given = parse()
    lines: list[str] = []
    for line in report(given):
        lines.append(line)
        print(line, flush=True)
    text = "\n".join(lines).rstrip() + "\n"
    if given.write:
        write("peers", given.device, text)
    if given.out:
        given.out.write_text(text)
    sys.exit(FALLS_SHORT if "NOT EQUAL" in text else 0)


if __name__ == "__main__":
    main()
