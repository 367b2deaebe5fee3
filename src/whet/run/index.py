"""Where in a long events.jsonl is what?

The file is seen as blocks of up to 256 events. For each block `events.index` holds one line: where it lies, which kinds
and steps are in it, and of each number in its step events the count, least, greatest and sum. So a reader finds the few
happenings of a million steps, or draws their curve with every spike, without reading the million.

The index is a help, never the truth: a line counts only if its checksum holds, it follows on the one before and lies
inside the file. From the first that fails, and behind the last, the events themselves are read. A block never spans
the beginning of a sitting, so a `resume` is always the first event of its block.
"""

import json
import math
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO

from whet.base.errors import WhetError
from whet.run import strict_json
from whet.run.event import SITTINGS, Event, as_number, read_line
from whet.run.plain_file import open_plain, read_plain

BLOCK_EVENTS = 256
HEADER = b"whet events index 1\n"
_SPOT_CHECKS = 16
_LONGEST_LINE = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class Stat:
    """The finite values of one field in some events, and how many were not finite. No values: all zero."""

    count: int
    least: float
    greatest: float
    total: float
    nonfinite: int


class Counter:
    """Makes a Stat, one value or one Stat at a time."""

    __slots__ = ("_count", "_greatest", "_least", "_nonfinite", "_total")

    def __init__(self) -> None:
        self._count = self._nonfinite = 0
        self._least, self._greatest, self._total = math.inf, -math.inf, 0.0

    def add(self, value: float) -> None:
        """Counts a value."""
        if not math.isfinite(value):
            self._nonfinite += 1
            return
        self._count += 1
        self._total += value
        if value < self._least:
            self._least = value
        if value > self._greatest:
            self._greatest = value

    def merge(self, stat: Stat) -> None:
        """Counts all values of `stat`."""
        self._nonfinite += stat.nonfinite
        if stat.count:
            self._count += stat.count
            self._total += stat.total
            self._least = min(self._least, stat.least)
            self._greatest = max(self._greatest, stat.greatest)

    def stat(self) -> Stat:
        """What was counted."""
        if not self._count:
            return Stat(0, 0.0, 0.0, 0.0, self._nonfinite)
        # Finite numbers may add up to infinity, which the index could not hold.
        total = max(-sys.float_info.max, min(sys.float_info.max, self._total))
        return Stat(self._count, self._least, self._greatest, total, self._nonfinite)


@dataclass(frozen=True, slots=True)
class Block:
    """Some events that lie together in the file."""

    start: int
    end: int
    """The bytes [start, end) of events.jsonl; whole lines."""
    first_time: float
    last_time: float
    first_step: int
    """The step of its first event."""
    least_step: int
    greatest_step: int
    damaged: int
    """Lines that are no events."""
    resumed_from: int | None
    """The step of the `resume` event it begins with."""
    kinds: Mapping[str, int]
    """How many events of each kind."""
    stats: Mapping[str, Stat]
    """By field of its step events; a field of a map is named "seconds/data"."""


