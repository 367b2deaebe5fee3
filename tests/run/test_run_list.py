"""Listing and pruning the runs of a folder."""

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from whet.cli import main
from whet.report import run_status
from whet.report.run_status import list_runs
from whet.report.watch.listing import RunListing
from whet.run import lock
from whet.run.events import EventLog
from whet.run.folder import Run, create_run, run_folders, run_groups


@pytest.fixture(autouse=True, scope="module")
def _waits_for_no_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def make(root: Path, name: str, **config: object) -> Run:
    return create_run(
        root / name, recipe="text", config=config, plan={}, machine={}, versions={}, command=["whet", "train", "text"]
    )


def make_old(path: Path, *, seconds: float = 3600.0) -> None:
    then = time.time() - seconds
    for place in [*path.rglob("*"), path]:
        os.utime(place, (then, then), follow_symlinks=False)


def train(run: Run, *, steps: int, **end: object) -> None:
    with EventLog(run) as log:
        log.append("start", step=0, total_steps=10, goal="accuracy")
        for step in range(1, steps + 1):
            log.append("step", step=step, loss=1 / step)
        log.append("eval", step=steps, accuracy=0.5, loss=9.0)
        if end:
            log.append("end", step=steps, **end)


def test_every_state(tmp_path: Path) -> None:
    train(make(tmp_path, "a-done"), steps=10, state="done")
    train(make(tmp_path, "b-stopped"), steps=4, state="stopped")
    train(make(tmp_path, "c-failed"), steps=4, state="failed")
    train(make(tmp_path, "d-killed"), steps=4)
    make(tmp_path, "e-new", max_steps=77)
    running = make(tmp_path, "f-running")
    train(running, steps=10, state="done")
    (make(tmp_path, "g-broken").path / "config.json").write_text("{")
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a-done")
    (tmp_path / "file").write_text("")
    with lock.acquire(running.path):
        result = {summary.path.name: summary for summary in list_runs(tmp_path)}
    assert {name: summary.state for name, summary in result.items()} == {
        "a-done": "done",
        "b-stopped": "stopped",
        "c-failed": "failed",
        "d-killed": "stopped",
        "e-new": "never started",
        "f-running": "running",
        "g-broken": "unreadable",
    }
    done = result["a-done"]
    assert (done.step, done.total_steps, done.loss) == (10, 10, 0.1)
    assert (done.goal, done.goal_value, done.recipe) == ("accuracy", 0.5, "text")
    assert 0 <= time.time() - done.updated < 60
    assert (done.size_bytes or 0) > 0
    assert result["e-new"].total_steps == 77
    assert "config.json" in str(result["g-broken"].problem)
    assert list_runs(tmp_path / "nowhere") == ()


def test_a_resumed_run_is_no_longer_done(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    train(run, steps=10, state="done")
    with EventLog(run) as log:
        log.append("resume", step=5)
        log.append("step", step=6, loss=math.nan)
    (summary,) = list_runs(tmp_path)
    assert (summary.state, summary.step) == ("stopped", 6)
    assert summary.loss is not None
    assert math.isnan(summary.loss)
    text = json.dumps(summary.as_json(), allow_nan=False)
    back = type(summary).from_json(json.loads(text), where="here")
    assert back.loss is not None
    assert math.isnan(back.loss)


def test_hundreds_of_runs_are_listed_quickly(memory_folder: Path) -> None:
    first = make(memory_folder, "r-000")
    train(first, steps=600, state="done")
    for number in range(1, 200):
        shutil.copytree(first.path, memory_folder / f"r-{number:03d}")
    # CPU time does not include other processes.
    began = time.process_time()
    assert len(list_runs(memory_folder)) == 200
    assert time.process_time() - began < 3


def test_folders_that_contain_runs_are_listed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "several/seed-0", "several/seed-1"):
        make(tmp_path, name)
    (tmp_path / "empty").mkdir()
    assert main.run(["runs", str(tmp_path)]) == 0
    listed, noted = capfd.readouterr()
    several = tmp_path / "several"
    assert len(listed.splitlines()) == 2
    assert noted == f"{several} contains 2 more: whet runs {several}\n"


def test_runs_that_are_removed_meanwhile_or_came_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bare", "gone", "kept"):
        train(make(tmp_path, name), steps=2)
    shutil.rmtree(tmp_path / "bare" / "checkpoints")
    make_old(tmp_path)

    def remove(folder: Path) -> list[Path]:
        result = run_folders(folder)
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
        return result

    monkeypatch.setattr(run_status, "run_folders", remove)
    assert [(run.path.name, run.state) for run in list_runs(tmp_path)] == [("bare", "stopped"), ("kept", "stopped")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_without_permission_hides_no_other() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        root.chmod(0o755)
        train(make(root, "open"), steps=2)
        train(make(root / "search", "closed"), steps=2)
        train(make(root, "closed"), steps=2)
        (root / "closed").chmod(0)
        (root / "search" / "closed").chmod(0)
        os.seteuid(65534)
        try:
            assert [run.path.name for run in list_runs(root)] == ["open"]
            assert [status.path.name for status in RunListing(root).scan().changed] == ["open"]
            assert run_groups(root) == {}
        finally:
            os.seteuid(0)
