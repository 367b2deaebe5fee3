"""Which calls change the disk, and what if one of them is the last? A disk that counts, and can end the process."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from whet.run.disk import Disk
from whet.run.folder import CHECKPOINTS

CALLS = tuple(name for name in vars(Disk) if not name.startswith("_"))
"""Every call of the table; a new one is counted without a change here."""

_INTO_DRAFT = 4
"""Calls: its first file is there then, and no manifest."""

Tell = Callable[..., None]


class CountingDisk(Disk):
    """Counts every call from 1. At call `die_at` the process is killed with SIGKILL: before the call, or after it; or
    in the middle of the draft of a checkpoint, of the one with the number `die_in_draft`.

    `tell` hears of the begin of every draft, and of the end.
    """

    def __init__(self, *, tell: Tell, die_at: int = 0, die_after: bool = False, die_in_draft: int = 0) -> None:
        self.count = 0
        self._num_drafts = 0
        self._tell, self._die_at, self._die_after, self._die_in_draft = tell, die_at, die_after, die_in_draft
        self._lock = threading.Lock()

    def _counted(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            self.count += 1
            number = self.count
        if name == "make_folder" and arguments[0].parent.name == CHECKPOINTS:
            self._tell("draft", call=number)
            self._num_drafts += 1
            if self._num_drafts == self._die_in_draft:
                self._die_at = number + _INTO_DRAFT
        if number != self._die_at:
            return call(self, *arguments)
        self._tell("last call", call=number, name=name)
        if self._die_after:
            call(self, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a process outlives its SIGKILL")


def _counting(name: str) -> Callable[..., Any]:
    call = getattr(Disk, name)
    return lambda self, *arguments: self._counted(name, call, *arguments)


for _name in CALLS:
    setattr(CountingDisk, _name, _counting(_name))
