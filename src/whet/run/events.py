"""Write events.jsonl and its index during training, and read them back.

Writing takes little time per step: lines are buffered and are written once a second, with every event that is not a
step, and on close. `sync` makes them survive a power cut. Opening the file removes only a torn last line. Reading omits
events that a later `resume` has superseded: steps and evaluations after the step from which the run resumed.
"""

import contextlib
import errno
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from whet.base.errors import WhetError, closest_match
from whet.run import durable, strict_json
from whet.run.disk import open_regular_file
from whet.run.event import EVENT_KINDS, RESERVED_FIELDS, SESSION_START_KINDS, SUPERSEDED_KINDS, Event
from whet.run.event_block import BlockBuilder, EventBlock
from whet.run.event_index import INDEX_HEADER, LogLayout, encode_entry, read_block, read_log_layout
from whet.run.folder import EVENTS_FILE, INDEX_FILE, Run, run_folder


class AppendOnlyFile:
    """A file that only grows. Bytes are buffered in memory until `flush`.

    Bytes that could not be written stay in the buffer and are written first the next time, so no data is lost if space
    becomes available on a full disk.
    """

    def __init__(self, path: Path, *, keep_bytes: int | None = None) -> None:
        """Open or create `path`. With `keep_bytes`, truncate the file to that size to remove a torn end."""
        self._path = path
        self._waiting: list[bytes] = []
        with durable.disk_errors("open", path):
            self._descriptor = durable.disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._owner = os.getpid()
            if keep_bytes is not None:
                durable.disk.truncate(self._descriptor, keep_bytes)
            self.size = os.fstat(self._descriptor).st_size
            """Position of the next byte, including buffered bytes."""

    def add(self, data: bytes) -> None:
        """Append bytes to the buffer, which the next `flush` writes."""
        self._waiting.append(data)
        self.size += len(data)

    def flush(self) -> None:
        """Write the buffered bytes, which then survive this process but not a power cut."""
        if not self._waiting or os.getpid() != self._owner:
            return  # A forked child has a copy of the buffer. Writing it would duplicate the lines.
        data = memoryview(b"".join(self._waiting))
        with durable.disk_errors("write", self._path):
            try:
                while data:
                    data = data[durable.disk.write(self._descriptor, data) :]
            finally:
                self._waiting = [bytes(data)] if data else []

    def sync(self) -> None:
        """Make all bytes so far survive a power cut."""
        self.flush()
        with durable.disk_errors("sync", self._path):
            if os.fstat(self._descriptor).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "deleted while open")
            durable.disk.full_sync(self._descriptor)

    def fsync(self) -> None:
        """Send flushed bytes to the drive. The next full sync of any file makes them durable. Thread-safe."""
        with durable.disk_errors("sync", self._path):
            if self._descriptor >= 0:
                durable.disk.sync(self._descriptor)

    def close(self) -> None:
        """Sync and close the file. Closing twice is allowed."""
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            descriptor, self._descriptor = self._descriptor, -1
            with durable.disk_errors("close", self._path):
                durable.disk.close(descriptor)


