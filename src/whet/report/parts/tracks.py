"""What do the numbers of a run look like over its steps, its seconds of work and its samples?

A track holds curves of events of one kind: they share the places where they were seen, so that a page can lay runs side
by side by any of the three. Long runs are drawn from the index of their log alone.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from whet.base.record import Record
from whet.report.parts.work_clock import WorkClock
from whet.run.event import Event, as_number
from whet.run.events import History
from whet.run.index import Counter, Stat

MOST_CURVES = 40
"""Of one track: an evaluation may return any number of numbers."""

Source = Literal["step", "eval", "epoch", "health"]
Unit = Literal["", "bytes", "samples/s", "percent"]

ASIDE = ("evaluate", "save")
"""Phases that are no part of an optimizer step."""


class Line(Record):
    """One curve of a track; None where there was no finite value."""

    name: str
    unit: Unit = ""
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    """The least and greatest of the values behind a point; None where each point is one value."""
    high: tuple[float | None, ...] | None = None
    nonfinite: int = 0
    """How many values were NaN or infinite."""


class Track(Record):
    """Curves that share their places."""

    source: Source
    step: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of work: the time between sittings does not count."""
    samples: tuple[int | None, ...]
    lines: tuple[Line, ...]

    def line(self, name: str) -> Line | None:
        """The curve of that name."""
        return next((line for line in self.lines if line.name == name), None)


def tracks(history: History, clock: WorkClock, *, points: int) -> tuple[Track, ...]:
    """The tracks of a run that have something to show, the optimizer steps first."""
    steps = _thinned(_of_steps(history, points=points), points=points)
    found = [_step_track(steps, clock)]
    seen_samples = [(place.step, place.samples) for place in steps if place.samples is not None]
    for source in ("eval", "health", "epoch"):
        events = _of_events(history.events(kinds=(source,)))
        places = _thinned(events, points=points)
        found.append(_track(source, places, clock, samples=_Interpolated(seen_samples)))
    return tuple(track for track in found if track.lines)


class _Sight(NamedTuple):
    """What one event says, or one block of them."""

    step: int
    time: float
    samples: int | None
    numbers: Iterable[tuple[str, float | Stat]]


class _Place:
    """Neighbouring events as one place of a track."""

    __slots__ = ("counters", "samples", "step", "time")

    def __init__(self) -> None:
        self.step, self.time = 0, 0.0
        self.samples: int | None = None
        self.counters: dict[str, Counter] = {}

    def take(self, sight: _Sight) -> None:
        """Takes in what comes right behind."""
        self.step, self.time = sight.step, sight.time
        if sight.samples is not None:
            self.samples = sight.samples
        for name, value in sight.numbers:
            counter = self.counters.get(name)
            if counter is None:
                counter = self.counters[name] = Counter()
            if isinstance(value, Stat):
                counter.merge(value)
            else:
                counter.add(value)

    def join(self, other: "_Place") -> None:
        """Takes in the place right behind."""
        stats = ((name, counter.stat()) for name, counter in other.counters.items())
        self.take(_Sight(other.step, other.time, other.samples, stats))

    def stat(self, name: str) -> Stat | None:
        counter = self.counters.get(name)
        return None if counter is None else counter.stat()


def _of_steps(history: History, *, points: int) -> Iterator[_Sight]:
    blocks = list(history.step_blocks())
    if len(blocks) <= points:
        yield from _of_events(history.events(kinds=("step",)))
        return
    for block in blocks:
        samples = block.stats.get("samples")
        seen = int(samples.greatest) if samples is not None and samples.count else None
        yield _Sight(block.greatest_step, block.last_time, seen, block.stats.items())


def _of_events(events: Iterable[Event]) -> Iterator[_Sight]:
    for event in events:
        samples = event.number("samples")
        seen = int(samples) if samples is not None and math.isfinite(samples) else None
        yield _Sight(event.step, event.time, seen, _numbers(event.fields))


