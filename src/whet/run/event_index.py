"""The index of events.jsonl: positions of events, and statistics of their numeric fields.

The file is divided into blocks of up to 256 events. For each block, `events.index` has one line with its position, its
kinds and steps, and the count, minimum, maximum and sum of each numeric field of its step, health and eval events. A
reader can find a few incidents among a million steps, or draw a curve with every spike, without reading all steps.

The index is only a cache. A line is valid if its checksum is correct, it continues the previous line, and its block
lies inside the file. From the first invalid line on, and after the last line, the events themselves are read. A block
never spans the start of a session, so a `resume` is always the first event of its block. Only the training process
writes the index: a reader must not write to a run folder.
"""

import binascii
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import BinaryIO

from pydantic_core import from_json

from whet.base.errors import WhetError
from whet.run import strict_json
from whet.run.disk import open_regular_file
from whet.run.event import SESSION_START_KINDS, Event, parse_event, parse_event_fields
from whet.run.event_block import STATS_PER_FIELD, BlockBuilder, EventBlock, intern_fields
from whet.run.folder import EVENTS_FILE, INDEX_FILE

# An index with a different header is ignored.
INDEX_HEADER = b"whet events index 3\n"

# Number of blocks that are compared with the events before an index is trusted.
_SPOT_CHECKS = 16
# A longer line indicates damage. The limit bounds the memory needed to read an untrusted file.
_MAX_LINE_BYTES = 16 * 1024**2
# The usual start of a line with a step. Steps with a different start are parsed and then skipped.
_STEP_START = b'{"kind":"step",'


@dataclass(frozen=True, slots=True)
class LogLayout:
    """All blocks of an events file, and the number of blocks that were read from the index."""

    blocks: tuple[EventBlock, ...]
    end: int
    """Position after the last complete line. A torn line may follow."""
    torn_bytes: int
    index_bytes: int
    """Number of valid bytes in the index file. The rest should be truncated."""
    num_indexed: int
    """Number of blocks that came from the index."""


def read_log_layout(folder: Path) -> LogLayout:
    """Return the blocks of events in a run folder, from the valid part of the index and the events after it."""
    try:
        file = open_regular_file(folder / EVENTS_FILE)
    except FileNotFoundError:
        return LogLayout(blocks=(), end=0, torn_bytes=0, index_bytes=0, num_indexed=0)
    with file:
        size = file.seek(0, 2)
        blocks, index_bytes = read_trusted_entries(folder / INDEX_FILE, file=file, size=size)
        num_indexed = len(blocks)
        blocks += scan_blocks(file, start=blocks[-1].end if blocks else 0, size=size)
    end = blocks[-1].end if blocks else 0
    return LogLayout(
        blocks=tuple(blocks), end=end, torn_bytes=size - end, index_bytes=index_bytes, num_indexed=num_indexed
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
        integers = (start, end, first_step, least_step, greatest_step, entry["damaged"], *entry["kinds"].values())
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
            fields=intern_fields(fields),
            numbers=numbers,
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def read_block(
    file: BinaryIO, block: EventBlock, *, kinds: Collection[str] | None = None, newest_first: bool = False
) -> Iterator[Event]:
    """Yield the events of a block, optionally only those of some kinds. Damaged lines are skipped."""
    file.seek(block.start)
    lines = file.read(block.end - block.start).split(b"\n")
    skips_steps = kinds is not None and "step" not in kinds
    for line in reversed(lines) if newest_first else lines:
        # Most lines are steps, and parsing them takes most of the time.
        if not line or (skips_steps and line.startswith(_STEP_START)):
            continue
        event = parse_event(line)
        if event is not None and (kinds is None or event.kind in kinds):
            yield event


def read_trusted_entries(index: Path, *, file: BinaryIO, size: int) -> tuple[list[EventBlock], int]:
    """Return the blocks of an index that match an events file of this size, and the bytes they take in the index."""
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


def scan_blocks(file: BinaryIO, *, start: int, size: int) -> Iterator[EventBlock]:
    """Yield the blocks of the complete lines in the bytes [start, size) of an events file."""
    file.seek(start)
    end = start
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
        if parts is None:
            builder.damaged += 1
        else:
            builder.add(*parts)
        end += len(line)
    if end > builder.start:
        yield builder.build(end)


def _matches_log(file: BinaryIO, block: EventBlock) -> bool:
    file.seek(max(block.start - 1, 0))
    if block.start and file.read(1) != b"\n":
        return False
    first = parse_event(file.readline(_MAX_LINE_BYTES))
    if first is None:
        # A block may start with a damaged line, but only if the index has counted it.
        return block.damaged > 0
    file.seek(block.end - 1)
    is_same_start = (first.time, first.step) == (block.first_time, block.first_step)
    return is_same_start and file.read(1) == b"\n"
