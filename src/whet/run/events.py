"""How are events.jsonl and its index written while a run trains, and read back?

Writing is cheap per step: lines wait in memory and go to the system once a second, at every happening that is no step,
and on close; `sync` makes them survive a power cut. Only a torn last line is ever cut off, when the file is opened.
Reading shows the run as it counts: what a later `resume` made void is left out.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from whet.base.errors import WhetError, nearest
from whet.run import strict_json
from whet.run.appender import Appender
from whet.run.event import KINDS, REPLACED, RESERVED, SITTINGS, Event
from whet.run.folder import EVENTS_FILE, INDEX_FILE, Run, folder_of
from whet.run.index import HEADER, Block, Layout, Tally, read_block, read_layout, write_entry
from whet.run.plain_file import open_plain


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
        layout = _layout(folder)
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
            line = strict_json.compact(record)
        except (ValueError, TypeError):
            record, line = _odd_record(record)
            fields = {name: record[name] for name in fields}
        if kind in SITTINGS or self._tally.is_full:
            self._close_block()
        self._tally.add(kind, time=record["time"], step=record["step"], fields=fields)
        self._events.add(line.encode() + b"\n")
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
    """The events of a run up to the moment it was opened, without those that a later `resume` made void."""

    def __init__(self, run: Run | Path) -> None:
        self._path = folder_of(run) / EVENTS_FILE
        self.layout = _layout(folder_of(run))
        self.damaged = sum(block.damaged for block in self.layout.blocks)
        """Lines in the file that are no events; they are passed over."""
        self._limits = _limits(self.layout.blocks)
        self._positions = {block.start: position for position, block in enumerate(self.layout.blocks)}

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, *, kinds: Collection[str] | None = None, from_step: int | None = None) -> Iterator[Event]:
        """The events in the order they were written, of these kinds, at this step or later."""
        for position, block in enumerate(self.layout.blocks):
            if from_step is not None and block.greatest_step < from_step:
                continue
            if kinds is None or not block.kinds.keys().isdisjoint(kinds):
                for event in self._read(position):
                    if (kinds is None or event.kind in kinds) and (from_step is None or event.step >= from_step):
                        yield event

    def backwards(self, *, kinds: Collection[str] | None = None) -> Iterator[Event]:
        """The same, the newest first."""
        for position in reversed(range(len(self.layout.blocks))):
            if kinds is None or not self.layout.blocks[position].kinds.keys().isdisjoint(kinds):
                for event in reversed(self._read(position)):
                    if kinds is None or event.kind in kinds:
                        yield event

    def last(self, *kinds: str) -> Event | None:
        """The newest event of these kinds, or None."""
        return next(self.backwards(kinds=kinds), None)

    def step_blocks(self) -> Iterator[Block]:
        """Blocks with the step events that count; one that is partly void comes as a block of what is left of it."""
        for position, block in enumerate(self.layout.blocks):
            if "step" not in block.kinds:
                continue
            if block.greatest_step <= self._limits[position]:
                yield block
                continue
            tally = Tally(block.start)
            for event in self._read(position):
                tally.add(event.kind, time=event.time, step=event.step, fields=event.fields)
            rest = tally.block(block.end)
            if "step" in rest.kinds:
                yield rest

    def read(self, block: Block) -> Iterator[Event]:
        """The events that count of a block of this history."""
        return iter(self._read(self._positions[block.start]))

    def _read(self, position: int) -> list[Event]:
        limit = self._limits[position]
        with open_plain(self._path) as file:
            events = read_block(file, self.layout.blocks[position])
            return [event for event in events if event.step <= limit or event.kind not in REPLACED]


def read_events(
    run: Run | Path, *, kinds: Collection[str] | None = None, from_step: int | None = None
) -> Iterator[Event]:
    """The events of a run that count; a `History` also tells how many lines were damaged."""
    return History(run).events(kinds=kinds, from_step=from_step)


def tail(run: Run | Path, n: int) -> tuple[Event, ...]:
    """The last `n` events that count, oldest first."""
    return tuple(itertools.islice(History(run).backwards(), n))[::-1]


def _odd_record(record: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A record with NaN or another library's numbers, in Python's own types, and its line."""
    try:
        record = strict_json.plain(record)
    except TypeError as error:
        what = f"a {record['kind']} event cannot be written"
        raise WhetError(what, got=str(error), try_="numbers, text, lists and maps of them") from None
    return record, strict_json.encode(record)


def _layout(folder: Path) -> Layout:
    return read_layout(folder / EVENTS_FILE, index=folder / INDEX_FILE)


def _limits(blocks: tuple[Block, ...]) -> list[float]:
    """For each block the lowest step that a later block resumed from: above it, its steps are void."""
    limits: list[float] = []
    lowest = float("inf")
    for block in reversed(blocks):
        limits.append(lowest)
        if block.resumed_from is not None:
            lowest = min(lowest, block.resumed_from)
    return limits[::-1]
