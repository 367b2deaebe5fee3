"""What do the curves of a million steps look like in a few hundred points each, without losing a spike?

A curve belongs to a field of one kind of event and is named by both: "step/loss", "step/seconds/data",
"health/memory/process", "eval/accuracy". Each point tells of neighbouring steps the least, the greatest and the mean
value, and where its first step lies on three axes: `step`, `samples` and time (`time` in unix seconds, and `elapsed`,
the seconds in which a process was at work), so that runs can be laid over each other by any of them.

    history = History(run)
    thin_curves(history, points=400)["step/loss"].points[0].samples
    thin_curve(history, field="memory/process", kind="health", points=400)
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.base.record import Record
from whet.run.event import SITTINGS, Event, as_number
from whet.run.events import History
from whet.run.folder import Run
from whet.run.index import BLOCK_EVENTS, Counter, Stat

CURVE_KINDS = ("step", "health", "eval")
"""The kinds of events whose numbers make curves."""


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
    time: float | None = None
    """Unix seconds at the first of the steps."""
    elapsed: float | None = None
    """Seconds of work up to there: the pauses between sittings are left out."""
    samples: int | None = None
    """Samples up to there; None where the run does not tell."""


class Curve(Record):
    """One field of one kind of events over the steps."""

    field: str
    points: tuple[CurvePoint, ...]
    last_step: int
    kind: str = "step"

    @property
    def name(self) -> str:
        """Kind and field, such as "step/loss"."""
        return f"{self.kind}/{self.field}"


def thin_curves(
    run: Run | Path | History, *, points: int, kinds: Collection[str] = CURVE_KINDS, is_growing: bool = False
) -> dict[str, Curve]:
    """All curves of a run by name ("step/loss"), each in at most `points` points.

    With `is_growing`, points stay where they are while the run grows, until their number would exceed `points`; then
    each two become one. There are between half of `points` and `points` then, once there are so many values.
    """
    history = run if isinstance(run, History) else History(run)
    elapsed = working_time(history)
    rows: dict[tuple[str, str], list[tuple[Event, float, int | None]]] = {}
    samples: int | None = None
    for event in history.events(kinds={*kinds, "step"}):
        told = event.get("samples")
        samples = told if type(told) is int else samples
        if event.kind in kinds:
            for field, value in _numbers(event.fields):
                rows.setdefault((event.kind, field), []).append((event, value, samples))
    curves: dict[str, Curve] = {}
    for (kind, field), values in rows.items():
        first, last = min(row[0].step for row in values), max(row[0].step for row in values)
        width = max(1, -(-(last - first + 1) // points))
        if is_growing:
            first, width = 0, 1
            while last // width - values[0][0].step // width + 1 > points:
                width *= 2
        buckets: dict[int, tuple[Event, int | None, Counter]] = {}
        for event, value, so_far in sorted(values, key=lambda row: row[0].step):
            buckets.setdefault((event.step - first) // width, (event, so_far, Counter()))[2].add(value)
        thinned = tuple(_point(event, c.stat(), elapsed(event.time), so_far) for event, so_far, c in buckets.values())
        curves[f"{kind}/{field}"] = Curve(field=field, kind=kind, points=thinned, last_step=last)
    return curves


def thin_curve(run: Run | Path | History, *, field: str, points: int, kind: str = "step") -> Curve:
    """The curve of a field in at most `points` points, each with the least and greatest value of its steps.

    `field` is a name, or "seconds/data" for a name in a map. Long runs are drawn from the index alone.
    """
    history = run if isinstance(run, History) else History(run)
    blocks = [block for block in history.step_blocks() if field in block.stats] if kind == "step" else []
    if sum(block.stats[field].count for block in blocks) <= points * BLOCK_EVENTS:
        found = thin_curves(history, points=points, kinds=(kind,)).get(f"{kind}/{field}")
        return found or Curve(field=field, kind=kind, points=(), last_step=0)
    first, last = blocks[0].least_step, blocks[-1].greatest_step
    width = max(1, -(-(last - first + 1) // points))
    buckets: dict[int, Counter] = {}
    for block in blocks:
        middle = (block.least_step + block.greatest_step) // 2
        buckets.setdefault((middle - first) // width, Counter()).merge(block.stats[field])
    thinned = (_point(Event("step", 0.0, first + key * width), c.stat(), 0.0, None) for key, c in buckets.items())
    return Curve(field=field, points=tuple(thinned), last_step=last)


def working_time(history: History) -> Callable[[float], float]:
    """From unix seconds to the seconds in which a process was at work until then."""
    begins: list[float] = []
    before: list[float] = []
    done, last = 0.0, 0.0
    for block in history.layout.blocks:
        if not begins or not SITTINGS.isdisjoint(block.kinds):
            done += max(0.0, last - begins[-1]) if begins else 0.0
            begins.append(block.first_time)
            before.append(done)
        last = block.last_time

    def elapsed(time: float) -> float:
        sitting = max(0, bisect_right(begins, time) - 1)
        return before[sitting] + max(0.0, time - begins[sitting])

    return elapsed


def _numbers(fields: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        inner = {f"{name}/{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for field, item in inner.items():
            number = as_number(item)
            if number is not None:
                yield field, number


def _point(event: Event, stat: Stat, elapsed: float, samples: int | None) -> CurvePoint:
    x: dict[str, Any] = {"step": event.step, "time": event.time, "elapsed": elapsed, "samples": samples}
    if not stat.count:
        return CurvePoint(**x, low=None, high=None, mean=None, nonfinite=stat.nonfinite)
    mean = min(max(stat.total / stat.count, stat.least), stat.greatest)
    return CurvePoint(**x, low=stat.least, high=stat.greatest, mean=mean, nonfinite=stat.nonfinite)
