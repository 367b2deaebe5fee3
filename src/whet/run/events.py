"""How are events.jsonl and its index written while a run trains, and read back?

Writing is cheap per step: lines wait in memory and go to the system once a second, at every happening that is no step,
and on close; `sync` makes them survive a power cut. Only a torn last line is ever cut off, when the file is opened.
Reading shows the run as it counts: what a later `resume` made void is left out.
"""

import contextlib
import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from whet.base.errors import WhetError, nearest
from whet.run import strict_json
from whet.run.appender import Appender
from whet.run.event import KINDS, REPLACED, RESERVED, SITTINGS, Event
from whet.run.folder import EVENTS_FILE, INDEX_FILE, Run, folder_of
from whet.run.index import HEADER, LONG_BYTES, Layout, Progress, read_block, read_layout, read_places, write_entry
from whet.run.plain_file import open_plain
from whet.run.spare_index import keep_spare, spare_path
from whet.run.tally import Block, Tally


class EventLog:
    """Writes the events of a run. The process must hold the lock of the run; a context manager."""

    def __init__(
        self,
        run: Run | Path,
        *,
        flush_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the log for more events; `clock` dates them, `stopwatch` paces the flushes (it never jumps)."""
        folder = folder_of(run)
        layout = layout_of(folder)
        self.path = folder / EVENTS_FILE
        self._events = Appender(folder / EVENTS_FILE, keep_bytes=layout.end)
        try:
            self._index = Appender(folder / INDEX_FILE, keep_bytes=layout.index_bytes)
        except BaseException:
            self._events.close()
            raise
        if layout.index_bytes == 0:
            self._index.add(HEADER)
        for block in layout.blocks[layout.num_indexed :]:
            self._index.add(write_entry(block))
        self._tally = Tally(layout.end)
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._stopwatch = stopwatch
        self._flushed_at = stopwatch()

    def append(self, kind: str, /, *, step: int, **fields: Any) -> None:
        """Adds one event. If the disk refuses it this raises, but keeps the event and writes it when it can."""
        if kind not in KINDS:
            raise WhetError("unknown kind of event", got=kind, try_=nearest(kind, KINDS) or ", ".join(sorted(KINDS)))
        if not RESERVED.isdisjoint(fields):
            raise ValueError(f"names of fields that every event has: {sorted(RESERVED & fields.keys())}")
        record = {"kind": kind, "time": self._clock(), "step": step, **fields}
        try:
            # Steps are many, and hold nothing but what the engine puts in.
            line = strict_json.quick(record) if kind == "step" else strict_json.compact(record).encode()
        except (ValueError, TypeError):
            record, line = _odd_record(record)
            fields = {name: record[name] for name in fields}
        if kind in SITTINGS or self._tally.is_full:
            self._close_block()
        data = line + b"\n"
        self._tally.add(kind, record["time"], record["step"], fields, start=self._events.size, length=len(data))
        self._events.add(data)
        if kind != "step" or self._stopwatch() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def drop_after(self, step: int, **fields: Any) -> None:
        """The run goes on from `step`: what came later stays in the file, but no longer counts."""
        self.append("resume", step=step, **fields)

    def flush(self) -> None:
        """Lets other processes see all events so far; they then survive this process."""
        self._flushed_at = self._stopwatch()  # Also when it fails: a full disk is asked once a second, not every step.
        self._events.flush()
        self._index.flush()

    def sync(self) -> None:
        """Makes all events so far survive a power cut; costs milliseconds, so do it with a checkpoint."""
        self._events.sync()

    def settle(self) -> None:
        """Makes what was flushed survive a power cut together with the checkpoint that is written next; any thread."""
        self._events.settle()

    def close(self) -> None:
        """Writes and syncs what waits, and closes; closing twice is fine."""
        self._close_block()
        with contextlib.ExitStack() as stack:
            stack.callback(self._index.close)  # Last: the index must not know events that are not there.
            self._events.close()

    def _close_block(self) -> None:
        if self._tally.count:
            self._index.add(write_entry(self._tally.block(self._events.size)))
            self._tally = Tally(self._events.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class History:
    """The events of a run up to the moment it was opened, without those that a later `resume` made void.

    Where the index is missing or old, the events are read: `progress` is told how many bytes of how many.
    """

    def __init__(self, run: Run | Path, *, progress: Progress | None = None) -> None:
        self._path = folder_of(run) / EVENTS_FILE
        self._take(layout_of(folder_of(run), progress=progress))

    def _take(self, layout: Layout) -> None:
        self.layout = layout
        self.damaged = sum(block.damaged for block in layout.blocks)
        """Lines in the file that are no events; they are passed over."""
        self.tables: dict[tuple[str, str], Any] = {}
        """What whet.run.thin keeps, so that it need not be read again."""
        self._limits = _limits(layout.blocks)
        self._rests: dict[int, Block] = {}

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, *, kinds: Collection[str] | None = None, from_step: int | None = None) -> Iterator[Event]:
        """The events in the order they were written, of these kinds, at this step or later."""
        positions = [
            position
            for position in self._holding(kinds)
            if from_step is None or self.layout.blocks[position].greatest_step >= from_step
        ]
        for event in self._read(positions, kinds=kinds):
            if from_step is None or event.step >= from_step:
                yield event

    def backwards(self, *, kinds: Collection[str] | None = None) -> Iterator[Event]:
        """The same, the newest first."""
        for position in reversed(self._holding(kinds)):
            yield from self._read([position], kinds=kinds, newest_first=True)

    def last(self, *kinds: str) -> Event | None:
        """The newest event of these kinds, or None."""
        return next(self.backwards(kinds=kinds), None)

    def counted_blocks(self) -> Iterator[Block]:
        """All blocks; one with void events comes as a block of what is left of it."""
        for position, block in enumerate(self.layout.blocks):
            if block.greatest_step <= self._limits[position]:
                yield block
                continue
            if position not in self._rests:
                self._rests[position] = self._rest(position)
            if self._rests[position].kinds:
                yield self._rests[position]

    def step_blocks(self) -> Iterator[Block]:
        """Blocks with the step events that count."""
        return (block for block in self.counted_blocks() if "step" in block.kinds)

    def read(self, block: Block) -> Iterator[Event]:
        """The events that count of a block of this history."""
        starts = [each.start for each in self.layout.blocks]
        return self._read([bisect_left(starts, block.start)], kinds=None)

    def _holding(self, kinds: Collection[str] | None) -> list[int]:
        """The positions of blocks with such events."""
        blocks = enumerate(self.layout.blocks)
        return [position for position, block in blocks if kinds is None or not block.kinds.keys().isdisjoint(kinds)]

    def _read(
        self, positions: list[int], *, kinds: Collection[str] | None, newest_first: bool = False
    ) -> Iterator[Event]:
        if not positions:
            return
        with open_plain(self._path) as file:
            for position in positions:
                block, limit = self.layout.blocks[position], self._limits[position]
                if kinds is None or "step" in kinds:
                    events = read_block(file, block, newest_first=newest_first)
                else:
                    events = read_places(file, block, kinds=kinds, newest_first=newest_first)
                for event in events:
                    if (kinds is None or event.kind in kinds) and (event.step <= limit or event.kind not in REPLACED):
                        yield event

    def _rest(self, position: int) -> Block:
        block = self.layout.blocks[position]
        is_all_void = block.least_step > self._limits[position]
        # Of thousands of blocks that are void, only what stays true is read.
        kinds = block.kinds.keys() - REPLACED if is_all_void else None
        tally = Tally(block.start)
        for event in self._read([position], kinds=kinds) if kinds is None or kinds else ():
            tally.add(event.kind, event.time, event.step, event.fields, start=block.start, length=0)
        return replace(tally.block(block.end), places=())


def read_events(
    run: Run | Path, *, kinds: Collection[str] | None = None, from_step: int | None = None
) -> Iterator[Event]:
    """The events of a run that count; a `History` also tells how many lines were damaged."""
    return History(run).events(kinds=kinds, from_step=from_step)


def tail(run: Run | Path, n: int) -> tuple[Event, ...]:
    """The last `n` events that count, oldest first."""
    return tuple(itertools.islice(History(run).backwards(), n))[::-1]


def _odd_record(record: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A record with NaN or another library's numbers, in Python's own types, and its line."""
    try:
        record = strict_json.plain(record)
    except TypeError as error:
        what = f"a {record['kind']} event cannot be written"
        raise WhetError(what, got=str(error), try_="numbers, text, lists and maps of them") from None
    return record, strict_json.encode(record).encode()


def layout_of(folder: Path, *, progress: Progress | None = None) -> Layout:
    """The blocks of the events in a run folder; if finding out took long, it is kept for the next time."""
    events, index = folder / EVENTS_FILE, folder / INDEX_FILE
    layout = read_layout(events, index=index, spare=lambda: spare_path(events), progress=progress)
    if layout.read_bytes >= LONG_BYTES:
        keep_spare(events, layout.blocks[:-1])  # The last one may still grow.
    return layout


def _limits(blocks: tuple[Block, ...]) -> list[float]:
    """For each block the lowest step that a later block resumed from: above it, its steps are void."""
    limits: list[float] = []
    lowest = float("inf")
    for block in reversed(blocks):
        limits.append(lowest)
        if block.resumed_from is not None:
            lowest = min(lowest, block.resumed_from)
    return limits[::-1]
