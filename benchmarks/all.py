"""Run benchmarks one after the other, each within its own time limit.

    python benchmarks/all.py --device cpu [--only overhead regret]        each writes a dated page into docs/bench/
    python benchmarks/all.py --device cuda --issue 28 --out DIR           what an issue asks for on a GPU, in one call
    python benchmarks/all.py --device cuda --issue 25 27 28 29 --list     what that would be, with the limits

`--minutes` is for all of them: one whose limit does not fit into the rest is left out and named. `--begin-with NAME` is
for a second call. With `--out` everything goes into one file per issue there, as it comes, and no page is written:
a machine that is taken back leaves what it has. `--small` is a smoke test and writes nothing.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from results import BELOW_TARGET, head, write

from whet.base import env

HERE = Path(__file__).parent
STOPPED = 124
"""Exit code of a benchmark that reached its limit, as of timeout(1)."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One benchmark with its arguments."""

    command: tuple[str, ...]
    """A script of this folder with its arguments, or "-m" with a module."""
    minutes: float
    title: str = ""
    """Title of its page; a script without one writes its own."""
    issues: tuple[int, ...] = ()
    smoke: tuple[str, ...] = ()
    """More arguments for the smoke test."""


PAGES = {
    "peers": Part(
        command=("peers.py", "--device", "{device}"), minutes=60, smoke=("--small", "--loops", "bare", "whet")
    ),
    "overhead": Part(
        command=("overhead.py",),
        minutes=30,
        title="Overhead of a step",
        smoke=("--rounds", "2", "--steps", "4", "--milliseconds", "0.1"),
    ),
    "regret": Part(
        command=("regret.py", "--device", "{device}"),
        minutes=60,
        title="Regret of a measured plan",
        smoke=("conv", "--budget", "2"),
    ),
}
"""What is run without --issue."""

_FOREIGN = ("foreign.py", "--device", "{device}", "--rounds", "6", "--seconds", "0.5", "--warmup", "48", "--model")


def _foreign(*models: str, minutes: float) -> Part:
    return Part(command=(*_FOREIGN, *models), minutes=minutes, issues=(28,), smoke=("--small",))


ISSUES = {
    # In the order in which they matter, so that a short lease answers the most.
    "graphs": Part(
        command=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "tests/device/test_cuda_graphs.py"),
        minutes=3,
        issues=(25, 28, 29),
    ),
    "foreign-mlp": _foreign("mlp", minutes=2.5),
    "foreign-gpt2": _foreign("gpt2", minutes=5),
    "foreign-resnet50": _foreign("resnet50", minutes=4),
    "foreign-vit": _foreign("vit", minutes=4),
    "foreign-small": _foreign("lstm", "recommender", "convnet", minutes=6),
    "foreign-bert": _foreign("bert", minutes=4),
    "foreign-nets": _foreign("unet", "diffusion", "convnext", minutes=8),
    "foreign-whisper": _foreign("whisper", minutes=4),
    "recipes": Part(
        command=(
            "peers.py", "--device", "{device}", "--loops", "expert", "expert-compiled", "whet", "whet-graph",
            "--rounds", "4", "--seconds", "0.7", "--losses", "0",
        ),
        minutes=8,
        issues=(25, 28),
        smoke=("--small",),
    ),
    "trm": Part(
        command=("trm_speed.py", "--device", "{device}", "--seconds", "5"),
        minutes=4,
        issues=(25, 28),
        smoke=("--small",),
    ),
    "resumes": Part(
        command=("resumes.py", "--device", "{device}", "--first", "5"), minutes=5, issues=(27,), smoke=("--first", "1")
    ),
    "device-tests": Part(
        command=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "tests/device"), minutes=8, issues=(25, 29)
    ),
}  # fmt: skip
"""What the issues of this repository ask for on a GPU."""


def run(name: str, part: Part, *, device: str, is_small: bool, seconds: float, log: Path | None) -> int:
    """Run one benchmark and return its exit code. Its page or its log is written."""
    args = [word.format(device=device) for word in part.command] + (list(part.smoke) if is_small else [])
    is_module = args[0] == "-m"
    command = " ".join(["python", *(args if is_module else [f"benchmarks/{args[0]}", *args[1:]])])
    started, lines = time.monotonic(), [f"--- {command}  (at most {seconds:.0f} s)"]
    print(lines[0], flush=True)
    process = subprocess.Popen(
        [sys.executable, *(args if is_module else [str(HERE / args[0]), *args[1:]])],
        stdout=subprocess.PIPE,
        stderr=None if log is None else subprocess.STDOUT,
        text=True,
        cwd=HERE.parent,
        # A group of its own, so that the processes of its loops end with it.
        start_new_session=True,
        env=env.child_environment(PYTHONUNBUFFERED="1"),
    )
    is_late = threading.Event()
    limit = threading.Timer(seconds, lambda: (is_late.set(), os.killpg(process.pid, signal.SIGKILL)))
    limit.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
            _append(log, line)
        code = STOPPED if process.wait() and is_late.is_set() else process.returncode
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
    end = f"--- {name}: exit code {code} after {time.monotonic() - started:.0f} s"
    print(end, flush=True)
    _append(log, f"{lines[0]}\n{end}\n\n")
    if log is None and not is_small and code in (0, BELOW_TARGET):
        # Benchmarks without --device run on the CPU.
        where = device if "{device}" in part.command else "cpu"
        page = [*head(part.title, where, command), "```", *lines[1:], "```"] if part.title else lines[1:]
        print(f"--- {write(name, where, chr(10).join(page).rstrip() + chr(10))}")
    return code


def _append(log: Path | None, text: str) -> None:
    if log is not None:
        with log.open("a") as file:
            file.write(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda", "mps"), default="cpu")
    parser.add_argument("--issue", nargs="+", type=int, choices=sorted({n for p in ISSUES.values() for n in p.issues}))
    parser.add_argument("--only", nargs="+", choices=[*PAGES, *ISSUES])
    parser.add_argument("--begin-with", choices=list(ISSUES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for everything")
    parser.add_argument("--out", type=Path, help="a folder for the output")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    parts = dict(PAGES)
    if given.issue or given.begin_with or set(given.only or ()) & set(ISSUES):
        parts = {n: part for n, part in ISSUES.items() if not given.issue or set(given.issue) & set(part.issues)}
    if given.begin_with:
        names = list(ISSUES)
        parts = {n: part for n, part in parts.items() if names.index(n) >= names.index(given.begin_with)}
    if given.only:
        parts = {n: part for n, part in {**PAGES, **ISSUES}.items() if n in given.only}
    if given.list:
        for name, part in parts.items():
            print(f"{name:18} {part.minutes:4g} min  {' '.join(part.command).format(device=given.device)}")
        print(f"{'in all, at most':18} {sum(part.minutes for part in parts.values()):4g} min")
        return
    log = None
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        log = given.out / f"issue-{'-'.join(map(str, given.issue or [])) or 'all'}.log"
    # The benchmarks are in groups of their own, so they must be ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end, codes, left_out = time.monotonic() + 60 * given.minutes, [], []
    for name, part in parts.items():
        if time.monotonic() + 60 * part.minutes > end:
            left_out.append(name)
            continue
        codes.append(run(name, part, device=given.device, is_small=given.small, seconds=60 * part.minutes, log=log))
    if left_out:
        print(f"--- no time was left for {', '.join(left_out)}: --only {' '.join(left_out)}")
    sys.exit(max(codes, default=0))


if __name__ == "__main__":
    main()
