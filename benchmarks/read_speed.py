"""Speed of reading runs: list a thousand, and open one of five million events with all its curves.

    python benchmarks/read_speed.py [--events 5000000] [--runs 1000] [--folder DIR]

The long run is written by whet's own log (one event per step, health every 500 steps, an evaluation every 5,000, a
resume after two thirds that goes back 1,000 steps), 1.7 GB; DIR keeps it for the next time. Each figure is from its own
process, peak memory included, with Python and numpy. Files are read from the page cache, as during training: the first
read after a restart takes as long as the disk. "CPU" includes the start of Python.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whet.base.env import child_environment
from whet.run.events import EventLog
from whet.run.folder import EVENTS_FILE, INDEX_FILE, create_run, installed_versions

MEASURED = """
import json, resource, sys, time
from pathlib import Path
began = time.perf_counter()
{code}
seconds = time.perf_counter() - began
cpu = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({{"seconds": seconds, "cpu": cpu, "peak": peak, "found": found}}))
"""
LIST = "from whet.report.run_status import list_runs; found = len(list_runs(Path(sys.argv[1])))"
OPEN = """
from whet.run.events import History
from whet.run.curve import downsample_curves
history = History(Path(sys.argv[1]))
curves = downsample_curves(history, points=400)
found = [len(curves), sum(len(curve.points) for curve in curves.values()), history.layout.num_indexed]
"""
REPORT = "from whet.report.run_report import summarize; found = summarize(Path(sys.argv[1])).step"
REBUILD = """
from whet.run.event_index import scan_blocks
path = Path(sys.argv[1]) / "events.jsonl"
with path.open("rb") as file:
    size = path.stat().st_size
    found = len(list(scan_blocks(file, start=0, size=size)))
"""
LIVE = """
from whet.run.follow import LiveHistory
from whet.run.curve import downsample_curves
from whet.run.events import EventLog
history = LiveHistory(Path(sys.argv[1]))
downsample_curves(history, points=400, is_growing=True)
refreshing, drawing = [], []
with EventLog(Path(sys.argv[1])) as log:
    for look in range(20):
        for step in range(100):
            log.append("step", step={events} + 1 + 100 * look + step, loss=1.0, samples=1, lr=0.1)
        log.flush()
        began = time.perf_counter()
        news = history.refresh()
        refreshing.append(time.perf_counter() - began)
        assert news == "grown", news
        began = time.perf_counter()
        downsample_curves(history, points=400, is_growing=True)
        drawing.append(time.perf_counter() - began)
found = [sorted(refreshing)[10], sorted(drawing)[10]]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=5_000_000)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        many = folder / f"{given.runs}-runs"
        if not many.exists():
            make_runs(many, given.runs)
        measured = min((measure(LIST, many) for _ in range(3)), key=lambda m: m["seconds"])
        print(f"{given.runs:,} runs listed: {spent(measured)}")

        long = folder / f"{given.events}-events"
        if not (long / EVENTS_FILE).exists():
            began = time.perf_counter()
            make_long_run(long, given.events)
            print(f"{given.events:,} events written: {time.perf_counter() - began:.0f} s")
        size, indexed = ((long / name).stat().st_size for name in (EVENTS_FILE, INDEX_FILE))
        print(f"events {size / 1e9:.2f} GB, index {indexed / 1e6:.1f} MB")
        for name, code in (("opened with all curves", OPEN), ("summarized", REPORT)):
            measured = min((measure(code, long) for _ in range(3)), key=lambda m: m["seconds"])
            print(f"{name}: {spent(measured)}, found {measured['found']}")
        measured = measure(REBUILD, long)
        speed = size / measured["seconds"] / 1e6
        print(f"index rebuilt: {spent(measured)}, {speed:.0f} MB/s")
        live = Path(scratch) / "live"
        shutil.copytree(long, live)
        measured = measure(LIVE.replace("{events}", str(given.events)), live)
        refresh, draw = (1e3 * seconds for seconds in measured["found"])
        print(f"live: refreshed in {refresh:.1f} ms, all curves again in {draw:.1f} ms; {spent(measured)}")


