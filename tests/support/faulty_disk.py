"""A replacement for whet.run.disk.Disk in which any single call can fail, be cut short or be the last one."""

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whet.run.disk import Disk


class FaultyDisk(Disk):
    """Counts calls from 1, and applies `fault` at call `at`.

    before, after   the process is killed (SIGKILL) before or after the call
    short           a write writes half; other calls are unchanged
    ENOSPC, ...     the call is refused with that error, and nothing is done
    none            calls are only counted
    """

    def __init__(self, fault: str = "none", *, at: int = 0, report: Callable[[str], None] = lambda line: None) -> None:
        self.count = 0
        self._fault = fault
        self._at = at
        self._report = report
        self._lock = threading.Lock()

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            self.count += 1
            is_hit = self.count == self._at
        if not is_hit:
            return getattr(super(), name)(*arguments)
        self._report(f"fault {self._fault} at {name} in {threading.current_thread().name}")
        if self._fault == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "short" and name == "write":
            descriptor, data = arguments
            return super().write(descriptor, data[: max(1, len(data) // 2)])
        if self._fault.startswith("E"):
            if name == "close":
                # A failed close still closes the descriptor.
                super().close(*arguments)
            code = getattr(errno, self._fault)
            raise OSError(code, os.strerror(code))
        result = getattr(super(), name)(*arguments)
        if self._fault == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def open(self, path: Path, flags: int) -> int:
        return self._call("open", path, flags)

    def write(self, descriptor: int, data: memoryview) -> int:
        return self._call("write", descriptor, data)

    def sync(self, descriptor: int) -> None:
        self._call("sync", descriptor)

    def full_sync(self, descriptor: int) -> None:
        self._call("full_sync", descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        self._call("truncate", descriptor, size)

    def close(self, descriptor: int) -> None:
        self._call("close", descriptor)

    def make_folder(self, path: Path) -> None:
        self._call("make_folder", path)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", source, target)

    def unlink(self, path: Path) -> None:
        self._call("unlink", path)

    def remove_folder(self, path: Path) -> None:
        self._call("remove_folder", path)
