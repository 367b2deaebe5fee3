"""Summary statistics of up to 256 consecutive events of events.jsonl."""

import math
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from whet.run.event import as_number

BLOCK_EVENTS = 256
# The kinds whose numbers are summarized, field by field.
SUMMARIZED_KINDS = ("step", "health", "eval")
# Per field of a block: count, least, greatest, sum, and how many were not finite; 8 bytes each.
STATS_PER_FIELD = 5


@dataclass(frozen=True, slots=True)
class FieldStats:
    """Statistics of the finite values of one field, and how many were not finite; all zero without values."""

    count: int
    least: float
    greatest: float
    total: float
    nonfinite: int


class StatCounter:
    """Accumulates statistics of values, or of other statistics."""

    __slots__ = ("_count", "_greatest", "_least", "_nonfinite", "_total")

    def __init__(self) -> None:
        self._count = self._nonfinite = 0
        self._least, self._greatest, self._total = math.inf, -math.inf, 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        if not math.isfinite(value):
            self._nonfinite += 1
            return
        self._count += 1
        self._total += value
        self._least = min(self._least, value)
        self._greatest = max(self._greatest, value)

    def merge(self, stat: FieldStats) -> None:
        """Add all values behind `stat`."""
        self._nonfinite += stat.nonfinite
        if stat.count:
            self._count += stat.count
            self._total += stat.total
            self._least = min(self._least, stat.least)
            self._greatest = max(self._greatest, stat.greatest)

    def stat(self) -> FieldStats:
        """The statistics so far."""
        if not self._count:
            return FieldStats(0, 0.0, 0.0, 0.0, self._nonfinite)
        return FieldStats(self._count, self._least, self._greatest, _bounded(self._total), self._nonfinite)


@dataclass(frozen=True, slots=True)
class EventBlock:
    """Up to 256 consecutive events of the file."""

    start: int
    end: int
    """The bytes [start, end) of events.jsonl; complete lines."""
    first_time: float
    last_time: float
    first_step: int
    """The step of its first event."""
    least_step: int
    greatest_step: int
    damaged: int
    """Lines that are not events."""
    resumed_from: int | None
    """The step of the `resume` event it begins with."""
    kinds: Mapping[str, int]
    """How many events of each kind."""
    places: tuple[tuple[str, int, int], ...]
    """Positions of the events other than steps: kind, offset from `start`, and length."""
    fields: tuple[str, ...]
    """The fields with numbers, such as "step/loss"; a field of a map is named "step/seconds/data"."""
    numbers: bytes
    """Five little-endian doubles for each of the fields."""

    @property
    def count(self) -> int:
        """The number of lines."""
        return sum(self.kinds.values()) + self.damaged

    def stat(self, field: str, *, kind: str = "step") -> FieldStats | None:
        """Statistics of one field; None when no event here has it."""
        try:
            place = self.fields.index(f"{kind}/{field}")
        except ValueError:
            return None
        count, least, greatest, total, nonfinite = _STATS_STRUCT.unpack_from(self.numbers, place * _STATS_STRUCT.size)
        return FieldStats(int(count), least, greatest, total, int(nonfinite))


class BlockBuilder:
    """Collects the events of a block as they are written or read, then builds the block."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.count = 0
        self.damaged = 0
        self._kinds: dict[str, int] = {}
        self._places: list[tuple[str, int, int]] = []
        self._columns: dict[str, defaultdict[str, list[Any]]] = {kind: defaultdict(list) for kind in SUMMARIZED_KINDS}
        self._inner: dict[str, defaultdict[str, defaultdict[str, list[Any]]]] = {
            kind: defaultdict(lambda: defaultdict(list)) for kind in SUMMARIZED_KINDS
        }
        self._resumed_from: int | None = None
        self._first_time = self._last_time = 0.0
        self._first_step = self._least_step = self._greatest_step = 0

    def add(self, kind: str, time: float, step: int, fields: Mapping[str, Any], *, start: int, length: int) -> None:
        """Add the event at the bytes [start, start + length) of the file."""
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
        if kind != "step":
            self._places.append((kind, start - self.start, length))
        columns = self._columns.get(kind)
        if columns is not None:
            for name, value in fields.items():
                if type(value) is dict:
                    inner = self._inner[kind][name]
                    for key, item in value.items():
                        inner[key].append(item)
                else:
                    columns[name].append(value)

    @property
    def is_full(self) -> bool:
        """Whether the block should end here."""
        return self.count + self.damaged >= BLOCK_EVENTS

    def build(self, end: int) -> EventBlock:
        """The block up to byte `end`."""
        counted = [(field, stats) for field, values in self._all_columns() if (stats := _stats_of(values)) is not None]
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
            places=tuple(self._places),
            fields=intern_fields(tuple(field for field, _ in counted)),
            numbers=b"".join(_STATS_STRUCT.pack(*stats) for _, stats in counted),
        )

    def _all_columns(self) -> Iterator[tuple[str, list[Any]]]:
        for kind in SUMMARIZED_KINDS:
            outer, inner = self._columns[kind], self._inner[kind]
            named = {f"{kind}/{name}": values for name, values in outer.items()}
            for name, columns in inner.items():
                for key, values in columns.items():
                    # A name with a slash may equal the path of a value in a map.
                    field = f"{kind}/{name}/{key}"
                    named[field] = named.get(field, []) + values
            yield from named.items()


@lru_cache(maxsize=4096)
def intern_fields(fields: tuple[str, ...]) -> tuple[str, ...]:
    """One object for equal names: thousands of blocks have the same ones."""
    return fields


_STATS_STRUCT = struct.Struct(f"<{STATS_PER_FIELD}d")
_Stats = tuple[float, float, float, float, float]


def _stats_of(values: list[Any]) -> _Stats | None:
    """Count, least, greatest, sum and the number of non-finite values, of all numbers; None without numbers."""
    types = set(map(type, values))
    if types != _FLOATS:
        # Integers up to here convert to float without an overflow.
        is_whole = types == _WHOLE and max(values) < _LARGE and min(values) > -_LARGE
        values = [*map(float, values)] if is_whole else [*filter(_is_known, map(as_number, values))]
        if not values:
            return None
    try:
        total = math.fsum(values)
        if math.isfinite(total):
            return len(values), min(values), max(values), total, 0
    except (ValueError, OverflowError):
        pass  # Infinities of both signs, or a sum out of range.
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0, 0.0, 0.0, 0.0, len(values)
    # Finite numbers may add up to infinity.
    total = _bounded(sum(finite))
    return len(finite), min(finite), max(finite), total, len(values) - len(finite)


_FLOATS, _WHOLE = {float}, {int}
_LARGE = 2**1000


def _is_known(value: float | None) -> bool:
    return value is not None


def _bounded(total: float) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, total))