class EventLog:
    """A context manager that writes the events of a run. The process must hold the lock of the run."""

    def __init__(
        self,
        run: Run | Path,
        *,
        flush_seconds: float = 1.0,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the log to append events. `clock` provides their times; the monotonic `stopwatch` times the flushes."""
        folder = run_folder(run)
        # Truncate the torn last line of a killed process, and index entries that do not match the log.
        layout = read_log_layout(folder)
        self.path = folder / EVENTS_FILE
        self._events = AppendOnlyFile(folder / EVENTS_FILE, keep_bytes=layout.end)
        try:
            self._index = AppendOnlyFile(folder / INDEX_FILE, keep_bytes=layout.index_bytes)
        except BaseException:
            self._events.close()
            raise
        # The index is new or was entirely invalid, so start it with the header.
        if layout.index_bytes == 0:
            self._index.add(INDEX_HEADER)
        # Add the blocks that the index lacks, for example after a kill.
        for block in layout.blocks[layout.num_indexed :]:
            self._index.add(encode_entry(block))
        self._block = BlockBuilder(layout.end)
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._stopwatch = stopwatch
        self._flushed_at = stopwatch()

    def append(self, kind: str, /, *, step: int, **fields: Any) -> None:
        """Add an event. If writing fails, an error is raised, but the event is kept and written later."""
        if kind not in EVENT_KINDS:
            hint = closest_match(kind, EVENT_KINDS) or ", ".join(sorted(EVENT_KINDS))
            raise WhetError("unknown kind of event", got=kind, try_=hint)
        if not RESERVED_FIELDS.isdisjoint(fields):
            raise ValueError(f"reserved field names: {sorted(RESERVED_FIELDS & fields.keys())}")
        record = {"kind": kind, "time": self._clock(), "step": step, **fields}
        try:
            # Use the fast encoder for steps: there are many of them, and the training loop controls their content.
            line = strict_json.encode_fast(record) if kind == "step" else strict_json.encode_compact(record).encode()
        except (ValueError, TypeError):
            record, line = _encode_unusual(record)
            fields = {name: record[name] for name in fields}
        # Start a new block for each session, so that a resume can supersede earlier blocks as a whole.
        if kind in SESSION_START_KINDS or self._block.is_full:
            self._close_block()
        self._block.add(kind, record["time"], record["step"], fields)
        self._events.add(line + b"\n")
        if kind != "step" or self._stopwatch() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Write all events so far, so that other processes can see them and they survive this process."""
        # Set the time even if the write fails, so that writing to a full disk is tried once a second, not in every
        # step.
        self._flushed_at = self._stopwatch()
        # Write the events first, because an index entry must never point to missing bytes.
        self._events.flush()
        self._index.flush()

    def sync(self) -> None:
        """Make all events so far survive a power cut. This takes milliseconds, so call it only with a checkpoint."""
        self._events.sync()

    def fsync(self) -> None:
        """Make flushed events durable together with the checkpoint that is written next. Thread-safe."""
        self._events.fsync()

    def close(self) -> None:
        """Write, sync and close the log. Closing twice is allowed."""
        self._close_block()
        with contextlib.ExitStack() as stack:
            stack.callback(self._index.close)  # Close it last: the index must not list events that are not on disk.
            self._events.close()

    def _close_block(self) -> None:
        if self._block.count:
            self._index.add(encode_entry(self._block.build(self._events.size)))
            self._block = BlockBuilder(self._events.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class History:
    """The events of a run up to the moment of opening, without superseded events.

    If the index is missing or outdated, the events themselves are read.
    """

    def __init__(self, run: Run | Path) -> None:
        self._path = run_folder(run) / EVENTS_FILE
        self._set_layout(read_log_layout(run_folder(run)))

    def _set_layout(self, layout: LogLayout) -> None:
        self.layout = layout
        self.damaged = sum(block.damaged for block in layout.blocks)
        """Number of lines that are not events. They are skipped."""
        self.curve_cache: dict[tuple[str, str], Any] = {}
        """Cached tables of run.downsample."""
        self._superseded_above = _superseded_limits(layout.blocks)
        self._trimmed: dict[int, EventBlock] = {}

    def __iter__(self) -> Iterator[Event]:
        return self.events()

    def events(self, *, kinds: Collection[str] | None = None, from_step: int | None = None) -> Iterator[Event]:
        """Yield events in the order in which they were written, optionally only some kinds, or from a step on."""
        positions = [
            position
            for position in self._positions(kinds)
            if from_step is None or self.layout.blocks[position].greatest_step >= from_step
        ]
        for event in self._read(positions, kinds=kinds):
            if from_step is None or event.step >= from_step:
                yield event

    def backwards(self, *, kinds: Collection[str] | None = None) -> Iterator[Event]:
        """Yield events, newest first, optionally only some kinds."""
        for position in reversed(self._positions(kinds)):
            yield from self._read([position], kinds=kinds, newest_first=True)

    def last(self, *kinds: str) -> Event | None:
        """Return the newest event of these kinds, or None if there is none."""
        return next(self.backwards(kinds=kinds), None)

    def valid_blocks(self) -> Iterator[EventBlock]:
        """Yield all blocks, each without its superseded events."""
        for position, block in enumerate(self.layout.blocks):
            if block.greatest_step <= self._superseded_above[position]:
                yield block
                continue
            if position not in self._trimmed:
                self._trimmed[position] = self._trim(position)
            if self._trimmed[position].kinds:
                yield self._trimmed[position]

    def step_blocks(self) -> Iterator[EventBlock]:
        """Yield the valid blocks that contain steps."""
        return (block for block in self.valid_blocks() if "step" in block.kinds)

    def read(self, block: EventBlock) -> Iterator[Event]:
        """Yield the valid events of a block of this history."""
        starts = [each.start for each in self.layout.blocks]
        return self._read([bisect_left(starts, block.start)], kinds=None)

    def _positions(self, kinds: Collection[str] | None) -> list[int]:
        """Return the positions of the blocks that contain events of these kinds; None means all blocks."""
        blocks = enumerate(self.layout.blocks)
        return [position for position, block in blocks if kinds is None or not block.kinds.keys().isdisjoint(kinds)]

    def _read(
        self, positions: list[int], *, kinds: Collection[str] | None, newest_first: bool = False
    ) -> Iterator[Event]:
        if not positions:
            return
        with open_regular_file(self._path) as file:
            for position in positions:
                block, limit = self.layout.blocks[position], self._superseded_above[position]
                for event in read_block(file, block, kinds=kinds, newest_first=newest_first):
                    if event.step <= limit or event.kind not in SUPERSEDED_KINDS:
                        yield event

    def _trim(self, position: int) -> EventBlock:
        """Return a block without its superseded events."""
        block = self.layout.blocks[position]
        is_all_superseded = block.least_step > self._superseded_above[position]
        # There may be thousands of fully superseded blocks, so read only the kinds of events that remain valid.
        kinds = block.kinds.keys() - SUPERSEDED_KINDS if is_all_superseded else None
        builder = BlockBuilder(block.start)
        for event in self._read([position], kinds=kinds) if kinds is None or kinds else ():
            builder.add(event.kind, event.time, event.step, event.fields)
        return builder.build(block.end)


def read_events(
    run: Run | Path, *, kinds: Collection[str] | None = None, from_step: int | None = None
) -> Iterator[Event]:
    """Yield the valid events of a run. Use `History` to also count damaged lines."""
    return History(run).events(kinds=kinds, from_step=from_step)


def _encode_unusual(record: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Convert a record with NaN or with number types of other libraries to Python types.

    Return it and its JSON line.
    """
    try:
        record = strict_json.to_plain(record)
    except TypeError as error:
        what = f"cannot write a {record['kind']} event"
        raise WhetError(what, got=str(error), try_="numbers, strings, lists and dicts of them") from None
    return record, strict_json.encode(record).encode()


def _superseded_limits(blocks: tuple[EventBlock, ...]) -> list[float]:
    """Return, for each block, the lowest step from which a later block resumes.

    Later steps in the block are superseded.
    """
    limits: list[float] = []
    # Go backward, so that each block sees the lowest resume of all later blocks.
    lowest = float("inf")
    for block in reversed(blocks):
        limits.append(lowest)
        if block.resumed_from is not None:
            lowest = min(lowest, block.resumed_from)
    return limits[::-1]