def _numbers(fields: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            for inner, item in value.items():
                number = as_number(item)
                if number is not None:
                    yield f"{name}/{inner}", number
        elif (number := as_number(value)) is not None:
            yield name, number


def _thinned(sights: Iterable[_Sight], *, points: int) -> list[_Place]:
    """At most `points` places, each of as many neighbours as it takes."""
    kept: list[_Place] = []
    together, filled = 1, 1
    for sight in sights:
        if filled == together:
            kept.append(_Place())
            filled = 0
        kept[-1].take(sight)
        filled += 1
        if len(kept) > points:
            for left, right in zip(kept[::2], kept[1::2], strict=False):
                left.join(right)
            # The odd one out is the newest, and goes on being filled.
            filled += 0 if len(kept) % 2 else together
            kept, together = kept[::2], together * 2
    return kept


def _step_track(places: Sequence[_Place], clock: WorkClock) -> Track:
    samples = _Interpolated([(place.step, place.samples) for place in places if place.samples is not None])
    track = _track("step", places, clock, samples=samples, leave_out=("epoch", "samples"))
    speed = _speed(places)
    lines = tuple(line for line in track.lines if not line.name.startswith("seconds/"))
    return track.model_copy(update={"lines": (*lines, speed) if speed else lines})


def _track(
    source: Source,
    places: Sequence[_Place],
    clock: WorkClock,
    *,
    samples: "_Interpolated",
    leave_out: Sequence[str] = ("epoch", "samples"),
) -> Track:
    names = dict.fromkeys(name for place in places for name in place.counters if name not in leave_out)
    return Track(
        source=source,
        step=tuple(place.step for place in places),
        seconds=tuple(_short(clock.at(place.time)) or 0.0 for place in places),
        samples=tuple(place.samples if place.samples is not None else samples.at(place.step) for place in places),
        lines=tuple(_line(name, places) for name in list(names)[:MOST_CURVES]),
    )


def _line(name: str, places: Sequence[_Place]) -> Line:
    stats = [place.stat(name) for place in places]
    mean = tuple(_short(_mean(stat)) for stat in stats)
    is_single = all(stat is None or stat.count <= 1 for stat in stats)
    low = tuple(_short(stat.least) if stat is not None and stat.count else None for stat in stats)
    high = tuple(_short(stat.greatest) if stat is not None and stat.count else None for stat in stats)
    return Line(
        name=name,
        unit=_unit(name),
        mean=mean,
        low=None if is_single else low,
        high=None if is_single else high,
        nonfinite=sum(stat.nonfinite for stat in stats if stat is not None),
    )


def _mean(stat: Stat | None) -> float | None:
    if stat is None or not stat.count:
        return None
    return min(max(stat.total / stat.count, stat.least), stat.greatest)


def _speed(places: Sequence[_Place]) -> Line | None:
    """Samples per second of step time: what evaluations and saves took is not in it."""
    values: list[float | None] = []
    before: int | None = None
    for place in places:
        names = [name for name in place.counters if name.startswith("seconds/")]
        spent = sum(place.counters[name].stat().total for name in names if name.split("/", 1)[1] not in ASIDE)
        trained = None if place.samples is None else place.samples - (_before(place) if before is None else before)
        values.append(_short(trained / spent) if trained and trained > 0 and spent > 0 else None)
        before = place.samples if place.samples is not None else before
    if all(value is None for value in values):
        return None
    return Line(name="samples_per_second", unit="samples/s", mean=tuple(values))


def _before(place: _Place) -> int:
    """The samples before the first place: as if its steps were all alike."""
    stat = place.stat("samples")
    if stat is None or stat.count < 2:
        return 0
    return max(0, round(stat.least - (stat.greatest - stat.least) / (stat.count - 1)))


def _unit(name: str) -> Unit:
    if name.startswith("memory/") or name.endswith("_bytes"):
        return "bytes"
    if name == "samples_per_second":
        return "samples/s"
    return "percent" if name.startswith("use/") or name.endswith("_percent") else ""


def _short(value: float | None) -> float | None:
    """Seven digits are more than a page can show, and half the bytes."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")


class _Interpolated:
    """Samples at a step that says nothing about samples itself."""

    def __init__(self, known: Sequence[tuple[int, int]]) -> None:
        self._known = known
        self._steps = [step for step, _ in known]

    def at(self, step: int) -> int | None:
        """Between two known steps: in proportion; outside: those of the nearest."""
        if not self._known:
            return None
        right = bisect_right(self._steps, step)
        if right == 0:
            first_step, first_samples = self._known[0]
            return round(first_samples * max(0, step) / max(1, first_step))
        if right == len(self._known):
            return self._known[-1][1]
        (step_before, before), (step_after, after) = self._known[right - 1], self._known[right]
        return round(before + (after - before) * (step - step_before) / max(1, step_after - step_before))
