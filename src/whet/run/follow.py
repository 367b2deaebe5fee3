"""Follow a growing run: update its history from new bytes and yield new events.

    history = LiveHistory(run)
    downsample_curves(history, points=400, is_growing=True)
    ...
    if history.refresh() != "unchanged":  # for example every second
        downsample_curves(history, points=400, is_growing=True)

A `LiveHistory` is a `History` as of the last `refresh`.
"""

import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from whet.run.disk import open_regular_file
from whet.run.event import Event, parse_event
from whet.run.event_index import LogLayout, read_log_layout, scan_blocks
from whet.run.events import History
from whet.run.folder import EVENTS_FILE, Run, run_folder
from whet.run.lock import is_locked

RefreshResult = Literal["unchanged", "grown", "replaced"]

# The kind of an event that is not in the file: the training process died without writing an `end` event.
PROCESS_DIED = "died"
# If there are more new bytes than this, read the index again.
_REINDEX_BYTES = 8 * 1024**2
# Maximum number of events in memory at once. The others stay in the file.
_MAX_BATCH = 10_000
# Number of bytes at the end of the known part. If they change, the file was replaced.
_FINGERPRINT_BYTES = 64


class LiveHistory(History):
    """The events of a run that may still grow. Not thread-safe."""

    def __init__(self, run: Run | Path) -> None:
        self._folder = run_folder(run)
        self._file_id: tuple[int, int] | None = None
        self._fingerprint = b""
        self._open()

    def refresh(self) -> RefreshResult:
        """Read new events. An incomplete last line is left for a later call."""
        try:
            file = open_regular_file(self._path)
        except (FileNotFoundError, NotADirectoryError):
            # Keep the known events, because the folder may be in the middle of a move, or its disk may be asleep.
            return "unchanged"
        with file:
            stat = os.fstat(file.fileno())
            # The file appeared after the first read, so this is not a replacement.
            if self._file_id is None and self.layout.end == 0:
                self._file_id = (stat.st_dev, stat.st_ino)
            if (stat.st_dev, stat.st_ino) != self._file_id or not self._is_same(file, size=stat.st_size):
                self._open()
                return "replaced"
            before = self.layout.end
            if stat.st_size - before > _REINDEX_BYTES:
                self._open()
            elif stat.st_size != before + self.layout.torn_bytes:
                self._extend(file, size=stat.st_size)
            return "grown" if self.layout.end > before else "unchanged"

    def events_since(self, position: int) -> Iterator[Event]:
        """Yield the events after a byte offset in the file, including superseded events."""
        with open_regular_file(self._path) as file:
            yield from _events_between(file, position, self.layout.end)

    def _open(self) -> None:
        self._path = self._folder / EVENTS_FILE
        try:
            # Stat the file before reading it, so that the next refresh detects a replacement in between.
            stat = self._path.stat()
            self._file_id = (stat.st_dev, stat.st_ino)
        except OSError:
            self._file_id = None
        self._set_layout(read_log_layout(self._folder))
        self._save_fingerprint()

    def _save_fingerprint(self) -> None:
        self._fingerprint = b""
        if self._file_id is not None:
            with open_regular_file(self._path) as file:
                start = max(0, self.layout.end - _FINGERPRINT_BYTES)
                self._fingerprint = os.pread(file.fileno(), self.layout.end - start, start)

    def _is_same(self, file: BinaryIO, *, size: int) -> bool:
        if size < self.layout.end:
            return False
        # An inode can be reused, so compare the last known bytes as well.
        start = self.layout.end - len(self._fingerprint)
        return os.pread(file.fileno(), len(self._fingerprint), start) == self._fingerprint

    def _extend(self, file: BinaryIO, *, size: int) -> None:
        before = self.layout
        kept = before.blocks[:-1]  # The last block may have grown.
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
        if any(block.resumed_from is not None and block.start >= before.end for block in fresh):
            # Earlier steps have been superseded, so recompute everything derived from them.
            self._set_layout(layout)
        else:
            self._grow(layout, num_kept=len(kept))
            self._extend_curve_cache(_events_between(file, before.end, end))
        self._save_fingerprint()

    def _grow(self, layout: LogLayout, *, num_kept: int) -> None:
        """Update the layout after new events, none of which supersedes earlier events."""
        self.damaged += sum(block.damaged for block in layout.blocks[num_kept:])
        self.damaged -= sum(block.damaged for block in self.layout.blocks[num_kept:])
        self.layout = layout
        self._superseded_above[num_kept:] = [float("inf")] * (len(layout.blocks) - num_kept)
        self._trimmed.pop(num_kept, None)

    def _extend_curve_cache(self, events: Iterable[Event]) -> None:
        """Append the new events to tables with one row per event, and drop the other cached values."""
        self.curve_cache = {key: value for key, value in self.curve_cache.items() if key[1] == "events"}
        for event in events if self.curve_cache else ():
            if (event.kind, "events") in self.curve_cache:
                self.curve_cache[event.kind, "events"].add(event)


def follow(run: Run | Path, *, poll_seconds: float = 0.5, stop: threading.Event | None = None) -> Iterator[list[Event]]:
    """Yield batches of the valid events so far, then of new events, until the run ends or `stop` is set.

    A new `resume` event supersedes later steps that have already been yielded. If the process dies without an `end`
    event, one event of kind `died` is yielded and waiting continues, because the same command may resume the run. If
    the file is replaced, the events of the new file are yielded from its beginning.
    """
    folder, stop = run_folder(run), stop or threading.Event()
    history = LiveHistory(folder)
    events = history.events()
    last: Event | None = None
    polls_unlocked = 0
    while not stop.is_set():
        is_new = False
        for batch in in_batches(events):
            last, is_new = batch[-1], True
            yield batch
            if stop.is_set():
                return
        if is_new:
            polls_unlocked = 0
        elif last is not None and last.kind == "end":
            return
        else:
            # Check twice in a row, because the lock is free for a moment between two sessions of a run.
            polls_unlocked = 0 if last is None or is_locked(folder) else polls_unlocked + 1
            if last is not None and polls_unlocked == 2:
                yield [Event(kind=PROCESS_DIED, time=time.time(), step=last.step)]
            stop.wait(poll_seconds)
        position, result = history.layout.end, history.refresh()
        if result == "unchanged":
            events = iter(())
        elif result == "replaced" or position == 0:
            events = history.events()
        else:
            events = history.events_since(position)


def in_batches(events: Iterator[Event]) -> Iterator[list[Event]]:
    """Yield the events in lists of limited length."""
    while batch := list(itertools.islice(events, _MAX_BATCH)):
        yield batch


def _events_between(file: BinaryIO, start: int, end: int) -> Iterator[Event]:
    file.seek(start)
    lines = file.read(end - start).split(b"\n")
    return (event for line in lines if line and (event := parse_event(line)) is not None)
