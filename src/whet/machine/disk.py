"""How fast does the disk under a folder read? A short look past the system's cache, or None."""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

READ_BYTES = 32 * 1024**2
READ_SECONDS = 0.2
WRITE_BYTES = 8 * 1024**2
WRITE_SECONDS = 0.1
_CHUNK = 1024**2
_WORTH_READING = 4 * 1024**2
_ENTRIES_LOOKED_AT = 200
_CACHE_SPEED = 20e9
"""Bytes per second that no disk reaches: what is faster came out of a cache."""


def read_speed(folder: Path) -> float | None:
    """Bytes per second of reading from the folder's disk, within about 0.3 s; None if it cannot be measured."""
    try:
        existing = _largest_file(folder)
        if existing is not None:
            with existing.open("rb", buffering=0) as file:
                return _timed_read(file.fileno())
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            _fill(file.fileno())
            return _timed_read(file.fileno())
    except (OSError, ValueError):
        return None


def _largest_file(folder: Path) -> Path | None:
    best, best_size = None, _WORTH_READING
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_ENTRIES_LOOKED_AT), entries, strict=False):
            if entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
                size = entry.stat(follow_symlinks=False).st_size
                if size >= best_size:
                    best, best_size = Path(entry.path), size
    return best


def _fill(file: int) -> None:
    deadline = time.monotonic() + WRITE_SECONDS
    # Random bytes: a file system that compresses or leaves holes would not read zeros from the disk.
    chunk = os.urandom(_CHUNK)
    for _ in range(WRITE_BYTES // _CHUNK):
        os.write(file, chunk)
        if time.monotonic() > deadline:
            break
    os.fsync(file)
    os.lseek(file, 0, os.SEEK_SET)


def _timed_read(file: int) -> float | None:
    _forget_cached(file)
    start = time.monotonic()
    done = 0
    while done < READ_BYTES and time.monotonic() - start < READ_SECONDS:
        got = len(os.read(file, _CHUNK))
        if got == 0:
            break
        done += got
    seconds = time.monotonic() - start
    if done < _CHUNK or seconds <= 0 or done / seconds > _CACHE_SPEED:
        return None
    return done / seconds


def _forget_cached(file: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    elif hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
