"""The server of the live page on a slow machine, and with runs that change while it reads them."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request

from whet.report.watch import run_cache, status_reader
from whet.report.watch.listing import RunListing
from whet.report.watch.run_cache import RunCache
from whet.report.watch.server import WatchRoutes
from whet.report.watch.status_reader import run_id
from whet.run import lock, strict_json
from whet.run.events import EventLog
from whet.run.folder import Run, create_run, open_run
from whet.run.follow import LiveHistory

PATIENCE = 120.0
NEVER = 600.0


def make(root: Path, name: str = "run") -> Run:
    return create_run(root / name, recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"])


def train(run: Run, **end: object) -> None:
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=2)
        log.append("step", step=1, loss=0.5)
        if end:
            log.append("end", step=1, **end)


@pytest.fixture
def routes(tmp_path: Path) -> Iterator[WatchRoutes]:
    made = WatchRoutes(tmp_path)
    yield made
    made.close()


async def list_of(routes: WatchRoutes) -> list[dict]:
    request = Request({"type": "http", "query_string": b"", "headers": []})
    answer = await asyncio.wait_for(routes._runs(request), PATIENCE)
    return strict_json.decode(bytes(answer.body))["runs"]


def test_a_report_that_takes_long_is_not_made_at_every_request_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path)
    train(run)
    monkeypatch.setattr(run_cache, "_MAX_CORE_SHARE", 1e-9)  # As if rendering had taken minutes.
    monkeypatch.setattr(run_cache, "_MAX_PAUSE_SECONDS", 0.5)
    cache = RunCache(RunListing(tmp_path))
    first = cache.render(run_id("run"))
    train(run, state="done")
    assert cache.render(run_id("run")) is first
    time.sleep(0.6)
    assert cache.render(run_id("run")).report.state == "done"


class Clock:
    """A clock that moves only when advanced."""

    def __init__(self) -> None:
        self.wall = self.core = 0.0

    def monotonic(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.core


def test_waiting_for_a_core_does_not_count_as_work_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a training machine, the first reading of a small run took 50 ms of CPU and 700 ms in total."""
    clock = Clock()
    monkeypatch.setattr(run_cache, "time", clock)
    work = run_cache.WorkTimer()
    clock.wall, clock.core = 0.7, 0.05
    assert work.pause(share=0.03) == pytest.approx(0.7 / 0.2)
    clock.core = 0.3
    assert work.pause(share=0.03) == pytest.approx(10)
    clock.wall, clock.core = 100.0, 50.0
    assert work.pause(share=0.03) == 30


def test_only_the_time_of_the_thread_counts_as_work() -> None:
    work = run_cache.WorkTimer()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    assert work.pause(share=0.01) >= 10


def test_an_unreadable_lock_does_not_affect_other_runs(tmp_path: Path) -> None:
    run = make(tmp_path)
    listing = RunListing(tmp_path)
    cache = RunCache(listing)
    with lock.acquire(run.path):
        train(run)
        assert listing.scan().changed[0].state == "running"
        (run.path / lock.LOCK_FILE).rename(run.path / "old")
        (run.path / lock.LOCK_FILE).mkdir()
        assert listing.scan().changed[0].state == "unreadable"
        assert cache.version(run_id("run"))
        (run.path / lock.LOCK_FILE).rmdir()
        assert listing.scan().changed[0].state == "stopped"


def test_a_run_is_running_before_its_first_event(tmp_path: Path) -> None:
    """Reading, planning and measuring come between the lock and the first event: up to a minute on slow machines."""
    run = make(tmp_path)
    train(run, state="stopped")
    listing = RunListing(tmp_path)
    assert listing.scan().changed[0].state == "stopped"
    with lock.acquire(run.path):
        assert [line.state for line in listing.scan().changed] == ["running"]
    assert [line.state for line in listing.scan().changed] == ["stopped"]


