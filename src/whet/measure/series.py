"""What do the times of many steps of one kind say? Their middle with an exact interval, slow ones, drift."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

from whet.measure.rig import Prepared
from whet.measure.statistics import estimate
from whet.run.bench_result import Interval

_EACH_SIDE = 1 / 32
"""The chance that the true median lies below an interval, and above it, at most: as in `statistics.estimate`."""
_LEAST_VISIT = 0.02
"""Seconds: shorter steps are timed several at a time."""
_MOST_STEPS = 16
_LEAST_FOR_SLOW = 20
"""Fewer steps have no slowest twentieth."""
_LEAST_FOR_DRIFT = 8


@dataclass(slots=True)
class Series:
    """The times of one arm, in the order they were taken."""

    visits: list[float] = field(default_factory=list)
    """Seconds of one step, the mean of each visit."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each single step."""
    longest: float = 0.0
    """The longest visit as a whole."""

    def visit(self, prepared: Prepared, *, first: int, steps: int) -> float:
        """Makes a few steps; what one of them took."""
        seconds = [max(prepared.step(first + place), 1e-9) for place in range(steps)]
        self.steps += seconds
        self.visits.append(sum(seconds) / steps)
        self.longest = max(self.longest, sum(seconds))
        return self.visits[-1]

    @property
    def slow_steps(self) -> float | None:
        """The 95th percentile over the median."""
        if len(self.steps) < _LEAST_FOR_SLOW:
            return None
        ordered = sorted(self.steps)
        return ordered[math.ceil(0.95 * len(ordered)) - 1] / median(ordered)

    @property
    def drift(self) -> float | None:
        """The median of the second half over the first half's."""
        half = len(self.visits) // 2
        return median(self.visits[half:]) / median(self.visits[:half]) if half * 2 >= _LEAST_FOR_DRIFT else None


def steps_at_a_time(step_seconds: float) -> int:
    """How many steps one visit makes, so that a clock and a scheduler do not matter."""
    return max(1, min(_MOST_STEPS, math.ceil(_LEAST_VISIT / max(step_seconds, 1e-9))))


def median_interval(values: Sequence[float]) -> Interval:
    """The median, and the order statistics between which the true one lies: no shape is assumed.

    >>> found = median_interval([5.0, 1.0, 2.0, 4.0, 3.0])
    >>> found.low, found.middle, found.high, found.confidence
    (1.0, 3.0, 5.0, 0.9375)
    """
    ordered, count = sorted(values), len(values)
    left_off, chance = _left_off(count)
    return Interval(
        middle=median(ordered),
        low=ordered[left_off],
        high=ordered[count - 1 - left_off],
        confidence=1 - 2 * chance,
        repeats=count,
    )


def ratio_interval(log_ratios: Sequence[float]) -> Interval:
    """The speed-up that pairs show (log ratios: own time over the rival's)."""
    found = estimate(log_ratios)
    return Interval(
        # With few pairs the middle of all may lie outside of what signed ranks allow by rounding alone.
        middle=min(max(found.speedup, found.low), found.high),
        low=found.low,
        high=found.high,
        confidence=max(0.0, found.confidence),
        repeats=found.pairs,
    )


def per_second(amount: int, seconds: Interval) -> Interval:
    """A rate from the time that an amount takes."""
    return seconds.model_copy(
        update={"middle": amount / seconds.middle, "low": amount / seconds.high, "high": amount / seconds.low}
    )


def times(ratio: Interval, factor: float) -> Interval:
    """An interval in another unit."""
    return ratio.model_copy(
        update={"middle": ratio.middle * factor, "low": ratio.low * factor, "high": ratio.high * factor}
    )


@cache
def _left_off(count: int) -> tuple[int, float]:
    """How many values may be left off at each side, and the chance that the median lies beyond."""
    left_off, chance = 0, 0.5**count
    beyond = chance
    for place in range(1, count):
        beyond += math.comb(count, place) * 0.5**count
        if beyond > _EACH_SIDE or 2 * place >= count:
            break
        left_off, chance = place, beyond
    return left_off, min(chance, 0.5)
