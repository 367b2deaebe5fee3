"""Distribution-free statistics of step times: medians with exact intervals and a sequential sign test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

from whet.autotune.step_bench import PreparedStep
from whet.run.bench_result import BenchInterval

WORTH_HAVING = 0.02
"""A smaller gain is not worth another plan."""
_SURELY = 0.01
"""The gain must be at least this, with the certainty of the look."""

_LOOKS = {8: 1 / 256, 12: 0.00025, 16: 0.0003, 20: 0.00025, 24: 0.00015, 32: 0.0001}
"""After how many pairs a gain may be claimed, and the chance of a false claim there. Together: less than 1 in 200."""
MOST_PAIRS = max(_LOOKS)

_PLAIN_PAIRS, _PLAIN_GAIN = 5, 0.25
"""Where each of so many pairs shows a gain this large, and they differ by less than that, fewer rule out noise."""
_GIVE_UP_LEVEL = 0.2
"""The chance of overlooking a gain that is just worth having; three pairs are enough for it."""
_SHOWN_LEVEL = 1 / 32
_QUIET_PAIRS, _QUIET_CHANGE = 8, 0.05

Decision = Literal["faster", "no gain", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupEstimate:
    """A speed-up (the rival's time as a multiple of ours) with the interval in which it lies."""

    pairs: int
    speedup: float
    low: float
    high: float
    confidence: float

    @property
    def spread(self) -> float:
        """Half the width of the interval, as a share of the speed-up."""
        return (self.high - self.low) / 2 / self.speedup


def estimate(log_ratios: Sequence[float]) -> SpeedupEstimate:
    """The speed-up that pairs show; the interval is exact where five pairs or more allow one, else the range."""
    level = max(_SHOWN_LEVEL, 0.5 ** len(log_ratios))
    return SpeedupEstimate(
        pairs=len(log_ratios),
        speedup=math.exp(-median(log_ratios)),
        low=math.exp(-upper_bound(log_ratios, level=level)),
        high=math.exp(upper_bound([-ratio for ratio in log_ratios], level=level)),
        confidence=1 - 2 * level,
    )


def decide(log_ratios: Sequence[float]) -> Decision:
    """Whether a gain worth having is real, is ruled out, or needs more pairs; to be asked after each pair.

    >>> judge([-0.3] * 5), judge([0.1, 0.2, 0.1]), judge([-0.05] * 7), judge([-0.05] * 8), judge([-0.3] * 4 + [-3])
    ('faster', 'no gain', 'open', 'faster', 'open')
    """
    pairs = len(log_ratios)
    least, most = -max(log_ratios), -min(log_ratios)
    # Noise that makes steps twice as long makes gains as large as any: five of them alone are 1 chance in 32.
    if pairs >= _PLAIN_PAIRS and least >= math.log1p(_PLAIN_GAIN) and most - least <= least:
        return "faster"
    if (
        pairs in _LOOKS
        and upper_bound(log_ratios, level=_LOOKS[pairs]) <= -math.log1p(_SURELY)
        and median(log_ratios) <= -math.log1p(WORTH_HAVING)
        and is_steady(log_ratios)
    ):
        return "faster"
    if -upper_bound([-ratio for ratio in log_ratios], level=_GIVE_UP_LEVEL) > -math.log1p(WORTH_HAVING):
        return "no gain"
    return "open"


def is_slower(log_ratios: Sequence[float]) -> bool:
    """Whether the pairs show that ours is the slower one, and not merely no faster: by twice the spread at least."""
    found = estimate(log_ratios)
    return found.high < 1 and 1 - found.speedup >= max(WORTH_HAVING, found.high - found.low)


def is_steady(values: Sequence[float]) -> bool:
    """Whether the second half of a measurement tells the same as the first.

    Not so where the halves lie apart by 5 % and more without overlap: what is measured is changing.

    >>> is_steady([0.0, 0.1] * 4), is_steady([0.0] * 4 + [0.1] * 4)
    (True, False)
    """
    if len(values) < _QUIET_PAIRS:
        return True
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    is_apart = max(first) < min(second) or max(second) < min(first)
    return not (is_apart and abs(median(first) - median(second)) > math.log1p(_QUIET_CHANGE))


def upper_bound(values: Sequence[float], *, level: float) -> float:
    """What the median lies above with a chance of `level` at most: one of the values, infinite where they are too few.

    >>> upper_bound([1.0, 2.0, 3.0], level=1 / 8), upper_bound([1.0, 2.0], level=1 / 8)
    (3.0, inf)
    """
    num_left_off = _most_left_off(len(values), level)
    return math.inf if num_left_off is None else sorted(values)[len(values) - 1 - num_left_off]


@cache
def _most_left_off(tosses: int, level: float) -> int | None:
    """The largest k for which k heads or fewer come up with a chance of `level` at most; None where not even 0 is.

    >>> _most_left_off(8, 1 / 256), _most_left_off(16, 0.0003), _most_left_off(7, 1 / 256)
    (0, 1, None)
    """
    reached, answer = 0, None
    for heads in range(tosses + 1):
        reached += math.comb(tosses, heads)
        if reached > level * 2**tosses:
            break
        answer = heads
    return answer


_EACH_SIDE = 1 / 32
"""The chance that the true median lies below an interval, and above it, at most: as in `statistics.estimate`."""
_LEAST_VISIT = 0.02
"""Seconds: shorter steps are timed several at a time."""
_MOST_STEPS = 16
_LEAST_FOR_SLOW = 20
"""Fewer steps have no slowest twentieth."""
_LEAST_FOR_DRIFT = 8


@dataclass(slots=True)
class StepTimings:
    """The times of one arm, in the order they were taken."""

    visits: list[float] = field(default_factory=list)
    """Seconds of one step, the mean of each visit."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each single step."""
    longest: float = 0.0
    """The longest visit as a whole."""

    def visit(self, prepared: PreparedStep, *, first: int, steps: int) -> float:
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


def steps_per_visit(step_seconds: float) -> int:
    """How many steps one visit makes, so that a clock and a scheduler do not matter."""
    return max(1, min(_MOST_STEPS, math.ceil(_LEAST_VISIT / max(step_seconds, 1e-9))))


def median_interval(values: Sequence[float]) -> BenchInterval:
    """The median, and the order statistics between which the true one lies: no shape is assumed.

    >>> found = median_interval([5.0, 1.0, 2.0, 4.0, 3.0])
    >>> found.low, found.middle, found.high, found.confidence
    (1.0, 3.0, 5.0, 0.9375)
    """
    ordered, count = sorted(values), len(values)
    left_off, chance = _left_off(count)
    return BenchInterval(
        middle=median(ordered),
        low=ordered[left_off],
        high=ordered[count - 1 - left_off],
        confidence=1 - 2 * chance,
        repeats=count,
    )


def ratio_interval(log_ratios: Sequence[float]) -> BenchInterval:
    """The speed-up that pairs show (log ratios: own time over the rival's)."""
    found = estimate(log_ratios)
    return BenchInterval(
        # With few pairs the middle of all may lie outside of what signed ranks allow by rounding alone.
        middle=min(max(found.speedup, found.low), found.high),
        low=found.low,
        high=found.high,
        confidence=max(0.0, found.confidence),
        repeats=found.pairs,
    )


def rate_interval(amount: int, seconds: BenchInterval) -> BenchInterval:
    """A rate from the time that an amount takes."""
    return seconds.model_copy(
        update={"middle": amount / seconds.middle, "low": amount / seconds.high, "high": amount / seconds.low}
    )


def scaled_interval(ratio: BenchInterval, factor: float) -> BenchInterval:
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
