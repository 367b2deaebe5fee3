"""How do bytes get onto the disk so that they survive? The one module that writes, syncs, renames and removes.

Nothing half-written is ever visible under its final name: files and folders are made beside it under a name that
starts with `.tmp-`, synced, and renamed. What a crash leaves behind is therefore recognisable and may be deleted.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from whet.base.errors import WhetError
from whet.base.units import show_bytes

LEFTOVER_PREFIX = ".tmp-"
_LEFTOVER = re.compile(re.escape(LEFTOVER_PREFIX) + r".+-\d+-[0-9a-f]{8}", re.DOTALL)
_NOT_SUPPORTED = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)


def is_leftover(path: Path) -> bool:
    """Whether the name says that a write was cut short here (or is under way): only names that we gave."""
    return _LEFTOVER.fullmatch(path.name) is not None


def leftover_name(path: Path) -> Path:
    """A new unique name beside `path`; on the same filesystem, so that a rename is atomic."""
    # 40 characters of the name are at most 160 bytes: the whole stays under the usual limit of 255.
    return path.parent / f"{LEFTOVER_PREFIX}{path.name[:40]}-{os.getpid()}-{secrets.token_hex(4)}"


# --- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def told(doing: str, path: Path) -> Iterator[None]:
    """Turns an OSError inside into a WhetError that names the path, the system's reason and what to try."""
    try:
        yield
    except OSError as error:
        raise explain(error, doing=doing, path=path) from error


def explain(error: OSError, *, doing: str, path: Path) -> WhetError:
    """The three lines for a failed disk operation.

    >>> print(explain(OSError(errno.ENAMETOOLONG, "File name too long"), doing="write", path=Path("/x")).try_)
    a shorter name
    """
    code = errno.errorcode.get(error.errno or 0, "unknown")
    reason = f"{os.strerror(error.errno) if error.errno else error} ({code})"
    free = free_bytes(path)
    space = "" if free is None else f"; {show_bytes(free)} free there"
    return WhetError(f"cannot {doing} {path}", got=reason + space, try_=_advice(error.errno, path=path))


def _advice(code: int | None, *, path: Path) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT):
        return "free some space on this disk (`whet runs --prune`), or name a folder on another one"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "another folder, one you may write in"
    if code == errno.EFBIG:
        return "raise this shell's limit on file sizes (`ulimit -f unlimited`)"
    if code in (errno.ENOTDIR, errno.EEXIST):
        in_the_way = next((p for p in (path, *path.parents) if p.exists() and not p.is_dir()), None)
        return f"another name: {in_the_way} is in the way" if in_the_way else "another name"
    if code == errno.ENOTEMPTY:
        return "another name: a folder that is not empty is in the way"
    if code == errno.ENAMETOOLONG:
        return "a shorter name"
    if code == errno.ELOOP:
        return "a path without a symbolic link that points to itself"
    if code in (errno.EMFILE, errno.ENFILE):
        return "fewer open files, or a higher limit (`ulimit -n 4096`)"
    if code == errno.ENOENT:
        return "check that the folder still exists and that files can be made in it"
    if code in (errno.ENOLCK, *_NOT_SUPPORTED):
        return "a folder on a local disk: this filesystem lacks what is needed"
    return "check the disk and its connection, then run the same command again"


