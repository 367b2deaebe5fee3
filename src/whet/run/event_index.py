"""The index of events.jsonl: positions of events, and statistics of their numbers.

The file is divided into blocks of up to 256 events. For each block `events.index` has one line with its position, its
kinds and steps, the positions of its events other than steps, and count, minimum, maximum and sum of each number in
its step, health and eval events. A reader can find a few incidents among a million steps, or draw the curve with
every spike, without reading all steps.

The index is only a cache. A line is valid if its checksum is correct, it continues the previous line, and it lies
inside the file. From the first invalid line on, and after the last line, the events are read instead. A block never
spans the start of a session, so a `resume` is always the first event of its block.

A reader must not write into a run folder. If it had to read a long log without an index, it caches the blocks under
WHET_HOME. This cache is validated like the index.
"""

import binascii
import contextlib
import hashlib
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import BinaryIO

from pydantic_core import from_json

from whet.base.env import home
from whet.base.errors import WhetError
from whet.run import durable, strict_json
from whet.run.disk import open_regular_file
from whet.run.event import SESSION_START_KINDS, Event, parse_event, parse_event_fields
from whet.run.event_block import STATS_PER_FIELD, BlockBuilder, EventBlock, intern_fields
from whet.run.folder import EVENTS_FILE, INDEX_FILE

# An index with another header is ignored.
INDEX_HEADER = b"whet events index 2\n"
# Reading fewer bytes of events takes less than a second, so they need no index.
LONG_BYTES = 32 * 1024**2
# Callback that gets the number of bytes read and the total.
ScanProgress = Callable[[int, int], None]

# Number of blocks that are compared with the events before an index is trusted.
_SPOT_CHECKS = 16
# A longer line means damage. The limit bounds the memory for reading an untrusted file.
_MAX_LINE_BYTES = 16 * 1024**2
_PROGRESS_BYTES = 4 * 1024**2
# Size of all cached indexes together. The oldest are removed first.
_MAX_CACHE_BYTES = 256 * 1024**2
_CACHE_NAME = re.compile(r"[0-9a-f]{64}\.index")


@dataclass(frozen=True, slots=True)
class LogLayout:
    """All blocks of an events file, and the part of them that came from the index."""

    blocks: tuple[EventBlock, ...]
    end: int
    """Position after the last complete line. A torn line may follow."""
    torn_bytes: int
    index_bytes: int
    """Valid bytes of the index file. The rest should be truncated."""
    num_indexed: int
    """Number of blocks that came from the index."""
    read_bytes: int = 0
    """Bytes of events that were read because the index did not cover them."""


def read_log_layout(folder: Path, *, progress: ScanProgress | None = None) -> LogLayout:
    """Return the blocks of the events in a run folder, from the valid part of the index and from the events."""
    events = folder / EVENTS_FILE
    try:
        file = open_regular_file(events)
    except FileNotFoundError:
        return LogLayout(blocks=(), end=0, torn_bytes=0, index_bytes=0, num_indexed=0)
    with file:
        size = file.seek(0, 2)
        blocks, index_bytes = read_trusted_entries(folder / INDEX_FILE, file=file, size=size)
        num_indexed, known = len(blocks), blocks[-1].end if blocks else 0
        if size - known >= LONG_BYTES and (path := cached_index_path(events)) is not None:
            cached, _ = read_trusted_entries(path, file=file, size=size)
            if cached and cached[-1].end > known:
                blocks, index_bytes, num_indexed, known = cached, 0, 0, cached[-1].end
        blocks += scan_blocks(file, start=known, size=size, progress=progress)
    end = blocks[-1].end if blocks else 0
    # Only a long scan is worth caching.
    if end - known >= LONG_BYTES:
        _cache_index(events, blocks[:-1])  # The last block may still grow.
    return LogLayout(
        blocks=tuple(blocks),
        end=end,
        torn_bytes=size - end,
        index_bytes=index_bytes,
        num_indexed=num_indexed,
        read_bytes=end - known,
    )


