"""What is new in a run since the last look? A history that is extended by new bytes, never read again as a whole.

    history = LiveHistory(run)
    thin_curves(history, points=400, is_growing=True)
    ...
    news = history.refresh()            # every second, if you like
    if news:
        thin_curves(history, points=400, is_growing=True)

Everything a `History` answers, a `LiveHistory` answers too, as of the last `refresh`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from whet.run.event import Event, read_line
from whet.run.events import History, layout_of
from whet.run.folder import EVENTS_FILE, Run, folder_of
from whet.run.index import Layout, Progress, read_places, scan
from whet.run.plain_file import open_plain
from whet.run.tally import Block

_LEAP_BYTES = 8 * 1024**2
"""More new bytes than this, and the index is asked again."""
_KNOWN_BYTES = 64
"""By so many bytes before the end a file is known again."""


@dataclass(frozen=True, slots=True)
class News:
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
        return self != News()


class LiveHistory(History):
    """The events of a run that may still grow. For one thread at a time."""

    def __init__(self, run: Run | Path, *, progress: Progress | None = None) -> None:
        self._folder = folder_of(run)
        self._file: tuple[int, int] | None = None
        self._before = b""
        self._open(progress=progress)

    def refresh(self) -> News:
        """Takes in what was written since; torn last lines wait until they are whole."""
        try:
            file = open_plain(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return News()  # What was there stays shown: a folder may be moved, or its disk may sleep.
        with file:
            stat = os.fstat(file.fileno())
            if self._file is None and self.layout.end == 0:
                self._file = (stat.st_dev, stat.st_ino)
            if (stat.st_dev, stat.st_ino) != self._file or not self._is_known(file, size=stat.st_size):
                self._open()
                return News(is_replaced=True)
            before = self.layout
            if stat.st_size == before.end + before.torn_bytes:
                return News()
            if stat.st_size - before.end > _LEAP_BYTES:
                self._open()
                return self._news(file, since=before.end, earlier=before.blocks, later=self.layout.blocks)
            return self._extend(file, size=stat.st_size)

    def _open(self, *, progress: Progress | None = None) -> None:
        self._path = self._folder / EVENTS_FILE
        try:
            # Before the events are read: if another file comes between, the next look finds it.
            stat = self._path.stat()
            self._file = (stat.st_dev, stat.st_ino)
        except OSError:
            self._file = None
        self._take(layout_of(self._folder, progress=progress))
        self._remember()

    def _remember(self) -> None:
        self._before = b""
        if self._file is not None:
            with open_plain(self._path) as file:
                start = max(0, self.layout.end - _KNOWN_BYTES)
                self._before = os.pread(file.fileno(), self.layout.end - start, start)

    def _is_known(self, file: BinaryIO, *, size: int) -> bool:
        if size < self.layout.end:
            return False
        return os.pread(file.fileno(), len(self._before), self.layout.end - len(self._before)) == self._before

    def _extend(self, file: BinaryIO, *, size: int) -> News:
        before = self.layout
        kept = before.blocks[:-1]
        begin = before.blocks[-1].start if before.blocks else 0
        fresh = tuple(scan(file, start=begin, size=size))
        end = fresh[-1].end if fresh else begin
        layout = Layout(
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

    def _grow(self, layout: Layout, *, num_kept: int) -> None:
        """The same as `_take`, where nothing that was there has become void."""
        self.damaged += sum(block.damaged for block in layout.blocks[num_kept:])
        self.damaged -= sum(block.damaged for block in self.layout.blocks[num_kept:])
        self.layout = layout
        self._limits[num_kept:] = [float("inf")] * (len(layout.blocks) - num_kept)
        self._rests.pop(num_kept, None)

    def _fill_tables(self, file: BinaryIO, news: News, *, since: int) -> None:
        for (kind, rows), table in [*self.tables.items()]:
            if rows == "blocks":
                del self.tables[kind, rows]
            if rows != "events":
                continue
            for event in _lines(file, since, self.layout.end) if kind == "step" else news.events:
                if event.kind == kind:
                    table.add(event)

    def _news(self, file: BinaryIO, *, since: int, earlier: tuple[Block, ...], later: tuple[Block, ...]) -> News:
        fresh = [block for block in later if block.end > since]
        events = [event for block in fresh for event in _happenings(file, block, since=since)]
        resumed = [b.resumed_from for b in fresh if b.resumed_from is not None and b.start >= since]
        num_steps = sum(b.kinds.get("step", 0) for b in later) - sum(b.kinds.get("step", 0) for b in earlier)
        return News(events=tuple(events), num_steps=num_steps, resumed_from=min(resumed, default=None))


def _happenings(file: BinaryIO, block: Block, *, since: int) -> Iterator[Event]:
    """The events of a block that are no steps and lie behind a place in the file."""
    places = tuple(place for place in block.places if block.start + place[1] >= since)
    kinds = {kind for kind, _, _ in places}
    return read_places(file, replace(block, places=places), kinds=kinds)


def _lines(file: BinaryIO, start: int, end: int) -> Iterator[Event]:
    file.seek(start)
    for line in file.read(end - start).split(b"\n"):
        event = read_line(line) if line else None
        if event is not None:
            yield event
