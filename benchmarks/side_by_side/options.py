"""Options and output that benchmarks of loops side by side share."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from results import BELOW_TARGET, at_least, head, write

MISSED = ("NOT EQUAL", "ABOVE TARGET")
"""Words in a result that misses its target."""


def make_parser(description: str | None, *, warmup: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a block of the slowest loop")
    parser.add_argument("--rounds", type=at_least(1), default=8)
    parser.add_argument("--warmup", type=at_least(1), default=warmup, help="maximum warm-up steps")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="fp32 on a CPU, else bf16")
    parser.add_argument("--threads", type=int, help="CPU threads of every loop; default: torch's")
    parser.add_argument("--small", action="store_true", help="a smoke test; its times mean nothing")
    parser.add_argument("--write", action="store_true", help="write the result into docs/bench/")
    parser.add_argument("--out", type=Path, help="a file for the result, beside the screen")
    return parser


def complete(given: argparse.Namespace, *, smoke_warmup: int) -> argparse.Namespace:
    """Set what depends on the device and on `--small`."""
    given.precision = given.precision or ("fp32" if given.device == "cpu" else "bf16")
    given.scale = "tiny" if given.small else "cpu" if given.device == "cpu" else "full"
    if given.small:
        given.seconds, given.rounds, given.warmup = min(given.seconds, 0.05), min(given.rounds, 2), smoke_warmup
    return given


def report_head(title: str, script: str, given: argparse.Namespace) -> Iterator[str]:
    args = [word for word in sys.argv[1:] if given.out is None or word not in ("--out", str(given.out))]
    yield from head(title, given.device, f"python benchmarks/{script}.py {' '.join(args)}")
    yield "The columns are explained in that file."
    yield ""


def print_and_exit(
    lines: Iterable[str], *, name: str, device: str, is_written: bool, out: Path | None = None
) -> NoReturn:
    """Print lines as they come, write them where it was asked for, and exit with the code for the result."""
    text = ""
    for line in lines:
        text += f"{line}\n"
        print(line, flush=True)
        if out:
            # A benchmark that is stopped leaves what it has.
            out.write_text(text)
    if is_written:
        write(name, device, text.rstrip() + "\n")
    sys.exit(BELOW_TARGET if any(word in text for word in MISSED) else 0)
