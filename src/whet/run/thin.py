"""What does the curve of a million steps look like in a few hundred points, without losing a spike?"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from whet.base.record import Record
from whet.run.event import as_number
from whet.run.events import History
from whet.run.folder import Run
from whet.run.index import BLOCK_EVENTS, Block, Counter, Stat


class CurvePoint(Record):
    """Some neighbouring steps as one point of a curve."""

    step: int
    """The first of the steps."""
    low: float | None
    high: float | None
    mean: float | None
    """Of the finite values; None when there are none."""
    nonfinite: int = 0
    """How many values were NaN or infinite."""


class Curve(Record):
    """One field of the step events over the steps."""

    field: str
    points: tuple[CurvePoint, ...]
    last_step: int


def thin_curve(run: Run | Path | History, *, field: str, points: int) -> Curve:
    """The curve of a field in at most `points` points, each with the least and greatest value of its steps.

    `field` is a name, or "seconds/data" for a name in a map. Long runs are drawn from the index alone.
    """
    history = run if isinstance(run, History) else History(run)
    blocks = [block for block in history.step_blocks() if field in block.stats]
    values: list[tuple[int, Stat | float]]
    if sum(block.stats[field].count for block in blocks) > points * BLOCK_EVENTS:
        values = list(_by_block(blocks, field=field))
        first, last = blocks[0].least_step, blocks[-1].greatest_step
    else:
        values = list(_by_step(history, field=field)) if blocks else []
        first, last = (values[0][0], values[-1][0]) if values else (0, 0)
    width = max(1, -(-(last - first + 1) // points))
    buckets: dict[int, Counter] = {}
    for step, value in values:
        bucket = buckets.setdefault((step - first) // width, Counter())
        if isinstance(value, Stat):
            bucket.merge(value)
        else:
            bucket.add(value)
    thinned = (_point(first + key * width, counter.stat()) for key, counter in sorted(buckets.items()))
    return Curve(field=field, points=tuple(thinned), last_step=last)


def _by_block(blocks: Iterable[Block], *, field: str) -> Iterator[tuple[int, Stat]]:
    for block in blocks:
        yield (block.least_step + block.greatest_step) // 2, block.stats[field]


def _by_step(history: History, *, field: str) -> Iterator[tuple[int, float]]:
    name, _, inner = field.partition("/")
    for event in history.events(kinds=("step",)):
        value = event.get(field)
        if value is None and isinstance(outer := event.get(name), dict):
            value = outer.get(inner)
        number = as_number(value)
        if number is not None:
            yield event.step, number


def _point(step: int, stat: Stat) -> CurvePoint:
    if not stat.count:
        return CurvePoint(step=step, low=None, high=None, mean=None, nonfinite=stat.nonfinite)
    mean = min(max(stat.total / stat.count, stat.least), stat.greatest)
    return CurvePoint(step=step, low=stat.least, high=stat.greatest, mean=mean, nonfinite=stat.nonfinite)