def test_a_replaced_run_of_the_same_name_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reuses inode numbers of removed files."""
    monkeypatch.setattr(run_cache, "_MAX_PAUSE_SECONDS", 0.0)
    cache, listing = None, RunListing(tmp_path)
    for losses in ((1.0, 2.0, 3.0), (4.0,), (5.0, 6.0, 7.0, 8.0)):
        with EventLog(make(tmp_path)) as log:
            for step, loss in enumerate(losses, start=1):
                log.append("step", step=step, loss=loss)
        assert [line.loss for line in listing.scan().changed] == [losses[-1]]
        cache = cache or RunCache(listing)
        report = cache.render(run_id("run")).report
        assert (report.step, report.first_loss, report.loss) == (len(losses), losses[0], losses[-1])
        for path in sorted((tmp_path / "run").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "run").rmdir()


@pytest.mark.parametrize("place", ["config.json", "plan.json", "checkpoints"])
def test_a_file_filled_after_its_creation_changes_the_version(tmp_path: Path, place: str) -> None:
    """Regression: a copy creates a file and then fills it, and a page that read in between stayed outdated."""
    run = make(tmp_path)
    cache = RunCache(RunListing(tmp_path))
    path, folder = run.path / place, run.path.stat()
    if path.is_file():
        path.write_text("")
    before = cache.version(run_id("run"))
    if path.is_file():
        path.write_text("{}")
    else:
        (path / "step-000000001").mkdir()
    assert run.path.stat().st_mtime_ns == folder.st_mtime_ns
    assert cache.version(run_id("run")) != before


def test_runs_that_fail_slowly_do_not_delay_others_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("good", "bad-1", "bad-2"):
        train(make(tmp_path, name))
    for name in ("bad-1", "bad-2"):
        os.utime(tmp_path / name / "events.jsonl", (2e9, 2e9))  # They are the newest.
    tried = []

    def fail(folder: Path) -> Run:
        if folder.name == "good":
            return open_run(folder)
        tried.append(folder.name)
        time.sleep(0.3)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(status_reader, "open_run", fail)
    listing = RunListing(tmp_path)
    for _ in range(3):
        listing.scan(seconds=0.2)
    assert {line.path.name: line.state for line in listing.changes().changed} == {
        "good": "stopped",
        "bad-1": "unreadable",
        "bad-2": "unreadable",
    }
    assert (listing.scan(seconds=0.2), listing.is_complete) == (listing.scan(), True)
    assert sorted(tried) == ["bad-1", "bad-2"]
    with EventLog(tmp_path / "bad-1") as log:
        log.append("step", step=2, loss=0.25)
    listing.scan(seconds=0.2)
    assert len(tried) == 3


def test_a_disk_that_does_not_answer_removes_no_run_simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(make(tmp_path / "runs"))
    listing = RunListing(tmp_path / "runs")
    assert len(listing.scan().changed) == 1

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "scandir", fail)
        assert not listing.scan()
    assert not listing.scan()
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert listing.scan().removed == (run_id("run"),)
    assert listing.folder(run_id("run")) is None


class Slow(LiveHistory):
    """A run on a disk that responds only when released."""

    may_go_on = threading.Event()

    def __init__(self, run: Path) -> None:
        assert self.may_go_on.wait(PATIENCE)
        super().__init__(run)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(run_cache, "LiveHistory", Slow)
    yield Slow.may_go_on
    Slow.may_go_on.set()
    time.sleep(0.1)
    Slow.may_go_on.clear()


def test_the_list_does_not_wait_for_runs_simulated(routes: WatchRoutes, tmp_path: Path, slow: threading.Event) -> None:
    for name in ("a", "b", "c"):
        train(make(tmp_path, name))

    async def watch() -> None:
        await list_of(routes)
        views = [asyncio.ensure_future(routes._in_thread(lambda n=n: routes._cache.render(run_id(n)))) for n in "abc"]
        await asyncio.sleep(0.1)
        routes._scan_at = -NEVER
        begun = time.monotonic()
        assert len(await list_of(routes)) == 3
        assert time.monotonic() - begun < PATIENCE / 10
        slow.set()
        assert [seen.report.step for seen in await asyncio.gather(*views)] == [1, 1, 1]

    asyncio.run(watch())
