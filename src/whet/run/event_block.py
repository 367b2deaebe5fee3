"""Summary statistics of up to 256 consecutive events of events.jsonl."""

import math
import struct
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from whet.run.event import as_number, flatten_fields

# A trade-off: larger blocks make the index smaller, but curves coarser and lookups slower.
BLOCK_EVENTS = 256
# Kinds of events whose numeric fields are summarized.
SUMMARIZED_KINDS = ("step", "health", "eval")
# Per field of a block: count, minimum, maximum, sum and number of non-finite values, 8 bytes each.
STATS_PER_FIELD = 5


@dataclass(frozen=True, slots=True)
class FieldStats:
    """Statistics of the finite values of one field, and the number of non-finite values. All are 0 without values."""

    count: int
    least: float
    greatest: float
    total: float
    nonfinite: int


@dataclass(frozen=True, slots=True)
class EventBlock:
    """Up to 256 consecutive events of the file."""

    start: int
    end: int
    """End of the block, which covers the complete lines in the bytes [start, end) of events.jsonl."""
    first_time: float
    last_time: float
    first_step: int
    """Step of the first event."""
    least_step: int
    greatest_step: int
    damaged: int
    """Number of lines that are not events."""
    resumed_from: int | None
    """Step of the `resume` event at the start of the block; None if the block does not start with one."""
    kinds: Mapping[str, int]
    """Number of events by kind."""
    fields: tuple[str, ...]
    """Names of numeric fields, such as "step/loss", or "step/seconds/data" for an entry of a map."""
    numbers: bytes
    """Statistics of each field as five little-endian doubles."""

    @property
    def count(self) -> int:
        return sum(self.kinds.values()) + self.damaged

    def stat(self, field: str, *, kind: str = "step") -> FieldStats | None:
        """Return the statistics of one field, or None if no event in the block has it."""
        try:
            place = self.fields.index(f"{kind}/{field}")
        except ValueError:
            return None
        count, least, greatest, total, nonfinite = _STATS_STRUCT.unpack_from(self.numbers, place * _STATS_STRUCT.size)
        return FieldStats(int(count), least, greatest, total, int(nonfinite))


class BlockBuilder:
    """Collects events as they are written or read, and builds a block from them."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.count = 0
        self.damaged = 0
        self._kinds: dict[str, int] = {}
        self._columns: dict[str, defaultdict[str, list[Any]]] = {kind: defaultdict(list) for kind in SUMMARIZED_KINDS}
        self._resumed_from: int | None = None
        self._first_time = self._last_time = 0.0
        self._first_step = self._least_step = self._greatest_step = 0

    def add(self, kind: str, time: float, step: int, fields: Mapping[str, Any]) -> None:
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
        columns = self._columns.get(kind)
        if columns is not None:
            for name, value in flatten_fields(fields):
                columns[name].append(value)

    @property
    def is_full(self) -> bool:
        """Whether the block has reached its maximum number of events."""
        return self.count + self.damaged >= BLOCK_EVENTS

    def build(self, end: int) -> EventBlock:
        """Return the block of the collected events. It ends at byte `end` of the file."""
        counted = [
            (f"{kind}/{name}", stats)
            for kind, columns in self._columns.items()
            for name, values in columns.items()
            if (stats := _stats_of(values)) is not None
        ]
        return EventBlock(
            start=self.start,
            end=end,
            first_time=self._first_time,
            last_time=self._last_time,
            first_step=self._first_step,
            least_step=self._least_step,
            greatest_step=self._greatest_step,
            damaged=self.damaged,
            resumed_from=self._resumed_from,
            kinds=dict(self._kinds),
            fields=intern_fields(tuple(field for field, _ in counted)),
            numbers=b"".join(_STATS_STRUCT.pack(*stats) for _, stats in counted),
        )


@lru_cache(maxsize=4096)
def intern_fields(fields: tuple[str, ...]) -> tuple[str, ...]:
    """Return one shared object for equal tuples of names, because thousands of blocks have the same names."""
    return fields


_STATS_STRUCT = struct.Struct(f"<{STATS_PER_FIELD}d")


def _stats_of(values: list[Any]) -> tuple[float, float, float, float, float] | None:
    """Return count, minimum, maximum, sum and number of non-finite values, or None if there are no numbers."""
    if set(map(type, values)) != {float}:
        values = [number for value in values if (number := as_number(value)) is not None]
        if not values:
            return None
    try:
        total = math.fsum(values)
        if math.isfinite(total):
            return len(values), min(values), max(values), total, 0
    except (ValueError, OverflowError):
        pass  # Infinities of both signs, or the sum overflowed.
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0, 0.0, 0.0, 0.0, len(values)
    # The sum of finite numbers may be infinite.
    total = max(-sys.float_info.max, min(sys.float_info.max, sum(finite)))
    return len(finite), min(finite), max(finite), total, len(values) - len(finite)
