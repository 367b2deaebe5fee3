"""Nothing incomplete is ever visible, and disk errors are three lines."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from whet.base.errors import WhetError
from whet.run import disk, durable
from whet.run.disk import Disk
from whet.run.events import AppendOnlyFile


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_write_file_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    durable.write_file(target, data=b"old")
    durable.write_file(target, data=b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["a.json"]


def test_write_file_syncs_the_file_before_the_rename_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(Disk):
        def full_sync(self, descriptor: int) -> None:
            order.append("sync folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "sync file")  # noqa: PTH112
            super().full_sync(descriptor)

        def rename(self, source: Path, target: Path) -> None:
            order.append("rename")
            super().rename(source, target)

    monkeypatch.setattr(durable, "disk", Watched())
    durable.write_file(tmp_path / "a", data=b"x")
    assert order == ["sync file", "rename", "sync folder"]


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_failure_at_any_point_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    target = tmp_path / "a.json"
    durable.write_file(target, data=b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(*((Path, "rename") if where == "rename" else (durable.os, where)), fail)
    with pytest.raises(WhetError) as caught:
        durable.write_file(target, data=b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.json"]
    assert str(target) in caught.value.what
    assert "ENOSPC" in str(caught.value.got)
    assert "free there" in str(caught.value.got)
    assert "free some space" in str(caught.value.try_)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(durable.os, "write", lambda fd, data: real(fd, bytes(data[:3])))
    durable.write_file(tmp_path / "a", data=b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_publish_shows_all_or_nothing(tmp_path: Path) -> None:
    def half(draft: Path) -> None:
        assert durable.is_leftover(draft)
        assert draft.parent == tmp_path
        (draft / "one").write_text("1")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        durable.publish_directory(tmp_path / "it", fill=half)
    assert names(tmp_path) == []
    durable.publish_directory(tmp_path / "it", fill=lambda draft: durable.write_draft(draft / "one", data=b"1"))
    assert (tmp_path / "it" / "one").read_bytes() == b"1"
    with pytest.raises(WhetError, match="cannot create"):
        durable.publish_directory(tmp_path / "it", fill=lambda draft: None)
    assert names(tmp_path) == ["it"]
    assert names(tmp_path / "it") == ["one"]


def inodes(*paths: Path) -> set[int]:
    return {path.stat().st_ino for path in paths}


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The inodes of all files and folders that are synced."""
    numbers: set[int] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        numbers.add(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    return numbers


def test_publish_syncs_every_file_and_folder(tmp_path: Path, synced: set[int]) -> None:
    def fill(draft: Path) -> None:
        (draft / "sub").mkdir()
        durable.write_draft(draft / "sub" / "deep", data=b"1")
        durable.write_draft(draft / "flat", data=b"2")

    durable.publish_directory(tmp_path / "it", fill=fill)
    assert inodes(tmp_path, tmp_path / "it", *(tmp_path / "it").rglob("*")) <= synced


def test_files_of_other_libraries_are_synced(tmp_path: Path, synced: set[int]) -> None:
    def fill(draft: Path) -> None:
        (draft / "sub").mkdir()
        (draft / "sub" / "deep").write_bytes(b"1")
        (draft / "flat").write_bytes(b"2")
        durable.sync_files(draft)

    durable.publish_directory(tmp_path / "it", fill=fill)
    assert inodes(*(tmp_path / "it").rglob("*")) <= synced


def test_a_move_is_durable_in_both_folders(tmp_path: Path, synced: set[int]) -> None:
    (tmp_path / "from" / "run").mkdir(parents=True)
    (tmp_path / "to").mkdir()
    durable.move(tmp_path / "from" / "run", tmp_path / "to" / "run")
    assert inodes(tmp_path / "from", tmp_path / "to") <= synced
    aside = durable.move_aside(tmp_path / "to" / "run")
    assert durable.is_leftover(aside)
    assert names(tmp_path / "to") == [aside.name]


def test_make_directory_returns_new_folders_and_removes_them_on_failure(tmp_path: Path) -> None:
    assert durable.make_directory(tmp_path / "a" / "b") == (tmp_path / "a", tmp_path / "a" / "b")
    assert durable.make_directory(tmp_path / "a" / "b") == ()
    with pytest.raises(WhetError, match="cannot create"):
        durable.make_directory(tmp_path / "c" / ("x" * 300))
    assert not (tmp_path / "c").exists()


def test_a_file_in_the_way_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for act in (durable.check_writable, durable.make_directory):
        with pytest.raises(WhetError) as caught:
            act(tmp_path / "file" / "run" / "deep")
        assert f"{tmp_path / 'file'} is not a folder" in str(caught.value.try_)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nothing can be made")
def test_an_unwritable_path_is_refused() -> None:
    with pytest.raises(WhetError, match="cannot create /proc/runs"):
        durable.make_directory(Path("/proc/runs"))


def test_long_names_and_link_loops(tmp_path: Path) -> None:
    durable.write_file(tmp_path / ("n" * 250), data=b"1")  # The draft's own name must not be longer.
    with pytest.raises(WhetError, match="cannot write") as caught:
        durable.write_file(tmp_path / ("n" * 300), data=b"1")
    assert caught.value.try_ == "a shorter name"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(WhetError, match="cannot write") as caught:
        durable.write_file(tmp_path / "loop" / "x", data=b"1")
    assert "symbolic link" in str(caught.value.try_)


def test_full_sync_falls_back_where_the_disk_lacks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    codes = iter([errno.ENOTSUP, errno.EINVAL, errno.ENOTTY, errno.EIO, 0])

    def fake_fcntl(descriptor: int, command: int) -> int:
        calls.append("full")
        if code := next(codes):
            raise OSError(code, "no")
        return 0

    monkeypatch.setattr(disk.sys, "platform", "darwin")
    monkeypatch.setattr(disk.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(disk.fcntl, "fcntl", fake_fcntl)
    monkeypatch.setattr(durable.os, "fsync", lambda descriptor: calls.append("plain"))
    for _ in range(3):
        Disk().full_sync(0)
    with pytest.raises(OSError, match="no"):
        Disk().full_sync(0)
    Disk().full_sync(0)
    assert calls == ["full", "plain"] * 3 + ["full", "full"]


def test_a_temporarily_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AppendOnlyFile(tmp_path / "log")
    log.add(b"first\n")
    log.flush()
    real, room = os.write, [4]

    def write(descriptor: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "full")
        count = real(descriptor, bytes(data[: room[0]]))
        room[0] -= count
        return count

    monkeypatch.setattr(durable.os, "write", write)
    log.add(b"second\n")
    with pytest.raises(WhetError, match="cannot write"):
        log.flush()
    assert (tmp_path / "log").read_bytes() == b"first\nseco"
    log.add(b"third\n")
    room[0] = 100
    log.close()
    log.close()
    assert (tmp_path / "log").read_bytes() == b"first\nsecond\nthird\n"
    assert log.size == len(b"first\nsecond\nthird\n")


def test_syncing_a_deleted_file_raises(tmp_path: Path) -> None:
    log = AppendOnlyFile(tmp_path / "log")
    (tmp_path / "log").unlink()
    log.add(b"x")
    with pytest.raises(WhetError, match="cannot sync"):
        log.sync()
    with pytest.raises(WhetError, match="cannot sync"):
        log.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_does_not_write_its_parents_queue(tmp_path: Path) -> None:
    log = AppendOnlyFile(tmp_path / "log")
    log.add(b"once\n")
    child = os.fork()
    if child == 0:
        log.flush()
        os._exit(0)
    os.waitpid(child, 0)
    log.close()
    assert (tmp_path / "log").read_bytes() == b"once\n"


def test_remove_takes_files_folders_and_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("1")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    shutil.copytree(tmp_path / "kept", tmp_path / "folder")
    (tmp_path / "file").write_text("1")
    for name in ("link", "folder", "file"):
        durable.remove(tmp_path / name)
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["file"]


LIMITED = """
import sys
from pathlib import Path
from whet.base.errors import WhetError
from whet.run.durable import write_file
try:
    write_file(Path(sys.argv[1]), data=b"n" * 100_000)
except WhetError as error:
    print(error)
"""


def test_a_file_size_limit_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_bytes(b"old")

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    command = [sys.executable, "-c", LIMITED, str(target)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=600, check=True)
    assert "EFBIG" in done.stdout
    assert "ulimit -f" in done.stdout
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.json"]


FULL = """
mount -t tmpfs -o size=64k tmpfs "$1" || exit 77
echo old > "$1/a.json"
"$2" -c "$3" "$1/a.json"
ls -A "$1"
cat "$1/a.json"
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs a private mount")
def test_a_full_disk_is_reported_and_keeps_the_old_file(tmp_path: Path) -> None:
    command = ["unshare", "-m", "sh", "-c", FULL, "sh", str(tmp_path), sys.executable, LIMITED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode and "ENOSPC" not in done.stdout:
        pytest.skip("may not mount here")
    assert "No space left on device (ENOSPC)" in done.stdout
    assert done.stdout.endswith("a.json\nold\n")
    assert ".tmp-" not in done.stdout
