"""The list of runs behind the live page: what is read again, and how slow or damaged runs are handled."""

import os
import shutil
from pathlib import Path

import pytest

from whet.report.watch.listing import RunListing
from whet.run.events import EventLog
from whet.run.folder import Run, create_run, installed_versions


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
