"""Who looks at the machine while the main thread trains? One thread that mostly sleeps."""

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from whet.machine.facts import Conditions
from whet.machine.vitals import Reader


class Watching:
    """While entered, calls `reader` every few seconds and hands what it says to `take`, in a thread.

    The thread takes no lock that a forked process could need: data workers may start at any time.
    """

    def __init__(self, reader: Reader, take: Callable[[Conditions], None], *, every_seconds: float) -> None:
        self._reader = reader
        self._take = take
        self._every_seconds = every_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="whet-vitals", daemon=True)

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # In a forked child the thread does not exist, and its event may have been copied while locked.
        if os.getpid() == self._pid:
            self._is_over.set()
            self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                found = self._reader()
                self._take(found if isinstance(found, Conditions) else Conditions())
            except Exception:
                # A reader that fails knows nothing; it must not end a run.
                self._take(Conditions())
            if self._is_over.wait(self._every_seconds):
                return
