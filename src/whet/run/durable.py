"""Durable writes: the only module that writes, syncs, renames and removes files.

Incomplete data is never visible under its final name: files and folders are written under a neighboring name that
starts with `.tmp-`, synced, and then renamed. Leftovers of a crash can therefore be recognized and deleted.

Every call that changes the disk goes through `disk`, which tests replace.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import WhetError
from whet.base.units import format_bytes
from whet.run.disk import NOT_SUPPORTED, Disk

LEFTOVER_PREFIX = ".tmp-"
_LEFTOVER = re.compile(re.escape(LEFTOVER_PREFIX) + r".+-\d+-[0-9a-f]{8}", re.DOTALL)
# Smaller chunks are buffered and written together.
_MIN_WRITE_BYTES = 1024**2

# All system calls go through this object. Tests replace it.
disk = Disk()


def is_leftover(path: Path) -> bool:
    """Return whether a name is one that this module gives to an unfinished write."""
    return _LEFTOVER.fullmatch(path.name) is not None


def leftover_name(path: Path) -> Path:
    """Return a unique path in the same folder as `path`, so that renaming is atomic."""
    # 40 characters are at most 160 bytes in UTF-8, so the result stays below the usual limit of 255 bytes.
    return path.parent / f"{LEFTOVER_PREFIX}{path.name[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


# --- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def disk_errors(doing: str, path: Path) -> Iterator[None]:
    """Convert an OSError in the `with` block to a WhetError with the path, the reason and a suggestion."""
    try:
        yield
    except OSError as error:
        raise explain_os_error(error, doing=doing, path=path) from error


def explain_os_error(error: OSError, *, doing: str, path: Path) -> WhetError:
    """Return the error for a failed disk operation, with a suggestion.

    >>> print(explain_os_error(OSError(errno.ENAMETOOLONG, "File name too long"), doing="write", path=Path("/x")).try_)
    a shorter name
    """
    code = errno.errorcode.get(error.errno or 0, "unknown")
    reason = f"{os.strerror(error.errno) if error.errno else error} ({code})"
    free = free_bytes(path)
    space = "" if free is None else f"; {format_bytes(free)} free there"
    return WhetError(f"cannot {doing} {path}", got=reason + space, try_=_advice(error.errno, path=path))


def _advice(code: int | None, *, path: Path) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on this disk, or name a folder on another one"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "another folder that you may write to"
    if code == errno.EFBIG:
        return "raise this shell's limit on file sizes (`ulimit -f unlimited`)"
    if code in (errno.ENOTDIR, errno.EEXIST):
        blocker = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
        return f"another name: {blocker} is not a folder" if blocker else "another name"
    if code == errno.ENOTEMPTY:
        return "another name: the folder is not empty"
    if code == errno.ENAMETOOLONG:
        return "a shorter name"
    if code == errno.ELOOP:
        return "a path without this symbolic link"
    if code in (errno.EMFILE, errno.ENFILE):
        return "fewer open files, or a higher limit (`ulimit -n 4096`)"
    if code == errno.ENOENT:
        return "check that the folder still exists and that files can be created in it"
    if code in (errno.ENOLCK, *NOT_SUPPORTED):
        return "a folder on a local disk: this filesystem does not support the operation"
    return "check the disk and its connection, then run the same command again"


def free_bytes(path: Path) -> int | None:
    """Return the free bytes on the filesystem of `path`, which need not exist; None if unknown."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


# --- writing ---------------------------------------------------------------------------------------------------------


class WrittenFile(NamedTuple):
    size: int
    sha256: str


