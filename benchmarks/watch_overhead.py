"""Slow-down of a training by `whet watch`: five open pages against none, alternating during the training.

    python benchmarks/watch_overhead.py [--pairs 20] [--seconds 5] [--milliseconds 5] [--cores 0,1]

The training is pinned to the first core, `whet watch` and its clients to the second (Linux). Four clients behave like
the page of the run: they listen, and fetch the run whenever it changed; the fifth has the list open. Time is divided
into windows, with and without the pages, in pairs of random order. A step lasts from one call of the loss to the next;
half a second after each switch is dropped, and the slowest tenth of a window's steps. Ratios are computed within each
pair; the result is their median with its 95 % bootstrap interval. It needs an otherwise idle machine: on a busy one,
work displaced from the pages' core slows the training. CPU time shows the remaining effect. Finally the server is
killed, and the training must continue.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from whet.base.env import child_environment

CLIENTS = 5
BATCH = 32


def train(run: Path, steps_file: Path, *, milliseconds: float, core: int) -> None:
    """Train until a file `stop` appears next to the run, then write when each step began."""
    import torch
    from torch import nn

    import whet

    pin(core)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH * 64, 64), torch.randint(0, 10, (BATCH * 64,))

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))

    width = 128
    while width < 4096 and step_seconds(make(width), x[:BATCH], y[:BATCH]) * 1e3 < milliseconds:
        width = int(width * 1.2)
    model, begun = make(width), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loss(micro):
        begun.append((time.monotonic(), time.process_time()))
        return nn.functional.cross_entropy(model(micro.x), micro.y)

    overrides = {"threads": 1, "micro_batch": BATCH, "device": "cpu"}
    with whet.Session(
        model, optimizer, (x, y), global_batch_size=BATCH, epochs=10**6, run=run, overrides=overrides
    ) as session:
        for batch in session:
            session.step(loss, batch)
            if len(begun) % 50 == 0 and (steps_file.parent / "stop").exists():
                break
    steps_file.write_text(json.dumps(begun))


def step_seconds(model, x, y) -> float:
    from torch import nn

    spent = []
    for _ in range(12):
        start = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


class Page(threading.Thread):
    """A client that behaves like a browser with the page open."""

    def __init__(self, port: int, token: str, ident: str | None) -> None:
        super().__init__(daemon=True)
        self._port, self._headers, self._shown = port, {"Authorization": f"Bearer {token}"}, ident
        self._stream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._is_closed = False
        self.fetched = 0
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # The server is killed in the end.
            query = f"?run={self._shown}" if self._shown else ""
            self._stream.request("GET", f"/api/stream{query}", headers=self._headers)
            lines = self._stream.getresponse()
            while not self._is_closed and (line := lines.readline()):
                if line.startswith((b"event: run\n", b"event: hello")):
                    self._fetch()

    def _fetch(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        connection.request("GET", f"/api/runs/{self._shown}" if self._shown else "/api/runs", headers=self._headers)
        connection.getresponse().read()
        connection.close()
        self.fetched += 1

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._stream.sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def watching(folder: Path, home: Path) -> Iterator[tuple[subprocess.Popen, int, str]]:
    words = [sys.executable, "-m", "whet", "watch", str(folder), "--port", "0", "--json", "--no-browser"]
    server = subprocess.Popen(words, env=child_environment(WHET_HOME=str(home)), stdout=subprocess.PIPE, text=True)
    try:
        started = json.loads(server.stdout.readline())
        file = next((home / "servers").glob("watch-*.json"))
        yield server, int(started["url"].rstrip("/").rpartition(":")[2]), json.loads(file.read_text())["token"]
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@contextlib.contextmanager
def ended(training: subprocess.Popen) -> Iterator[None]:
    """Stop the training when something else fails."""
    try:
        yield
    except BaseException:
        training.kill()
        raise


Moment = tuple[float, float]
"""Wall-clock and CPU time of the training."""


def window_mean(begun: list[Moment], start: float, end: float, *, clock: int) -> float:
    """Return the mean step of a window without its slowest tenth, in wall-clock (0) or CPU time (1)."""
    inside = [moment[clock] for moment in begun if start + 0.5 <= moment[0] <= end]
    steps = sorted(later - earlier for earlier, later in itertools.pairwise(inside))
    quick = steps[: math.ceil(0.9 * len(steps))]
    return sum(quick) / len(quick)


def interval(values: list[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2_000))
    return medians[50], medians[-51]


def shown(ratios: list[float]) -> str:
    low, high = interval(ratios)
    return f"{statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}"


def measure(folder: Path, *, pairs: int, seconds: float, milliseconds: float, cores: tuple[int, int]) -> None:
    run, steps_file = folder / "runs" / "trained", folder / "steps.json"
    pin(cores[1])
    from whet.report.watch.status_reader import run_id

    words = [sys.executable, __file__, "--train", str(run), str(steps_file), str(milliseconds), str(cores[0])]
    training = subprocess.Popen(words, env=child_environment(WHET_HOME=str(folder / "home")))
    windows: list[list[tuple[str, float, float]]] = []
    fetched = 0
    toss = random.Random(0)
    with ended(training), watching(folder / "runs", folder / "home") as (server, port, token):
        while not (run / "events.jsonl").exists() or (run / "events.jsonl").stat().st_size < 100_000:
            time.sleep(0.2)
            if training.poll() is not None:
                sys.exit("the training ended before it was looked at")
        cpu = server_cpu(server.pid)
        for _ in range(pairs):
            pair = []
            for kind in toss.sample(("with", "without"), 2):
                pages = []
                if kind == "with":
                    idents = [run_id("trained")] * (CLIENTS - 1) + [None]
                    pages = [Page(port, token, ident) for ident in idents]
                start = time.monotonic()
                time.sleep(seconds)
                pair.append((kind, start, time.monotonic()))
                fetched += sum(page.fetched for page in pages)
                for page in pages:
                    page.close()
            windows.append(pair)
        cpu = server_cpu(server.pid) - cpu
        server.send_signal(signal.SIGKILL)
        server.wait()
    time.sleep(1.0)
    is_alive = training.poll() is None
    (folder / "stop").touch()
    code = training.wait(120)
    begun = json.loads(steps_file.read_text())
    share = cpu / (pairs * seconds)
    print(
        f"{len(begun):,} steps, {pairs} pairs of windows of {seconds:g} s; load of the machine {os.getloadavg()[0]:.1f}"
    )
    print(f"{CLIENTS} pages fetched {fetched} times; while they were open, the server took {share:.1%} of its core")
    for clock, name in enumerate(("on the clock", "in processor time")):
        means = [{kind: window_mean(begun, start, end, clock=clock) for kind, start, end in pair} for pair in windows]
        step = 1e3 * statistics.median(pair["without"] for pair in means)
        pages = [pair["with"] / pair["without"] for pair in means]
        noise = [one["without"] / other["without"] for one, other in itertools.pairwise(means)]
        print(f"a step {name} ({step:.2f} ms): {CLIENTS} pages to none {shown(pages)}")
        print(f"    the noise, none to none from pair to pair: {shown(noise)}")
    print(f"server killed: the training went on ({is_alive}) and ended with code {code}")


def server_cpu(pid: int) -> float:
    import psutil

    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        run, steps_file, milliseconds, core = sys.argv[2:]
        train(Path(run), Path(steps_file), milliseconds=float(milliseconds), core=int(core))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--cores", default="0,1")
    given = parser.parse_args()
    cores = tuple(int(core) for core in given.cores.split(","))
    with tempfile.TemporaryDirectory() as folder:
        measure(
            Path(folder), pairs=given.pairs, seconds=given.seconds, milliseconds=given.milliseconds, cores=cores[:2]
        )


if __name__ == "__main__":
    main()