def encode_entry(block: EventBlock) -> bytes:
    """Return the line of events.index for a block."""
    body = strict_json.encode_compact(
        {
            "bytes": [block.start, block.end],
            "times": [block.first_time, block.last_time],
            "steps": [block.first_step, block.least_step, block.greatest_step],
            "damaged": block.damaged,
            "resumed_from": block.resumed_from,
            "kinds": block.kinds,
            "places": block.places,
            "fields": block.fields,
            # Use base64, because parsing decimal numbers would dominate the time to open a long run.
            "numbers": binascii.b2a_base64(block.numbers, newline=False).decode(),
        }
    ).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode_entry(line: bytes) -> EventBlock | None:
    """Return the block of a line of events.index, or None if the line is damaged."""
    try:
        # The checksum detects torn lines. All fields are validated below, because the file may be untrusted.
        if int(line[:8], 16) != zlib.crc32(line[9:-1]) or line[-1:] != b"\n":
            return None
        entry = from_json(line[9:])
        (start, end), (first_time, last_time) = entry["bytes"], entry["times"]
        first_step, least_step, greatest_step = entry["steps"]
        fields, numbers = tuple(entry["fields"]), binascii.a2b_base64(entry["numbers"])
        places = tuple([(str(kind), offset, length) for kind, offset, length in entry["places"]])
        integers = (start, end, first_step, least_step, greatest_step, entry["damaged"], *entry["kinds"].values())
        integers += tuple([number for _, *span in places for number in span])
        if set(map(type, integers)) != {int} or type(entry["resumed_from"]) not in (int, NoneType):
            return None
        if not {type(first_time), type(last_time)} <= {int, float}:
            return None
        if len(numbers) != 8 * STATS_PER_FIELD * len(fields):
            return None
        return EventBlock(
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
            places=places,
            fields=intern_fields(fields),
            numbers=numbers,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_block(file: BinaryIO, block: EventBlock, *, newest_first: bool = False) -> Iterator[Event]:
    """Yield the events of a block, parsed on demand. Damaged lines are skipped."""
    file.seek(block.start)
    lines = file.read(block.end - block.start).split(b"\n")
    for line in reversed(lines) if newest_first else lines:
        event = parse_event(line) if line else None
        if event is not None:
            yield event


def read_non_steps(
    file: BinaryIO, block: EventBlock, *, kinds: Collection[str], newest_first: bool = False
) -> Iterator[Event]:
    """Yield the events of these kinds in a block, without parsing the steps between them. `kinds` excludes steps."""
    wanted = [place for place in block.places if place[0] in kinds]
    if not wanted:
        return
    first, end = wanted[0][1], wanted[-1][1] + wanted[-1][2]
    file.seek(block.start + first)
    data = file.read(end - first)
    events = [parse_event(data[start - first : start - first + length]) for _, start, length in wanted]
    if any(event is None or event.kind != kind for event, (kind, _, _) in zip(events, wanted, strict=True)):
        # The file was modified, so read all lines that are still events.
        events = [event for event in read_block(file, block) if event.kind in kinds]
    for event in reversed(events) if newest_first else events:
        if event is not None:
            yield event


def read_trusted_entries(index: Path, *, file: BinaryIO, size: int) -> tuple[list[EventBlock], int]:
    """Return the blocks of an index that match an events file of this size, and their bytes in the index."""
    blocks: list[EventBlock] = []
    valid_bytes, end = len(INDEX_HEADER), 0
    try:
        with open_regular_file(index) as lines:
            if lines.readline(len(INDEX_HEADER)) != INDEX_HEADER:
                return [], 0
            while line := lines.readline(_MAX_LINE_BYTES):
                block = decode_entry(line)
                if block is None or block.start != end or not end < block.end <= size:
                    break
                blocks.append(block)
                valid_bytes += len(line)
                end = block.end
    except (OSError, WhetError):
        return [], 0
    # Compare some blocks with the events, because events.jsonl may have been replaced without its index.
    stride = max(1, len(blocks) // _SPOT_CHECKS)
    if all(_matches_log(file, block) for block in [*blocks[::stride], *blocks[-1:]]):
        return blocks, valid_bytes
    return [], 0


def scan_blocks(file: BinaryIO, *, start: int, size: int, progress: ScanProgress | None = None) -> Iterator[EventBlock]:
    """Yield the blocks of the complete lines in the bytes [start, size) of an events file."""
    file.seek(start)
    end = reported = start
    builder = BlockBuilder(start)
    while line := file.readline(_MAX_LINE_BYTES):
        if line[-1:] != b"\n":
            if len(line) == _MAX_LINE_BYTES:
                got = f"over {_MAX_LINE_BYTES:,} bytes without a line end, from byte {end:,} on"
                raise WhetError("the log of the run is damaged", got=got, try_="restore events.jsonl from a copy")
            break
        # Ignore lines that were appended after `size` was read.
        if end + len(line) > size:
            break
        parts = parse_event_fields(line)
        if builder.is_full or (parts is not None and parts[0] in SESSION_START_KINDS and end > builder.start):
            yield builder.build(end)
            builder = BlockBuilder(end)
            if progress is not None and end - reported >= _PROGRESS_BYTES:
                reported = end
                progress(end, size)
        if parts is None:
            builder.damaged += 1
        else:
            builder.add(*parts, start=end, length=len(line))
        end += len(line)
    if end > builder.start:
        yield builder.build(end)
    if progress is not None and end > start:
        progress(end, size)


def cached_index_path(events: Path) -> Path | None:
    """Return the path of the cached index of an events file, or None if the user has no home folder."""
    with contextlib.suppress(OSError, RuntimeError):
        return home() / "indexes" / f"{hashlib.sha256(str(events.resolve()).encode()).hexdigest()}.index"
    return None


def _cache_index(events: Path, blocks: Iterable[EventBlock]) -> None:
    """Cache the blocks of an events file. Failures are ignored."""
    path = cached_index_path(events)
    if path is None:
        return
    with contextlib.suppress(OSError, WhetError):
        durable.make_directory(path.parent)
        durable.write_file(path, data=b"".join([INDEX_HEADER, *map(encode_entry, blocks)]))
        _evict(path.parent, keep=path)


def _evict(folder: Path, *, keep: Path) -> None:
    """Remove the oldest cached indexes. Files with other names are kept."""
    paths = [path for path in folder.iterdir() if _CACHE_NAME.fullmatch(path.name) and path != keep]
    left = _MAX_CACHE_BYTES - keep.stat().st_size
    for path in sorted(paths, key=lambda path: path.lstat().st_mtime, reverse=True):
        left -= path.lstat().st_size
        if left < 0:
            path.unlink(missing_ok=True)


def _matches_log(file: BinaryIO, block: EventBlock) -> bool:
    file.seek(max(block.start - 1, 0))
    if block.start and file.read(1) != b"\n":
        return False
    first = parse_event(file.readline(_MAX_LINE_BYTES))
    if first is None:
        # A block may begin with a damaged line, but only if the index has counted it.
        return block.damaged > 0
    file.seek(block.end - 1)
    is_same_start = (first.time, first.step) == (block.first_time, block.first_step)
    return is_same_start and file.read(1) == b"\n"
