"""--fresh moves the old run away and loses nothing if the new one does not begin."""

import itertools
from pathlib import Path

import pytest

from faulty_disk import FaultyDisk
from whet.base.errors import WhetError
from whet.cli.train import _set_aside
from whet.run import durable
from whet.run.folder import create_run, open_run


def old_run(path: Path) -> str:
    run = create_run(path, recipe="text", config={}, plan={}, machine={}, versions={}, command=["whet"])
    return run.header.id


def test_a_new_run_replaces_the_old_one(tmp_path: Path) -> None:
    old = old_run(tmp_path / "run")
    with _set_aside(tmp_path / "run"):
        new = old_run(tmp_path / "run")
    assert open_run(tmp_path / "run").header.id == new != old
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_old_run_keeps_its_name_if_it_cannot_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        old, disk = old_run(folder / "run"), FaultyDisk("EIO", at=number)
        monkeypatch.setattr(durable, "disk", disk)
        try:
            durable.move_aside(folder / "run")
        except WhetError:
            assert open_run(folder / "run").header.id == old
        else:
            break
    assert number > 3, "a rename, and opening and syncing the folder"


def test_the_old_run_is_whole_after_a_failure_at_any_disk_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        old, disk = old_run(folder / "run"), FaultyDisk("EIO", at=number)
        with monkeypatch.context() as patched:
            patched.setattr(durable, "disk", disk)
            with pytest.raises((WhetError, OSError, RuntimeError)), _set_aside(folder / "run"):
                raise RuntimeError("the new run does not begin")
        (kept,) = folder.iterdir()
        assert open_run(kept).header.id == old
        if disk.count < number:
            assert kept.name == "run"
            break
    assert number > 4, "a rename and its sync, twice"