def write_file(path: Path, *, data: bytes | Iterable[bytes]) -> None:
    """Write or replace a file atomically: after a crash, it contains either the old or the new bytes."""
    draft = leftover_name(path)
    chunks = (data,) if isinstance(data, bytes) else data
    with disk_errors("write", path):
        try:
            _write_new(draft, chunks=chunks, sync=disk.full_sync)
            disk.rename(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                disk.unlink(draft)
            raise
        _sync_folder(path.parent, sync=disk.full_sync)


def write_draft(path: Path, *, data: bytes | Iterable[bytes | memoryview], is_last: bool = False) -> WrittenFile:
    """Write and sync a new file in a draft of `publish_directory`. Pass `is_last` for the last file."""
    chunks = (data,) if isinstance(data, bytes) else data
    with disk_errors("write", path):
        # On macOS, a full sync flushes the whole drive, so earlier files need only an fsync.
        return _write_new(path, chunks=chunks, sync=disk.full_sync if is_last else disk.sync)


class StreamedFile:
    """A new file in a draft of `publish_directory`, written in chunks. Several can be open at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._collected = bytearray()
        self._digest, self._size = hashlib.sha256(), 0
        with disk_errors("write", path):
            self._descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def append(self, data: bytes | memoryview) -> None:
        """Append a chunk. Small chunks are buffered."""
        self._collected += data
        if len(self._collected) >= _MIN_WRITE_BYTES:
            self._write()

    def close(self) -> WrittenFile:
        """Sync and close the file. Return its size and hash."""
        try:
            self._write()
            with disk_errors("write", self._path):
                disk.sync(self._descriptor)
        finally:
            self.abandon()
        return WrittenFile(self._size, self._digest.hexdigest())

    def abandon(self) -> None:
        """Close the file without syncing, before its draft is removed."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                disk.close(self._descriptor)
        self._descriptor = -1

    def _write(self) -> None:
        self._digest.update(self._collected)
        self._size += len(self._collected)
        rest = memoryview(bytes(self._collected))
        self._collected.clear()
        with disk_errors("write", self._path):
            while rest:
                rest = rest[disk.write(self._descriptor, rest) :]


def _write_new(path: Path, *, chunks: Iterable[bytes | memoryview], sync: Callable[[int], None]) -> WrittenFile:
    """Write and sync a new file.

    The sync uses the descriptor of the writes, because the system reports write errors only to that descriptor."""
    digest, size = hashlib.sha256(), 0
    descriptor = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        for chunk in _in_large_chunks(chunks):
            digest.update(chunk)
            size += len(chunk)
            rest = chunk
            while rest:
                rest = rest[disk.write(descriptor, rest) :]
        sync(descriptor)
    finally:
        disk.close(descriptor)
    return WrittenFile(size, digest.hexdigest())


def _in_large_chunks(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    collected = bytearray()
    for chunk in chunks:
        if len(chunk) < _MIN_WRITE_BYTES:
            collected += chunk
        if collected and (len(chunk) >= _MIN_WRITE_BYTES or len(collected) >= _MIN_WRITE_BYTES):
            yield memoryview(collected)
            collected = bytearray()
        if len(chunk) >= _MIN_WRITE_BYTES:
            yield memoryview(chunk)
    if collected:
        yield memoryview(collected)


def _sync_folder(path: Path, *, sync: Callable[[int], None]) -> None:
    descriptor = disk.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        # Some network filesystems cannot sync a folder, but they keep the order of renames.
        if error.errno not in NOT_SUPPORTED:
            raise
    finally:
        disk.close(descriptor)


def publish_directory(path: Path, *, fill: Callable[[Path], None]) -> None:
    """Create a folder atomically. `fill` writes files into the draft with `write_draft`, or syncs them afterward.

    An existing folder must be empty. After a failed sync, the draft is removed: a retry must write new files, because a
    second fsync of the same files may report success without writing them.
    """
    draft = leftover_name(path)
    with disk_errors("create", path):
        try:
            disk.make_folder(draft)
            fill(draft)
            # Sync folders after their files, so that every name in a synced folder refers to synced data.
            for folder, _, _ in os.walk(draft, topdown=False):
                _sync_folder(Path(folder), sync=disk.sync)
            disk.rename(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove_tree(draft)
            raise
        # The rename is durable only after the parent folder is synced.
        _sync_folder(path.parent, sync=disk.full_sync)


def sync_files(folder: Path) -> None:
    """Sync the files that other libraries have written into a draft of `publish_directory`."""
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            with disk_errors("write", path):
                descriptor = disk.open(path, os.O_RDONLY)
                try:
                    disk.full_sync(descriptor)
                finally:
                    disk.close(descriptor)


def publish_files(files: Sequence[tuple[Path, Iterable[bytes]]]) -> None:
    """Write several new files. All are complete before the first one is renamed. Existing files are not replaced."""
    drafts: list[tuple[Path, Path]] = []
    for path, _ in files:
        with disk_errors("write", path):
            if path.exists() or path.is_symlink():
                raise FileExistsError(errno.EEXIST, "already exists")
    try:
        for path, chunks in files:
            drafts.append((leftover_name(path), path))
            write_draft(drafts[-1][0], data=chunks, is_last=len(drafts) == len(files))
        while drafts:
            draft, path = drafts[-1]
            with disk_errors("write", path):
                disk.rename(draft, path)
                _sync_folder(path.parent, sync=disk.full_sync)
            drafts.pop()
    except BaseException:
        for draft, _ in drafts:
            with contextlib.suppress(OSError):
                disk.unlink(draft)
        raise


def make_directory(path: Path) -> tuple[Path, ...]:
    """Create a folder and its missing parents. Return the new folders, outermost first."""
    created: list[Path] = []
    with disk_errors("create", path):
        missing = [place for place in (path, *path.parents) if not place.exists()]
        if not missing and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        try:
            for place in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    disk.make_folder(place)
                created.append(place)
                _sync_folder(place.parent, sync=disk.full_sync)
        except BaseException:
            remove_empty(created)
            raise
    return tuple(created)


def check_writable(path: Path) -> None:
    """Check that a path can be created, by creating a temporary folder in its nearest existing parent."""
    with disk_errors("create", path):
        place = next(place for place in path.parents if place.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable")
        # Permission bits are not enough (root, /proc, a full disk), so try to create a folder.
        trial = leftover_name(place / "trial")
        disk.make_folder(trial)
        disk.remove_folder(trial)


# --- removing --------------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a file or a whole folder. Its name disappears immediately, before the data is deleted."""
    with disk_errors("remove", path):
        leftover = path
        # Rename first, so that a crash leaves a recognizable leftover rather than a folder with missing files.
        if not is_leftover(path):
            leftover = leftover_name(path)
            disk.rename(path, leftover)
            _sync_folder(path.parent, sync=disk.sync)
        if leftover.is_dir() and not leftover.is_symlink():
            _remove_tree(leftover)
        else:
            disk.unlink(leftover)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder durably, on the same disk. An existing target must be a file or an empty folder."""
    with disk_errors("move", source):
        disk.rename(source, target)
        # Sync the new name first: after a power cut, two names are better than none.
        for folder in dict.fromkeys((target.parent, source.parent)):
            _sync_folder(folder, sync=disk.full_sync)


def move_aside(path: Path) -> Path:
    """Move a file or folder durably to a leftover name, for `remove` to delete later. Return the new path.

    If the move cannot be made durable, it is undone: the caller does not know the new path.
    """
    aside = leftover_name(path)
    try:
        move(path, aside)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.rename(aside, path)
        raise
    return aside


def remove_leftovers(folder: Path) -> int:
    """Remove the leftover files and folders of interrupted writes, and return their number.

    The caller must hold the run's lock.
    """
    leftovers = [path for path in sorted(folder.iterdir()) if is_leftover(path)] if folder.is_dir() else []
    for path in leftovers:
        remove(path)
    return len(leftovers)


def _remove_tree(path: Path) -> None:
    for folder, folders, files in os.walk(path, topdown=False):
        for name in (*files, *(name for name in folders if Path(folder, name).is_symlink())):
            disk.unlink(Path(folder, name))
        disk.remove_folder(Path(folder))


def remove_empty(folders: list[Path] | tuple[Path, ...]) -> None:
    """Remove the given newly created folders if they are still empty."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            disk.remove_folder(folder)
