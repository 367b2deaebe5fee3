"""What is a run doing now? Its events so far, then each new one as it comes."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from whet.run.event import Event, read_line
from whet.run.events import History
from whet.run.folder import EVENTS_FILE, Run, folder_of
from whet.run.lock import is_locked
from whet.run.plain_file import open_plain

GONE = "gone"
"""The kind of an event that is in no file: the process that trained has died without a word."""


def follow(run: Run | Path, *, poll_seconds: float = 0.5, stop: threading.Event | None = None) -> Iterator[Event]:
    """Yields what is there (only what counts), then what comes, until the run ends or `stop` is set.

    Among what comes, a `resume` event makes later steps seen before void. When the writer dies without an `end`,
    one event of kind `gone` says so, and the waiting goes on: the same command may resume the run. A file that was
    replaced by another one is told from its beginning.
    """
    folder = folder_of(run)
    stop = stop or threading.Event()
    feed = _Feed(folder / EVENTS_FILE)
    last: Event | None = None
    idle_polls_unlocked = 0
    while not stop.is_set():
        news = 0
        for event in feed.news(folder):
            last, news = event, news + 1
            yield event
            if stop.is_set():
                return
        if news:
            idle_polls_unlocked = 0
            continue
        if last is not None and last.kind == "end":
            return
        # Twice in a row: between two lives of a run the lock is free for a moment.
        idle_polls_unlocked = 0 if last is None or is_locked(folder) else idle_polls_unlocked + 1
        if last is not None and idle_polls_unlocked == 2:
            yield Event(kind=GONE, time=time.time(), step=last.step)
        stop.wait(poll_seconds)


class _Feed:
    """The place in an events file up to which it was read, and how to know that it is still the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._position = 0
        self._before = b""
        """The last bytes before the position."""

    def news(self, folder: Path) -> Iterator[Event]:
        try:
            file = open_plain(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return
        with file:
            stat = os.fstat(file.fileno())
            is_other = (stat.st_dev, stat.st_ino) != self._file
            if is_other or not self._is_where_it_was(file.fileno(), stat.st_size):
                self._file = (stat.st_dev, stat.st_ino)
                yield from self._history(folder, file.fileno())
                return  # The file may have changed since; what is new in it comes with the next look.
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        self._before = (self._before + whole)[-64:]
        for line in whole.split(b"\n"):
            event = read_line(line) if line else None
            if event is not None:
                yield event

    def _history(self, folder: Path, descriptor: int) -> Iterator[Event]:
        history = History(folder)
        self._position = history.layout.end
        start = max(0, self._position - 64)
        self._before = os.pread(descriptor, self._position - start, start)
        yield from history.events()

    def _is_where_it_was(self, descriptor: int, size: int) -> bool:
        if size < self._position:
            return False
        return os.pread(descriptor, len(self._before), self._position - len(self._before)) == self._before
