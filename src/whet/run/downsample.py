"""Curves of a few hundred points from millions of events, computed with numpy.

A table has one row per event for a short run, or one row per block for a long one. For each field, a row holds five
statistics: count, minimum, maximum, sum and the number of non-finite values. An event counts as a block of size one.
Rows of neighboring steps are merged into the points of a curve.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from whet.run.curve import Curve, CurvePoint
from whet.run.event import SESSION_START_KINDS, Event, as_number, flatten_fields
from whet.run.event_block import BLOCK_EVENTS, STATS_PER_FIELD, EventBlock
from whet.run.events import History

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Larger steps come from a damaged file. The limit also leaves room for int64 arithmetic.
_MAX_STEP = 2**62


class EventTable:
    """A table with one row per event of a single kind, in the order in which events were written. Rows can be added."""

    def __init__(self) -> None:
        # Arrays take 8 bytes per number, a list of Python floats about 32.
        self._steps, self._times = array("q"), array("d")
        # For each field, the indices of the rows that contain it, and their values.
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, event: Event) -> None:
        for name, value in flatten_fields(event.fields):
            number = value if type(value) is float else as_number(value)
            if number is not None:
                if name not in self._columns:
                    self._columns[name] = array("q"), array("d")
                rows, numbers = self._columns[name]
                rows.append(len(self._steps))
                numbers.append(number)
        self._steps.append(max(-_MAX_STEP, min(_MAX_STEP, event.step)))
        self._times.append(event.time)

    @property
    def steps(self) -> Integers:
        return np.array(self._steps, dtype=np.int64)

    @property
    def times(self) -> Floats:
        return np.array(self._times, dtype=np.float64)

    @property
    def samples(self) -> Floats:
        """The number of samples processed so far; NaN for rows without it."""
        stats = self.numbers("samples")
        return np.where(stats[:, 0] > 0, stats[:, 1], np.nan)

    @property
    def last_step(self) -> int:
        return max(self._steps, default=0)

    @property
    def fields(self) -> Collection[str]:
        return self._columns.keys()

    def numbers(self, field: str) -> Floats:
        """Return the five statistics of a field, (rows, 5)."""
        stats = np.zeros((len(self._steps), STATS_PER_FIELD))
        if field in self._columns:
            rows, values = (np.array(column) for column in self._columns[field])
            is_finite = np.isfinite(values)
            stats[rows, 0] = is_finite
            stats[rows, 1:4] = np.where(is_finite, values, 0.0)[:, None]
            stats[rows, 4] = ~is_finite
        return stats


class BlockTable:
    """A table with one row per block, where all blocks contain events of a single kind."""

    def __init__(self, blocks: Sequence[EventBlock], *, kind: str) -> None:
        self._kind = kind
        self.steps = np.array([max(-_MAX_STEP, min(_MAX_STEP, block.least_step)) for block in blocks], dtype=np.int64)
        self.times = np.array([block.first_time for block in blocks], dtype=np.float64)
        self.last_step = max((min(_MAX_STEP, block.greatest_step) for block in blocks), default=0)
        self._groups: dict[tuple[str, ...], tuple[Integers, Floats]] = {}
        rows: dict[tuple[str, ...], list[int]] = {}
        for row, block in enumerate(blocks):
            # Group blocks with the same fields, so that each group becomes one array without a Python loop.
            rows.setdefault(block.fields, []).append(row)
        for fields, places in rows.items():
            packed = b"".join([blocks[place].numbers for place in places])
            numbers = np.frombuffer(packed, dtype="<f8").reshape(len(places), len(fields), STATS_PER_FIELD)
            self._groups[fields] = np.array(places, dtype=np.int64), numbers

    @property
    def samples(self) -> Floats:
        # Prefer the samples of step events: like the step and the time of the row, they belong to the start of the
        # block.
        of_steps = self._gather("step/samples")
        stats = np.where(of_steps[:, :1] > 0, of_steps, self.numbers("samples"))
        return np.where(stats[:, 0] > 0, stats[:, 1], np.nan)

    @property
    def fields(self) -> Collection[str]:
        prefix = f"{self._kind}/"
        names = {name: None for fields in self._groups for name in fields if name.startswith(prefix)}
        return tuple(name.removeprefix(prefix) for name in names)

    def numbers(self, field: str) -> Floats:
        return self._gather(f"{self._kind}/{field}")

    def _gather(self, name: str) -> Floats:
        gathered = np.zeros((len(self.steps), STATS_PER_FIELD))
        for fields, (rows, numbers) in self._groups.items():
            if name in fields:
                gathered[rows] = numbers[:, fields.index(name)]
        return gathered


T = TypeVar("T")
ColumnTable = EventTable | BlockTable
# A larger number of samples indicates a damaged file and has no exact float representation.
_MAX_SAMPLES = 2**53
# If there are more events than this (apart from steps), and enough blocks, use one row per block instead of reading the
# events.
_MAX_EVENTS_READ = 4_096


def bucket_curves(
    history: History, *, kind: str, points: int, is_growing: bool = False, field: str | None = None
) -> Iterator[Curve]:
    """Yield the curves of one kind of event, or only the curve of one field (see whet.run.curve)."""
    table = _column_table(history, kind=kind, points=points)
    fields = [name for name in table.fields if field in (None, name)]
    if fields:
        rows = _BucketedRows.of(table, history=history, points=points, is_growing=is_growing)
        for name in fields:
            yield rows.curve(table.numbers(name), field=name, kind=kind)


def training_seconds(history: History, times: Floats) -> Floats:
    """Convert unix seconds to training seconds, which exclude the time between sessions."""
    begins, before = _cached(history, "sessions", lambda: _session_starts(history))
    # Treat times before the first session as the start of that session.
    session: Integers = np.maximum(np.searchsorted(begins, times, side="right") - 1, 0)
    elapsed: Floats = before[session] + np.maximum(times - begins[session], 0.0)
    return elapsed


def _session_starts(history: History) -> tuple[Floats, Floats]:
    """Return the start time of each session, and the training seconds before it."""
    begins: list[float] = []
    before: list[float] = []
    done, last = 0.0, 0.0
    for block in history.layout.blocks:
        if block.kinds and (not begins or not SESSION_START_KINDS.isdisjoint(block.kinds)):
            done += max(0.0, last - begins[-1]) if begins else 0.0
            # Session starts must not decrease, even if the clock was set back.
            begins.append(max(block.first_time, begins[-1] if begins else block.first_time))
            before.append(done)
        last = block.last_time if block.kinds else last
    return np.array(begins), np.array(before)


def _cached(history: History, name: str, make: Callable[[], T]) -> T:
    """Return a value cached with the history. It is computed again after the history has grown."""
    key = name, "blocks"
    if key not in history.curve_cache:
        history.curve_cache[key] = make()
    value: T = history.curve_cache[key]
    return value


@dataclass(frozen=True, slots=True)
class _BucketedRows:
    """The rows of a table sorted by step, with their x positions and the indices of their points."""

    order: Integers
    steps: Integers
    times: Floats
    elapsed: Floats
    samples: Floats
    bucket: Integers
    last_step: int

    @classmethod
    def of(cls, table: ColumnTable, *, history: History, points: int, is_growing: bool) -> Self:
        # Sort by step, because rows are in writing order: steps repeat after a resume, and blocks overlap.
        order = np.argsort(table.steps, kind="stable")
        steps, times, last = table.steps[order], table.times[order], table.last_step
        first = int(steps[0])
        width = max(1, -(-(last - first + 1) // points))  # The number of steps per point, rounded up.
        if is_growing:
            # Use powers of two, counted from step 0, so that points keep their positions until the width doubles.
            width = 1 << (width - 1).bit_length()
            while last // width - first // width >= points:
                width *= 2
            first = 0
        samples = _fill_samples(table.samples[order], steps, history=history, points=points)
        elapsed = training_seconds(history, times)
        return cls(order, steps, times, elapsed, samples, (steps - first) // width, last)

    def curve(self, numbers: Floats, *, field: str, kind: str) -> Curve:
        """Return the curve of one field. Rows without the field are left out."""
        numbers = numbers[self.order]
        # Columns: count, minimum, maximum, sum, number of non-finite values.
        there = np.flatnonzero((numbers[:, 0] > 0) | (numbers[:, 4] > 0))
        numbers, bucket = numbers[there], self.bucket[there]
        # Rows are sorted by step, so each bucket is a slice. `starts` holds the first row of each bucket.
        starts = np.concatenate(([0], np.flatnonzero(np.diff(bucket)) + 1))
        count = np.add.reduceat(numbers[:, 0], starts)
        nonfinite = np.add.reduceat(numbers[:, 4], starts)
        has_values = numbers[:, 0] > 0
        # Replace missing values with infinities, which are never the minimum or maximum; buckets without values are
        # masked below.
        low = np.minimum.reduceat(np.where(has_values, numbers[:, 1], np.inf), starts)
        high = np.maximum.reduceat(np.where(has_values, numbers[:, 2], -np.inf), starts)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            mean = np.add.reduceat(numbers[:, 3], starts) / count
        mean = np.clip(mean, low, high)  # Rounding may put the mean just outside these bounds.
        firsts = there[starts]
        is_empty = count == 0
        points = zip(
            self.steps[firsts].tolist(),
            _known_values(low, is_empty),
            _known_values(high, is_empty),
            _known_values(mean, is_empty),
            nonfinite.astype(np.int64).tolist(),
            self.times[firsts].tolist(),
            self.elapsed[firsts].tolist(),
            _known_values(np.rint(self.samples[firsts]), ~(np.abs(self.samples[firsts]) < _MAX_SAMPLES)),
            strict=True,
        )
        made = tuple(CurvePoint(*point) for point in points)
        return Curve(field=field, kind=kind, points=made, last_step=self.last_step)


def _column_table(history: History, *, kind: str, points: int) -> ColumnTable:
    """Return a table with one row per event, or one row per block if there are too many events.

    The table is cached with the history.
    """
    counted = _cached(history, "counted", lambda: [*history.valid_blocks()])
    blocks = [block for block in counted if kind in block.kinds]
    most = points * BLOCK_EVENTS if kind == "step" else _MAX_EVENTS_READ
    # One row per block is enough if there are more blocks than points. Reading the events would take seconds.
    is_long = len(blocks) > points and sum(block.kinds[kind] for block in blocks) > most
    key = kind, "blocks" if is_long else "events"
    if is_long:
        # The run now has too many events for this table, so free its memory.
        history.curve_cache.pop((kind, "events"), None)
    if key not in history.curve_cache:
        history.curve_cache[key] = BlockTable(blocks, kind=kind) if is_long else _event_table(history, kind=kind)
    table: ColumnTable = history.curve_cache[key]
    return table


def _event_table(history: History, *, kind: str) -> EventTable:
    table = EventTable()
    for event in history.events(kinds=(kind,)):
        table.add(event)
    return table


def _fill_samples(samples: Floats, steps: Integers, *, history: History, points: int) -> Floats:
    """Fill in missing sample counts by interpolating between neighboring steps."""
    is_open = np.isnan(samples)
    if not is_open.any():
        return samples
    table = _column_table(history, kind="step", points=points)
    known = np.isfinite(table.samples)
    if not known.any():
        return samples
    return np.where(is_open, np.interp(steps, table.steps[known], table.samples[known]), samples)


def _known_values(values: Floats, is_unknown: NDArray[np.bool_]) -> list[float | None]:
    return [None if unknown else value for value, unknown in zip(values.tolist(), is_unknown.tolist(), strict=True)]
