"""Sensitivity of slow-down detection: recorded step times, slowed down arithmetically.

    python benchmarks/step_drift.py record FILE       # two minutes on an otherwise idle machine
    python benchmarks/step_drift.py judge tests/support/recordings/steps/step_seconds.txt

The recording trains the text recipe next to processes that each keep a core busy. `judge` draws blocks of the recording
(which keeps its drift), slows them down from some step on, and counts the steps until the report.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from whet.run.events import read_events
from whet.run.folder import open_run
from whet.training.callbacks.drift import SlowdownDetector

BLOCK = 100
"""Consecutive steps that are drawn together: about two seconds."""
STARTS = (120, 200, 300, 400)
LONGEST = 300
_BUSY_LOOP = "while True: sum(i * i for i in range(10_000))"
_PHASES = ("transfer", "forward", "backward", "optimizer")


def draw(recorded: list[float], count: int, *, seed: int) -> list[float]:
    """Draw steps in random blocks of the recording."""
    chance, drawn = random.Random(seed), []
    while len(drawn) < count:
        start = chance.randrange(len(recorded) - BLOCK)
        drawn += recorded[start : start + BLOCK]
    return drawn[:count]


def slowed(seconds: list[float], *, factor: float, start: int, ramp: int = 1) -> Iterator[float]:
    """Slow the steps down from `start` on, gradually over `ramp` steps."""
    for place, value in enumerate(seconds):
        yield value * (1 + (factor - 1) * min(1.0, max(0, place - start + 1) / ramp))


def first_report(seconds: Iterator[float] | list[float]) -> int | None:
    """Return the index of the step at which a slow-down was reported, or None."""
    drift = SlowdownDetector()
    return next((place for place, value in enumerate(seconds) if drift.observe(place, value)), None)


def read(path: Path) -> list[float]:
    """Read a recording: comment lines, then the microseconds of one step per line."""
    return [float(line) / 1e6 for line in path.read_text().splitlines() if not line.startswith("#")]


def record(path: Path, *, neighbors: int, epochs: int) -> None:
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) for _ in range(neighbors)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = ["train", "text", f"epochs={epochs}", "threads=1", "--device", "cpu", "--run", f"{folder}/run"]
            subprocess.run([sys.executable, "-m", "whet", *words], check=True)
            steps = read_events(open_run(Path(folder) / "run"), kinds=("step",))
            seconds = [sum(event.get("seconds").get(phase, 0.0) for phase in _PHASES) for event in steps]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    made = f"# benchmarks/step_drift.py record --neighbors {neighbors} --epochs {epochs}; microseconds of each step\n"
    path.write_text(made + "".join(f"{value * 1e6:.0f}\n" for value in seconds))


def judge(path: Path, *, seeds: int) -> None:
    recorded = read(path)
    false = sum(first_report(draw(recorded, 500, seed=seed)) is not None for seed in range(seeds))
    print(f"{len(recorded):,} steps recorded; false alarms in {seeds} quiet runs of 500 steps: {false}\n")
    print("| slower by | comes | runs | seen in 60 steps | never in 300 | false before | median steps | 95 % | most |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for factor in (1.1, 1.15, 1.2, 1.25, 1.3, 1.5, 2.0):
        for ramp, comes in ((1, "at once"), (30, "over 30 steps")):
            delays, missed, early = [], 0, 0
            for seed in range(seeds):
                for start in STARTS:
                    drawn = draw(recorded, start + LONGEST, seed=seed)
                    seen = first_report(slowed(drawn, factor=factor, start=start, ramp=ramp))
                    missed += seen is None
                    early += seen is not None and seen < start
                    delays += [seen - start + 1] if seen is not None and seen >= start else []
            delays.sort()
            soon = sum(delay <= 60 for delay in delays)
            shown = [str(delays[int(share * (len(delays) - 1))]) if delays else "-" for share in (0.5, 0.95, 1.0)]
            runs = seeds * len(STARTS)
            print(f"| {factor - 1:.0%} | {comes} | {runs} | {soon} | {missed} | {early} | {' | '.join(shown)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "judge"))
    parser.add_argument("path", type=Path)
    parser.add_argument("--neighbors", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=50)
    args = parser.parse_args()
    if args.what == "record":
        record(args.path, neighbors=args.neighbors, epochs=args.epochs)
    else:
        judge(args.path, seeds=args.seeds)


if __name__ == "__main__":
    main()
