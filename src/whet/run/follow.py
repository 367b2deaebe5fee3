"""The history of a run that is still growing, and its events as they arrive."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from whet.run.disk import open_regular_file
from whet.run.event import Event, parse_event
from whet.run.event_block import EventBlock
from whet.run.event_index import LogLayout, ScanProgress, read_non_steps, scan_blocks
from whet.run.events import History, read_log_layout
from whet.run.folder import EVENTS_FILE, Run, run_folder
from whet.run.lock import is_locked

PROCESS_DIED = "gone"
"""The kind of an event that is in no file: the process that trained has died without a word."""


def follow(run: Run | Path, *, poll_seconds: float = 0.5, stop: threading.Event | None = None) -> Iterator[Event]:
    """Yields what is there (only what counts), then what comes, until the run ends or `stop` is set.

    Among what comes, a `resume` event makes later steps seen before void. When the writer dies without an `end`,
    one event of kind `gone` says so, and the waiting goes on: the same command may resume the run. A file that was
    replaced by another one is told from its beginning.
    """
    folder = run_folder(run)
    stop = stop or threading.Event()
    feed = _LogReader(folder / EVENTS_FILE)
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
            yield Event(kind=PROCESS_DIED, time=time.time(), step=last.step)
        stop.wait(poll_seconds)


class _LogReader:
    """The place in an events file up to which it was read, and how to know that it is still the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._position = 0
        self._before = b""
        """The last bytes before the position."""

    def news(self, folder: Path) -> Iterator[Event]:
        try:
            file = open_regular_file(self._path)
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
            event = parse_event(line) if line else None
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


_REINDEX_BYTES = 8 * 1024**2
"""More new bytes than this, and the index is asked again."""
_FINGERPRINT_BYTES = 64
"""By so many bytes before the end a file is known again."""


@dataclass(frozen=True, slots=True)
class HistoryUpdate:
    """What a refresh found; false when nothing."""

    events: tuple[Event, ...] = ()
    """New events that are no steps, in the order they were written."""
    num_steps: int = 0
    """How many new step events."""
    resumed_from: int | None = None
    """The run went on from this step: later steps that were shown before are void."""
    is_replaced: bool = False
    """Another file lies there now: everything shown before is void. The events of the new file are not listed."""

    def __bool__(self) -> bool:
        return self != HistoryUpdate()


class LiveHistory(History):
    """The events of a run that may still grow. For one thread at a time."""

    def __init__(self, run: Run | Path, *, progress: ScanProgress | None = None) -> None:
        self._folder = run_folder(run)
        self._file: tuple[int, int] | None = None
        self._before = b""
        self._open(progress=progress)

    def refresh(self) -> HistoryUpdate:
        """Takes in what was written since; torn last lines wait until they are whole."""
        try:
            file = open_regular_file(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return HistoryUpdate()  # What was there stays shown: a folder may be moved, or its disk may sleep.
        with file:
            stat = os.fstat(file.fileno())
            if self._file is None and self.layout.end == 0:
                self._file = (stat.st_dev, stat.st_ino)
            if (stat.st_dev, stat.st_ino) != self._file or not self._is_known(file, size=stat.st_size):
                self._open()
                return HistoryUpdate(is_replaced=True)
            before = self.layout
            if stat.st_size == before.end + before.torn_bytes:
                return HistoryUpdate()
            if stat.st_size - before.end > _REINDEX_BYTES:
                self._open()
                return self._news(file, since=before.end, earlier=before.blocks, later=self.layout.blocks)
            return self._extend(file, size=stat.st_size)

    def _open(self, *, progress: ScanProgress | None = None) -> None:
        self._path = self._folder / EVENTS_FILE
        try:
            # Before the events are read: if another file comes between, the next look finds it.
            stat = self._path.stat()
            self._file = (stat.st_dev, stat.st_ino)
        except OSError:
            self._file = None
        self._take(read_log_layout(self._folder, progress=progress))
        self._remember()

    def _remember(self) -> None:
        self._before = b""
        if self._file is not None:
            with open_regular_file(self._path) as file:
                start = max(0, self.layout.end - _FINGERPRINT_BYTES)
                self._before = os.pread(file.fileno(), self.layout.end - start, start)

    def _is_known(self, file: BinaryIO, *, size: int) -> bool:
        if size < self.layout.end:
            return False
        return os.pread(file.fileno(), len(self._before), self.layout.end - len(self._before)) == self._before

    def _extend(self, file: BinaryIO, *, size: int) -> HistoryUpdate:
        before = self.layout
        kept = before.blocks[:-1]
        begin = before.blocks[-1].start if before.blocks else 0
        fresh = tuple(scan_blocks(file, start=begin, size=size))
        end = fresh[-1].end if fresh else begin
        layout = LogLayout(
            blocks=kept + fresh,
            end=end,
            torn_bytes=size - end,
            index_bytes=before.index_bytes,
            num_indexed=min(before.num_indexed, len(kept)),
        )
        news = self._news(file, since=before.end, earlier=before.blocks[-1:], later=fresh)
        if news.resumed_from is not None:
            self._take(layout)
        else:
            self._grow(layout, num_kept=len(kept))
            self._fill_tables(file, news, since=before.end)
        self._remember()
        return news

    def _grow(self, layout: LogLayout, *, num_kept: int) -> None:
        """The same as `_take`, where nothing that was there has become void."""
        self.damaged += sum(block.damaged for block in layout.blocks[num_kept:])
        self.damaged -= sum(block.damaged for block in self.layout.blocks[num_kept:])
        self.layout = layout
        self._limits[num_kept:] = [float("inf")] * (len(layout.blocks) - num_kept)
        self._rests.pop(num_kept, None)

    def _fill_tables(self, file: BinaryIO, news: HistoryUpdate, *, since: int) -> None:
        for (kind, rows), table in [*self.tables.items()]:
            if rows == "blocks":
                del self.tables[kind, rows]
            if rows != "events":
                continue
            for event in _events_between(file, since, self.layout.end) if kind == "step" else news.events:
                if event.kind == kind:
                    table.add(event)

    def _news(
        self, file: BinaryIO, *, since: int, earlier: tuple[EventBlock, ...], later: tuple[EventBlock, ...]
    ) -> HistoryUpdate:
        fresh = [block for block in later if block.end > since]
        events = [event for block in fresh for event in _non_step_events(file, block, since=since)]
        resumed = [b.resumed_from for b in fresh if b.resumed_from is not None and b.start >= since]
        num_steps = sum(b.kinds.get("step", 0) for b in later) - sum(b.kinds.get("step", 0) for b in earlier)
        return HistoryUpdate(events=tuple(events), num_steps=num_steps, resumed_from=min(resumed, default=None))


def _non_step_events(file: BinaryIO, block: EventBlock, *, since: int) -> Iterator[Event]:
    """The events of a block that are no steps and lie behind a place in the file."""
    places = tuple(place for place in block.places if block.start + place[1] >= since)
    kinds = {kind for kind, _, _ in places}
    return read_non_steps(file, replace(block, places=places), kinds=kinds)


def _events_between(file: BinaryIO, start: int, end: int) -> Iterator[Event]:
    file.seek(start)
    for line in file.read(end - start).split(b"\n"):
        event = parse_event(line) if line else None
        if event is not None:
            yield event