class Tally:
    """Counts the events of a block as they are written or read, then makes the block."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.count = 0
        self.damaged = 0
        self._kinds: dict[str, int] = {}
        self._stats: dict[str, Counter] = {}
        self._resumed_from: int | None = None
        self._first_time = self._last_time = 0.0
        self._first_step = self._least_step = self._greatest_step = 0

    def add(self, kind: str, *, time: float, step: int, fields: Mapping[str, Any]) -> None:
        """Counts one event."""
        if self.count == 0:
            self._first_time = time
            self._first_step = self._least_step = self._greatest_step = step
            self._resumed_from = step if kind == "resume" else None
        elif step > self._greatest_step:
            self._greatest_step = step
        elif step < self._least_step:
            self._least_step = step
        self.count += 1
        self._last_time = time
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        if kind == "step":
            for name, value in fields.items():
                if type(value) is float:
                    self._add_number(name, value)
                elif isinstance(value, dict):
                    for inner, item in value.items():
                        self._add_number(f"{name}/{inner}", as_number(item))
                else:
                    self._add_number(name, as_number(value))

    def _add_number(self, name: str, value: float | None) -> None:
        if value is None:
            return
        counter = self._stats.get(name)
        if counter is None:
            counter = self._stats[name] = Counter()
        counter.add(value)

    @property
    def is_full(self) -> bool:
        """Whether the block should end here."""
        return self.count + self.damaged >= BLOCK_EVENTS

    def block(self, end: int) -> Block:
        """The block up to byte `end`."""
        return Block(
            start=self.start,
            end=end,
            first_time=self._first_time,
            last_time=self._last_time,
            first_step=self._first_step,
            least_step=self._least_step,
            greatest_step=self._greatest_step,
            damaged=self.damaged,
            resumed_from=self._resumed_from,
            kinds=self._kinds,
            stats=self.stats(),
        )

    def stats(self) -> dict[str, Stat]:
        """What is known of each field so far."""
        return {name: s.stat() for name, s in self._stats.items()}


def write_entry(block: Block) -> bytes:
    """The line of events.index for a block."""
    body = strict_json.compact(
        {
            "bytes": [block.start, block.end],
            "times": [block.first_time, block.last_time],
            "steps": [block.first_step, block.least_step, block.greatest_step],
            "damaged": block.damaged,
            "resumed_from": block.resumed_from,
            "kinds": block.kinds,
            "stats": {n: [s.count, s.least, s.greatest, s.total, s.nonfinite] for n, s in block.stats.items()},
        }
    ).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_entry(line: bytes) -> Block | None:
    """The block of a line of events.index; None when the line is damaged."""
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:-1]) or line[-1:] != b"\n":
            return None
        entry = json.loads(line[9:])
        stats = {name: Stat(*values) for name, values in entry["stats"].items()}
        (start, end), (first_time, last_time) = entry["bytes"], entry["times"]
        first_step, least_step, greatest_step = entry["steps"]
        numbers = (start, end, first_step, least_step, greatest_step, entry["damaged"], *entry["kinds"].values())
        if any(type(number) is not int for number in numbers) or type(entry["resumed_from"]) not in (int, NoneType):
            return None
        values = (first_time, last_time, *(value for stat in stats.values() for value in astuple(stat)))
        if any(type(value) not in (int, float) for value in values):
            return None
        return Block(
            start=start,
            end=end,
            first_time=first_time,
            last_time=last_time,
            first_step=first_step,
            least_step=least_step,
            greatest_step=greatest_step,
            damaged=entry["damaged"],
            resumed_from=entry["resumed_from"],
            kinds=entry["kinds"],
            stats=stats,
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Layout:
    """All blocks of an events file, and how much of that was taken from the index."""

    blocks: tuple[Block, ...]
    end: int
    """Behind the last whole line; a torn one may follow."""
    torn_bytes: int
    index_bytes: int
    """How much of the index file is right (the rest should be cut off)."""
    num_indexed: int
    """How many of the blocks came from the index."""


def read_layout(events: Path, *, index: Path) -> Layout:
    """The blocks of an events file: from the index as far as it is right, by reading the events from there on."""
    entries = _entries(index)
    try:
        file = open_plain(events)
    except FileNotFoundError:
        return Layout(blocks=(), end=0, torn_bytes=0, index_bytes=0, num_indexed=0)
    with file:
        size = file.seek(0, 2)
        blocks, index_bytes = _trusted(entries, file=file, size=size)
        num_indexed = len(blocks)
        end = blocks[-1].end if blocks else 0
        for block in _scan(file, start=end, size=size):
            blocks.append(block)
            end = block.end
    return Layout(
        blocks=tuple(blocks), end=end, torn_bytes=size - end, index_bytes=index_bytes, num_indexed=num_indexed
    )


def _entries(index: Path) -> list[bytes]:
    """The lines of the index; none where it cannot be one."""
    try:
        return read_plain(index).splitlines(keepends=True)
    except (FileNotFoundError, ValueError, WhetError):
        return []


def read_block(file: BinaryIO, block: Block) -> Iterator[Event]:
    """The events of a block; damaged lines are passed over."""
    file.seek(block.start)
    for line in file.read(block.end - block.start).split(b"\n"):
        event = read_line(line) if line else None
        if event is not None:
            yield event


def _trusted(entries: list[bytes], *, file: BinaryIO, size: int) -> tuple[list[Block], int]:
    if not entries or entries[0] != HEADER:
        return [], 0
    blocks: list[Block] = []
    good_bytes, end = len(HEADER), 0
    for line in entries[1:]:
        block = read_entry(line)
        if block is None or block.start != end or not end < block.end <= size:
            break
        blocks.append(block)
        good_bytes += len(line)
        end = block.end
    # The events may have been replaced under an index that is right in itself.
    stride = max(1, len(blocks) // _SPOT_CHECKS)
    if all(_begins_as_told(file, block) for block in [*blocks[::stride], *blocks[-1:]]):
        return blocks, good_bytes
    return [], 0


def _begins_as_told(file: BinaryIO, block: Block) -> bool:
    file.seek(max(block.start - 1, 0))
    if block.start and file.read(1) != b"\n":
        return False
    first = read_line(file.readline(_LONGEST_LINE))
    if first is None:
        return block.damaged > 0
    file.seek(block.end - 1)
    begins = (first.time, first.step) == (block.first_time, block.first_step)
    return begins and file.read(1) == b"\n"


def _scan(file: BinaryIO, *, start: int, size: int) -> Iterator[Block]:
    file.seek(start)
    end = start
    tally = Tally(start)
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            got = f"over {_LONGEST_LINE:,} bytes without a line's end, from byte {end:,} on"
            raise WhetError("the log of the run is damaged", got=got, try_="restore events.jsonl from a copy")
        if not line.endswith(b"\n") or end + len(line) > size:
            break
        event = read_line(line)
        if tally.is_full or (event is not None and event.kind in SITTINGS and end > tally.start):
            yield tally.block(end)
            tally = Tally(end)
        end += len(line)
        if event is None:
            tally.damaged += 1
        else:
            tally.add(event.kind, time=event.time, step=event.step, fields=event.fields)
    if end > tally.start:
        yield tally.block(end)
