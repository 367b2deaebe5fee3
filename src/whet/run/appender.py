"""How does a log grow without losing a line? A file that only grows, and keeps in memory what the disk refuses."""

import errno
import os
from pathlib import Path

from whet.run import durable


class Appender:
    """A file that only grows. Bytes wait in memory until `flush`; what the disk refused stays and goes first next time,
    so a full disk loses nothing that space will not bring back."""

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Opens or makes `path`; `keep_bytes` cuts off what lies behind (a torn end)."""
        self._path = path
        self._waiting: list[bytes] = []
        with durable.told("open", path):
            self._descriptor = durable.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._owner = os.getpid()
            if keep_bytes is not None:
                durable.disk.truncate(self._descriptor, keep_bytes)
            self.size = os.fstat(self._descriptor).st_size
            """Where the next byte goes, counting those that wait."""

    def add(self, data: bytes) -> None:
        """Puts bytes in line; touches no durable.disk."""
        self._waiting.append(data)
        self.size += len(data)

    def flush(self) -> None:
        """Hands all that waits to the system: it then survives this process, not yet a power cut."""
        if not self._waiting or os.getpid() != self._owner:
            return  # A forked child holds a copy of what waits; writing it would repeat it.
        data = memoryview(b"".join(self._waiting))
        with durable.told("write", self._path):
            try:
                while data:
                    data = data[durable.disk.write(self._descriptor, data) :]
            finally:
                self._waiting = [bytes(data)] if data else []

    def sync(self) -> None:
        """Makes everything so far survive a power cut."""
        self.flush()
        with durable.told("sync", self._path):
            if os.fstat(self._descriptor).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "deleted while open")
            durable.disk.full_sync(self._descriptor)

    def settle(self) -> None:
        """Makes what was flushed survive a power cut together with what is fully synced next; from any thread."""
        with durable.told("sync", self._path):
            if self._descriptor >= 0:
                durable.disk.sync(self._descriptor)

    def close(self) -> None:
        """Syncs and closes; closing twice is fine."""
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            with durable.told("close", self._path):
                durable.disk.close(descriptor)