def free_bytes(path: Path) -> int | None:
    """The free space of the filesystem that `path` is (or would be) on; None where it cannot be told."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return None


# --- syncing ---------------------------------------------------------------------------------------------------------


def full_sync(descriptor: int) -> None:
    """Puts the file, or folder, behind `descriptor` onto the medium itself."""
    if sys.platform == "darwin":
        # fsync(2) on macOS leaves the drive's own cache unwritten; SMB, exFAT and some FUSE disks lack F_FULLFSYNC.
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
    os.fsync(descriptor)


def _sync_path(path: Path, *, sync: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    except OSError as error:
        # Some network filesystems cannot sync a folder; they order the names themselves. A file must be synced.
        if error.errno not in _NOT_SUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


# --- writing ---------------------------------------------------------------------------------------------------------


def write_file(path: Path, *, data: bytes) -> None:
    """Writes or replaces a small file: after a crash it holds either the old bytes or the new ones."""
    draft = leftover_name(path)
    with told("write", path):
        try:
            _write_new(draft, data=data, sync=full_sync)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        _sync_path(path.parent, sync=full_sync)


def write_draft(path: Path, *, data: bytes) -> None:
    """Writes a new file inside a draft that `publish_directory` will sync as a whole."""
    with told("write", path):
        _write_new(path, data=data, sync=lambda _: None)


def _write_new(path: Path, *, data: bytes, sync: Callable[[int], None]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        sync(descriptor)
    finally:
        os.close(descriptor)


def publish_directory(path: Path, *, fill: Callable[[Path], None]) -> None:
    """Makes a folder appear complete, or not at all; `fill` writes its contents into the draft it is given.

    A folder that is there already is refused, unless it is empty.
    """
    draft = leftover_name(path)
    with told("create", path):
        try:
            draft.mkdir(mode=0o777)
            fill(draft)
            # One full sync flushes the whole drive on macOS, so the payload needs only the ordinary kind.
            for folder, _, names in os.walk(draft, topdown=False):
                for name in names:
                    _sync_path(Path(folder, name), sync=os.fsync)
                _sync_path(Path(folder), sync=os.fsync)
            _sync_path(draft, sync=full_sync)
            draft.rename(path)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _sync_path(path.parent, sync=full_sync)


def make_directory(path: Path) -> tuple[Path, ...]:
    """Makes a folder and its parents where they are missing; the new ones, outermost first."""
    made: list[Path] = []
    with told("create", path):
        missing = [place for place in (path, *path.parents) if not place.exists()]
        if not missing and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        try:
            for place in reversed(missing):
                place.mkdir(exist_ok=True)
                made.append(place)
                _sync_path(place.parent, sync=full_sync)
        except BaseException:
            remove_empty(made)
            raise
    return tuple(made)


def check_writable(path: Path) -> None:
    """Refuses a path that could not be made, before anything is written: its nearest existing parent decides."""
    with told("create", path):
        place = next(place for place in path.parents if place.exists())
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable")
        # Permissions do not tell all (root, /proc, a full disk): what counts is whether a folder can be made.
        trial = leftover_name(place / "trial")
        trial.mkdir()
        trial.rmdir()


# --- removing --------------------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Removes a file or a whole folder: gone under its name at once, and for good when this returns."""
    with told("remove", path):
        doomed = path
        if not is_leftover(path):
            doomed = leftover_name(path)
            path.rename(doomed)
            _sync_path(path.parent, sync=full_sync)
        if doomed.is_dir() and not doomed.is_symlink():
            shutil.rmtree(doomed)
        else:
            doomed.unlink()


def remove_empty(folders: list[Path] | tuple[Path, ...]) -> None:
    """Takes back folders made a moment ago, as far as they are still empty."""
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            folder.rmdir()


# --- growing ---------------------------------------------------------------------------------------------------------


class Appender:
    """A file that only grows. Bytes wait in memory until `flush`; what the disk refused stays and goes first next time,
    so a full disk loses nothing that space will not bring back."""

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Opens or makes `path`; `keep_bytes` cuts off what lies behind (a torn end)."""
        self._path = path
        self._waiting: list[bytes] = []
        with told("open", path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._owner = os.getpid()
            if keep_bytes is not None:
                os.ftruncate(self._descriptor, keep_bytes)
            self.size = os.fstat(self._descriptor).st_size
            """Where the next byte goes, counting those that wait."""

    def add(self, data: bytes) -> None:
        """Puts bytes in line; touches no disk."""
        self._waiting.append(data)
        self.size += len(data)

    def flush(self) -> None:
        """Hands all that waits to the system: it then survives this process, not yet a power cut."""
        if not self._waiting or os.getpid() != self._owner:
            return  # A forked child holds a copy of what waits; writing it would repeat it.
        data = memoryview(b"".join(self._waiting))
        with told("write", self._path):
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            finally:
                self._waiting = [bytes(data)] if data else []

    def sync(self) -> None:
        """Makes everything so far survive a power cut."""
        self.flush()
        with told("sync", self._path):
            if os.fstat(self._descriptor).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "deleted while open")
            full_sync(self._descriptor)

    def close(self) -> None:
        """Syncs and closes; closing twice is fine."""
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1
