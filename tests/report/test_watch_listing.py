"""The list of runs behind the live page: what is read again, and how slow or damaged runs are handled."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from web_client import PATIENCE_SECONDS, until
from whet.report.watch import run_cache, status_reader
from whet.report.watch.listing import RunListing
from whet.report.watch.run_cache import RunCache
from whet.report.watch.status_reader import run_id
from whet.run.events import EventLog
from whet.run.folder import Run, create_run, installed_versions
from whet.run.follow import LiveHistory
from whet.web.access import HttpError


def make(root: Path, name: str, **parts: dict) -> Run:
    logged = {"config": {}, "plan": {}, "machine": {}, "versions": installed_versions()} | parts
    return create_run(root / name, recipe="text", command=["whet", "train", "text"], **logged)


def train(run: Run | Path, *, steps: int, **end: object) -> None:
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=100, goal="accuracy")
        for step in range(1, steps + 1):
            log.append(
                "step", step=step, loss=1 / step, samples=32 * step, lr=0.1, seconds={"data": 0.1, "forward": 0.2}
            )
        log.append("eval", step=steps, accuracy=0.5)
        if end:
            log.append("end", step=steps, **end)


def test_a_run_that_is_being_copied_is_listed_when_complete(tmp_path: Path) -> None:
    train(make(tmp_path / "elsewhere", "copied"), steps=3, state="done")
    there, here = tmp_path / "elsewhere" / "copied", tmp_path / "runs" / "copied"
    shutil.copytree(there, here, ignore=shutil.ignore_patterns("config.json"))
    listing = RunListing(tmp_path / "runs")
    (line,) = listing.scan().changed
    assert (line.state, line.problem) == ("unreadable", "the run file copied/config.json is missing: no config.json")
    assert not listing.scan()
    shutil.copy2(there / "config.json", here)
    (line,) = listing.scan().changed
    assert (line.state, line.step) == ("done", 3)
    assert not listing.scan()


def test_a_list_reads_only_changed_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        for number in range(30):
            train(make(tmp_path, f"run-{number}"), steps=2, state="done")
    listing = RunListing(tmp_path)
    assert len(listing.scan(seconds=60).changed) == 30
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(str(path)), real_open(path, *rest))[1])
    assert not listing.scan()
    assert opened == []
    with (tmp_path / "run-7" / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","time":2e9,"step":3,"loss":0.5}\n')
    opened.clear()
    (line,) = listing.scan().changed
    assert (line.path.name, line.step, line.loss, line.updated) == ("run-7", 3, 0.5, 2e9)
    assert {Path(path).parent.name for path in opened if str(tmp_path) in path} == {"run-7"}


def test_a_long_log_without_an_index_is_listed_by_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "long")
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=200_000, goal="accuracy")
    with (run.path / "events.jsonl").open("ab") as file:
        for step in range(1, 200_001):
            file.write(b'{"kind":"step","time":%d,"step":%d,"loss":0.25,"note":"%060d"}\n' % (10**9 + step, step, step))
        file.write(b'{"kind":"eval","time":2e9,"step":200000,"accuracy":0.75}\n')
    (run.path / "events.index").unlink()
    read: list[int] = []
    real = status_reader.History
    monkeypatch.setattr(
        status_reader, "History", lambda run, progress: (read.append(1), real(run, progress=progress))[1]
    )
    listing = RunListing(tmp_path)
    (result,) = listing.scan(seconds=60).changed
    assert (result.step, result.total_steps, result.loss, result.goal_value) == (200_000, 200_000, 0.25, 0.75)
    assert (result.state, result.updated) == ("stopped", 2e9)
    monkeypatch.setattr(status_reader, "_MAX_SCAN_BYTES", 10**9)
    (again,) = RunListing(tmp_path).scan(seconds=60).changed
    assert len(again.sparkline) == 32
    assert again.model_copy(update={"sparkline": ()}) == result
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"end","time":2e9,"step":200000,"state":"done"}\n')
    assert listing.scan(seconds=60).changed[0].state == "done"
    assert len(read) == 2


def test_a_run_that_is_slow_to_open_reports_its_progress_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(make(tmp_path, "large"), steps=2)
    may_go_on = threading.Event()

    class Slow(LiveHistory):
        def __init__(self, run: Path, *, progress: Callable[[int, int], None]) -> None:
            progress(37, 100)
            assert may_go_on.wait(PATIENCE_SECONDS)
            super().__init__(run)

    monkeypatch.setattr(run_cache, "LiveHistory", Slow)
    monkeypatch.setattr(run_cache, "WAIT_SECONDS", 0.2)
    cache, ident = RunCache(RunListing(tmp_path)), run_id("large")
    with pytest.raises(HttpError, match="37 %") as refused:
        cache.render(ident)
    assert refused.value.status == 202
    may_go_on.set()

    def is_open() -> bool:
        with contextlib.suppress(HttpError):
            return cache.render(ident).report.step == 2
        return False

    assert until(is_open)


def test_folders_with_runs_are_announced_once(tmp_path: Path) -> None:
    train(make(tmp_path / "search", "trial-0"), steps=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "search")
    listing = RunListing(tmp_path)
    changes = listing.scan(seconds=60)
    assert (changes.changed, changes.groups) == ((), {"search": 1})
    assert not listing.scan(), "as before"
    train(make(tmp_path / "search", "trial-1"), steps=2)
    assert listing.scan().groups == listing.groups == {"search": 2}
    shutil.rmtree(tmp_path / "search")
    assert listing.scan().groups == {}
    assert RunListing(make(tmp_path, "one").path).scan(seconds=60).groups is None


def test_one_run_can_be_watched_alone(tmp_path: Path) -> None:
    train(make(tmp_path, "one"), steps=2)
    train(make(tmp_path, "two"), steps=2)
    assert [line.path.name for line in RunListing(tmp_path / "one").scan(seconds=60).changed] == ["one"]


def test_the_sparkline_of_a_run_grows_with_it(tmp_path: Path) -> None:
    run = make(tmp_path, "growing")
    listing = RunListing(tmp_path)
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=100, optimizers=["d", "g"])
        for step in range(1, 51):
            log.append("step", step=step, loss=9.0, loss_d=1 / step, loss_g=2.0)
            if step == 10:
                log.flush()
                (first,) = listing.scan(seconds=60).changed
    (second,) = listing.scan(seconds=60).changed
    assert (first.step, len(first.sparkline), first.sparkline[0]) == (10, 10, 1.0)
    assert len(second.sparkline) > 20
    assert second.sparkline[0] > second.sparkline[-1], "the loss of the first optimizer, not their sum"
    assert second.losses == {"loss_d": 0.02, "loss_g": 2.0}
