"""Which events of a run become one point of a curve, and what does that point tell of them?"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from whet.run.columns import BlockTable, EventTable, Floats, Integers, JoinedTable, Table
from whet.run.event import SITTINGS
from whet.run.events import History
from whet.run.tally import BLOCK_EVENTS, Block
from whet.run.thin import Curve, CurvePoint

T = TypeVar("T")
_MOST_FRESH = 256
_MOST_SAMPLES = 2**53
"""A damaged log may tell of more; a number of samples that is not exact is none."""
_MOST_READ = 4_096
"""More events than this, of a kind that is no step, are not read one by one if their blocks are points enough."""


def curves_of(
    history: History, *, kind: str, points: int, is_growing: bool = False, field: str | None = None
) -> Iterator[Curve]:
    """The curves of one kind of events, or only that of a field; see whet.run.thin."""
    table = _table(history, kind=kind, points=points)
    fields = [name for name in table.fields if field in (None, name)]
    if fields:
        rows = _Rows.of(table, history=history, points=points, is_growing=is_growing)
        for name in fields:
            yield rows.curve(table.numbers(name), field=name, kind=kind)


def working_seconds(history: History, times: Floats) -> Floats:
    """From unix seconds to the seconds in which a process was at work until then."""
    begins, before = _kept(history, "sittings", lambda: _sittings(history))
    sitting: Integers = np.maximum(np.searchsorted(begins, times, side="right") - 1, 0)
    elapsed: Floats = before[sitting] + np.maximum(times - begins[sitting], 0.0)
    return elapsed


def _sittings(history: History) -> tuple[Floats, Floats]:
    """When each sitting began, and how long others had worked before."""
    begins: list[float] = []
    before: list[float] = []
    done, last = 0.0, 0.0
    for block in history.layout.blocks:
        if block.kinds and (not begins or not SITTINGS.isdisjoint(block.kinds)):
            done += max(0.0, last - begins[-1]) if begins else 0.0
            # The clock may have been set back in between.
            begins.append(max(block.first_time, begins[-1] if begins else block.first_time))
            before.append(done)
        last = block.last_time if block.kinds else last
    return np.array(begins), np.array(before)


def _kept(history: History, name: str, make: Callable[[], T]) -> T:
    """Made once for a history, until it grows."""
    key = name, "blocks"
    if key not in history.tables:
        history.tables[key] = make()
    kept: T = history.tables[key]
    return kept


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a table by step, where each lies, and which belong to one point."""

    order: Integers
    steps: Integers
    times: Floats
    elapsed: Floats
    samples: Floats
    bucket: Integers
    last_step: int

    @classmethod
    def of(cls, table: Table, *, history: History, points: int, is_growing: bool) -> Self:
        order = np.argsort(table.steps, kind="stable")
        steps, times, last = table.steps[order], table.times[order], table.last_step
        first = int(steps[0])
        width = max(1, -(-(last - first + 1) // points))
        if is_growing:
            # Powers of two, counted from step 0: as long as it is the same width, the same points.
            width = 1 << (width - 1).bit_length()
            while last // width - first // width >= points:
                width *= 2
            first = 0
        samples = _filled(table.samples[order], steps, history=history, points=points)
        elapsed = working_seconds(history, times)
        return cls(order, steps, times, elapsed, samples, (steps - first) // width, last)

    def curve(self, numbers: Floats, *, field: str, kind: str) -> Curve:
        """The points of one field: rows that do not have it do not count."""
        numbers = numbers[self.order]
        there = np.flatnonzero((numbers[:, 0] > 0) | (numbers[:, 4] > 0))
        numbers, bucket = numbers[there], self.bucket[there]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(bucket)) + 1))
        count = np.add.reduceat(numbers[:, 0], starts)
        nonfinite = np.add.reduceat(numbers[:, 4], starts)
        has_values = numbers[:, 0] > 0
        low = np.minimum.reduceat(np.where(has_values, numbers[:, 1], np.inf), starts)
        high = np.maximum.reduceat(np.where(has_values, numbers[:, 2], -np.inf), starts)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            mean = np.add.reduceat(numbers[:, 3], starts) / count
        mean = np.clip(mean, low, high)
        firsts = there[starts]
        is_empty = count == 0
        points = zip(
            self.steps[firsts].tolist(),
            _known(low, is_empty),
            _known(high, is_empty),
            _known(mean, is_empty),
            nonfinite.astype(np.int64).tolist(),
            self.times[firsts].tolist(),
            self.elapsed[firsts].tolist(),
            _known(np.rint(self.samples[firsts]), ~(np.abs(self.samples[firsts]) < _MOST_SAMPLES)),
            strict=True,
        )
        made = [
            CurvePoint(step=s, low=lo, high=hi, mean=m, nonfinite=n, time=t, elapsed=e, samples=so_far)
            for s, lo, hi, m, n, t, e, so_far in points
        ]
        return Curve(field=field, kind=kind, points=tuple(made), last_step=self.last_step)


def _table(history: History, *, kind: str, points: int) -> Table:
    """Event by event, or block by block where those would be too many; made once for a history."""
    counted = _kept(history, "counted", lambda: [*history.counted_blocks()])
    blocks = [block for block in counted if kind in block.kinds]
    most = points * BLOCK_EVENTS if kind == "step" else _MOST_READ
    is_long = len(blocks) > points and sum(block.kinds[kind] for block in blocks) > most
    key = kind, "blocks" if is_long else "events"
    if is_long:
        history.tables.pop((kind, "events"), None)
    if key not in history.tables:
        history.tables[key] = _long_table(history, blocks, kind=kind) if is_long else _events(history, kind=kind)
    table: Table = history.tables[key]
    return table


def _long_table(history: History, blocks: list[Block], *, kind: str) -> Table:
    """All but the last blocks are the same when a run has grown, and are kept."""
    size, base = history.tables.get((kind, "base"), (0, None))
    if base is None or len(blocks) - size > _MOST_FRESH:
        # The last one may still grow.
        size = len(blocks) - 1
        base = BlockTable(blocks[:size], kind=kind)
        history.tables[kind, "base"] = size, base
    return JoinedTable(base, BlockTable(blocks[size:], kind=kind))


def _events(history: History, *, kind: str) -> EventTable:
    table = EventTable()
    for event in history.events(kinds=(kind,)):
        table.add(event)
    return table


def _filled(samples: Floats, steps: Integers, *, history: History, points: int) -> Floats:
    """Where rows do not tell how many samples there were, the steps around them do."""
    is_open = np.isnan(samples)
    if not is_open.any():
        return samples
    told = _table(history, kind="step", points=points)
    known = np.isfinite(told.samples)
    if not known.any():
        return samples
    return np.where(is_open, np.interp(steps, told.steps[known], told.samples[known]), samples)


def _known(values: Floats, is_unknown: NDArray[np.bool_]) -> list[float | None]:
    return [None if unknown else value for value, unknown in zip(values.tolist(), is_unknown.tolist(), strict=True)]
