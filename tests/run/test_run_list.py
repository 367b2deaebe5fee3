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

from whet.base.errors import WhetError
from whet.cli import main
from whet.report import run_status
from whet.report.run_status import list_runs
from whet.report.watch.listing import RunListing
from whet.run import durable, lock
from whet.run import prune as prune_module
from whet.run.events import EventLog
from whet.run.folder import Run, create_run, run_folders, run_groups
from whet.run.prune import prune


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


def test_hundreds_of_runs_are_listed_quickly(tmp_path: Path) -> None:
    first = make(tmp_path, "r-000")
    train(first, steps=600, state="done")
    for number in range(1, 200):
        shutil.copytree(first.path, tmp_path / f"r-{number:03d}")
    # CPU time does not include other processes.
    began = time.process_time()
    assert len(list_runs(tmp_path)) == 200
    assert time.process_time() - began < 3


def test_only_runs_without_training_are_pruned(tmp_path: Path) -> None:
    for name in ("empty", "young", "locked", "stepped", "saved", "noted", "broken", "begun"):
        make(tmp_path, name)
    train(Run.model_validate(make(tmp_path, "stepped-too")), steps=1)
    with EventLog(tmp_path / "stepped") as log:
        log.append("step", step=1, loss=1.0)
    with EventLog(tmp_path / "begun") as log:
        log.append("start", step=0)
    (tmp_path / "saved" / "checkpoints" / "step-000000003").mkdir()
    (tmp_path / "begun" / "checkpoints" / "step-000000000").mkdir()
    (tmp_path / "noted" / "notes.txt").write_text("mine")
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "stepped" / "checkpoints" / ".tmp-step-000000002-1-aaaaaaaa").mkdir()
    (tmp_path / ".tmp-half-1-bbbbbbbb").mkdir()
    (tmp_path / ".tmp-thesis").mkdir()
    make_old(tmp_path / ".tmp-thesis")
    (tmp_path / ".tmp-half-1-bbbbbbbb" / "big").write_bytes(b"x" * 9000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "empty")
    for child in tmp_path.iterdir():
        if child.name not in ("young", "elsewhere"):
            make_old(child)
    (tmp_path / ".tmp-young-1-cc").mkdir()
    before = sorted(tmp_path.rglob("*"))
    expected = {".tmp-half-1-bbbbbbbb", ".tmp-step-000000002-1-aaaaaaaa", "empty", "begun"}
    with lock.acquire(tmp_path / "locked"):
        make_old(tmp_path / "locked")
        preview = prune(tmp_path, dry=True)
        assert {*tmp_path.rglob("*")} == {*before, tmp_path / "locked" / "lock"}
        assert {p.path.name for p in preview} == expected
        removed = prune(tmp_path)
    assert removed == preview
    assert all(p.reason for p in removed)
    assert next(p.size_bytes for p in removed if p.path.name == ".tmp-half-1-bbbbbbbb") >= 9000
    gone = set(before) - set(tmp_path.rglob("*"))
    assert {p.name for p in gone if p.name in expected} == expected
    kept = {p.name for p in tmp_path.iterdir()}
    assert kept == {
        *("young", "locked", "stepped", "stepped-too", "saved", "noted", "broken", "folder", "elsewhere"),
        ".tmp-thesis",
        ".tmp-young-1-cc",
    }
    assert prune(tmp_path) == ()


def test_a_run_that_starts_during_pruning_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "r")
    make_old(run.path)
    real = lock.acquire

    def acquire(folder: Path) -> lock.RunLock:
        with EventLog(folder) as log:
            log.append("step", step=1, loss=1.0)
        return real(folder)

    monkeypatch.setattr(lock, "acquire", acquire)
    assert prune(tmp_path) == ()
    assert run.path.exists()


def test_folders_that_contain_runs_are_listed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "several/seed-0", "several/seed-1"):
        make(tmp_path, name)
    (tmp_path / "empty").mkdir()
    assert main.run(["runs", str(tmp_path)]) == 0
    listed, noted = capfd.readouterr()
    several = tmp_path / "several"
    assert len(listed.splitlines()) == 2
    assert noted == f"{several} contains 2 more: whet runs {several}\n"


def test_a_change_in_the_future_counts_as_young(tmp_path: Path) -> None:
    make_old(make(tmp_path, "r").path, seconds=-3600.0)
    assert prune(tmp_path) == ()


def test_a_failed_removal_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_old(make(tmp_path, "r").path)

    def fail(path: Path) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(durable.disk, "unlink", fail)
    with pytest.raises(WhetError, match="cannot remove"):
        prune(tmp_path)


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

    for module in (run_status, prune_module):
        monkeypatch.setattr(module, "run_folders", remove)
    assert prune(tmp_path, dry=True) == ()
    train(make(tmp_path, "gone"), steps=2)
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
