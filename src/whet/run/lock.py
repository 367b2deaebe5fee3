"""The lock of a run folder, which allows only one process to write at a time.

The lock is `fcntl.lockf` on the file `lock`. `flock` is not used, because forked data workers would keep the lock after
their parent has died. A lockf lock has a pitfall: it is released when the holding process closes *any* descriptor of
the file. The holding process therefore never opens the file a second time; `_held` lists its locks. Other processes may
open the file.
"""

import contextlib
import errno
import fcntl
import os
import platform
import stat as stat_module
import threading
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.run import strict_json
from whet.run.durable import disk_errors

LOCK_FILE = "lock"
# What to type instead of a folder that cannot be used. The code that checks it does not know who named it.
OTHER_FOLDER = "another --run DIR (run=DIR in Python)"

# The error codes for a lock that another process holds. POSIX allows either.
_BUSY = (errno.EACCES, errno.EAGAIN)
# `acquire` retries for this long, because `holder` in another process takes the lock for a few microseconds, or longer
# on a busy machine. If the owner of the lock is alive, `acquire` fails immediately.
_WAIT_SECONDS = 5.0

# Locks of this process, by (device, inode) of their file. In a forked child, it lists the parent's locks; see
# `_own_lock`.
_held: dict[tuple[int, int], "RunLock"] = {}
_guard = threading.Lock()


class LockHolder(FrozenModel):
    """The process that holds the lock of a run folder."""

    pid: int
    host: str
    since: float
    """Time at which the lock was taken, in unix seconds."""

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.since).astimezone().isoformat(sep=" ", timespec="seconds")
        return f"process {self.pid} on {self.host}, since {when}"


class RunLock:
    """A held lock of a run folder, as returned by `acquire`. It is a context manager."""

    def __init__(self, *, descriptor: int, key: tuple[int, int], holder: LockHolder) -> None:
        self._descriptor = descriptor
        self._key = key
        self.holder = holder

    def release(self) -> None:
        """Release the lock. Releasing it twice is allowed. In a forked child, only close the copy of the descriptor."""
        with _guard:
            if self._descriptor < 0:
                return
            # Clear the entry, so that the next holder is not mistaken for this process before it writes its own.
            if self.holder.pid == os.getpid():
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, 0)
            _held.pop(self._key, None)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


def acquire(folder: Path) -> RunLock:
    """Take the lock of a run folder. If another process has it, raise an error that names the process."""
    path = folder / LOCK_FILE
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        with _guard, disk_errors("lock", path):
            lock = _try_acquire(path)
        if lock is not None:
            return lock
        # Another process has the lock. If its owner is known to be alive, give up; otherwise wait, because the process
        # may be dying or only be calling `holder`.
        current = holder(folder)
        if current is not None and current.pid != 0 and (_is_alive(current) or time.monotonic() > deadline):
            raise _locked_error(folder, current)
        if time.monotonic() > deadline:
            raise _locked_error(folder, None)
        # lockf cannot wait with a timeout, so poll.
        time.sleep(0.02)


def holder(folder: Path) -> LockHolder | None:
    """Return the holder of the lock; None if it is free. A pid of 0 means that the holder is not known yet."""
    path = folder / LOCK_FILE
    with _guard, disk_errors("read", path):
        ours = _own_lock(path)
        if ours is not None:
            return ours.holder
        try:
            descriptor = _open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            # A shared lock can be taken only if no process has the exclusive lock. Closing the file releases it.
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BUSY:
                raise
            return _read_holder(descriptor)
        else:
            return None
        finally:
            os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of this run folder."""
    return holder(folder) is not None


def _own_lock(path: Path) -> RunLock | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    lock = _held.get((stat.st_dev, stat.st_ino))
    # A forked child has a copy of the table but not the lock, because a lockf lock belongs to one process.
    return lock if lock is not None and lock.holder.pid == os.getpid() else None


def _try_acquire(path: Path) -> RunLock | None:
    if _own_lock(path) is not None:
        return None
    descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stat = os.fstat(descriptor)
        if not _is_still(path, stat):  # The folder was removed between open and lock.
            os.close(descriptor)
            return None
        owner = LockHolder(pid=os.getpid(), host=platform.node() or "unknown", since=time.time())
        data = (strict_json.encode(owner.as_json()) + "\n").encode()
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
    except OSError as error:
        os.close(descriptor)
        if error.errno in _BUSY:
            return None
        raise
    lock = RunLock(descriptor=descriptor, key=(stat.st_dev, stat.st_ino), holder=owner)
    _held[stat.st_dev, stat.st_ino] = lock
    return lock


def _open(path: Path, flags: int) -> int:
    """Open a regular file. Reject links, which could point anywhere, and pipes, which would block."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat_module.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise WhetError(
        f"{path} is not a lock file", got="not a regular file", try_="remove it, if no process uses the run"
    )


def _is_still(path: Path, stat: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), stat)
    except FileNotFoundError:
        return False


def _read_holder(descriptor: int) -> LockHolder:
    try:
        return LockHolder.from_json(strict_json.decode(os.pread(descriptor, 4096, 0)), where=LOCK_FILE)
    except (ValueError, UsageError):
        return LockHolder(pid=0, host="unknown", since=0.0)


def _is_alive(owner: LockHolder) -> bool:
    # A dead pid does not mean that the lock is free: a new owner may not have written its entry yet. The pid of another
    # host cannot be checked, so assume that the process is alive.
    if owner.host != platform.node():
        return True
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    # The process exists but belongs to another user.
    except PermissionError:
        return True
    return True


def _locked_error(folder: Path, owner: LockHolder | None) -> WhetError:
    if owner is None or owner.pid == 0:
        return WhetError(
            f"another process is using the run {folder}",
            got="its process id is not known yet",
            try_=f"run the same command again in a moment, or choose {OTHER_FOLDER}",
        )
    if owner.pid == os.getpid():
        hint = "close the other session of this process first, or choose another run folder"
    else:
        hint = f"wait for it, stop it with `kill {owner.pid}` (it saves first), or choose {OTHER_FOLDER}"
    return WhetError(f"another process is using the run {folder}", got=str(owner), try_=hint)