def measure(code: str, folder: Path) -> dict[str, Any]:
    """Return the time and memory of a separate process."""
    home = child_environment(WHET_HOME=str(folder / "home"))
    program = MEASURED.format(code=code)
    done = subprocess.run([sys.executable, "-c", program, folder], check=True, capture_output=True, env=home)
    return json.loads(done.stdout)


def make_run(path: Path, steps: int) -> Path:
    config = {"max_steps": steps, "lr": 1e-3, "seed": 0}
    settings = {f"setting_{n}": {"value": n, "reason": "r" * 60, "source": "rule", "evidence": "e"} for n in range(30)}
    create_run(
        path,
        recipe="text",
        config=config,
        plan={"settings": settings},
        machine={"name": "here"},
        versions=installed_versions(),
        command=["whet"],
    )
    return path


def make_runs(folder: Path, count: int) -> None:
    """Create ordinary runs with a few hundred steps, evaluations and a checkpoint of four files."""
    building = folder.with_name("building-runs")
    for number in range(count):
        run = make_run(building / f"text-{number:04}", 300)
        write_events(run, 300)
        checkpoint = run / "checkpoints" / "step-000000300"
        checkpoint.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors", "progress.json", "manifest.json"):
            (checkpoint / name).write_bytes(b"{}")
    building.rename(folder)


def make_long_run(folder: Path, events: int) -> None:
    building = make_run(folder.with_name("building-long"), events)
    write_events(building, events)
    building.rename(folder)


def write_events(folder: Path, events: int) -> None:
    """Write the events of a real run at 100 steps per second."""
    draw = random.Random(0)
    now = 1.7e9
    with EventLog(folder, clock=lambda: now, stopwatch=lambda: now) as log:
        log.append("start", step=0, total_steps=events, goal="accuracy", mode="max")
        step, back_at = 0, events * 2 // 3
        while step < events:
            step += 1
            now += 0.01 * (0.9 + 0.2 * draw.random())
            seconds = {
                "data": draw.random() * 1e-4,
                "transfer": draw.random() * 1e-5,
                "forward": draw.random() * 3e-3,
                "backward": draw.random() * 5e-3,
                "optimizer": draw.random() * 1e-3,
            }
            if step % 5_000 == 1 and step > 1:
                seconds["evaluate"] = draw.random()
            log.append(
                "step",
                step=step,
                epoch=step // 1_000,
                samples=32 * step,
                lr=1e-3 * (1 - step / (events + 1)),
                loss=3.0 / (1 + step / 1e5) + draw.random() * 0.1,
                grad_norm=draw.random() if step % 16 == 0 else None,
                seconds=seconds,
            )
            if step % 500 == 0:
                log.append("health", step=step, **health(draw, step))
            if step % 5_000 == 0:
                counts = [[draw.randrange(100) for _ in range(6)] for _ in range(6)]
                confusion = {"labels": list("abcdef"), "counts": counts}
                log.append("eval", step=step, accuracy=draw.random(), cross_entropy=draw.random(), confusion=confusion)
            if step == back_at and events > 3_000:
                step, back_at = step - 1_000, 0
                now += 3_600
                log.append("resume", step=step, total_steps=events, goal="accuracy", mode="max")
        log.append("end", step=step, state="done")


def health(draw: random.Random, step: int) -> dict[str, object]:
    parts = ("allocated", "reserved", "peak", "limit", "process", "used", "available", "swap")
    return {
        "samples": 32 * step,
        "samples_per_second": 3_200 * draw.random(),
        "memory": {name: draw.randrange(10**10) for name in parts},
        "utilization": {"cpu": 100 * draw.random(), "process": 100 * draw.random(), "gpu": 100 * draw.random()},
        "heat": "cool",
        "thermal": "nominal",
        "pressure": "normal",
    }


def spent(measured: dict[str, Any]) -> str:
    """Return wall-clock and CPU seconds; only the first includes waiting for a core."""
    return f"{measured['seconds']:.2f} s ({measured['cpu']:.2f} s of CPU), {measured['peak'] / 1e6:.0f} MB at its peak"


if __name__ == "__main__":
    main()
