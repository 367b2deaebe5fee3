"""Distribution-free statistics of step times: medians with exact intervals and a sequential sign test.

A comparison consists of pairs: two steps on the same batch, one right after the other, in random order. If both sides
are equally fast, a disturbance hits either with the same probability, so the log ratio of a pair is positive as often
as negative. The probability that noise looks like a gain is then a binomial tail (the sign test). The test assumes
nothing about the distribution: one step may take twenty times as long as the next, and noise may be correlated.

A log ratio is the logarithm of the candidate's time over the baseline's. A negative log ratio means faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

from whet.autotune.step_bench import PreparedStep
from whet.run.bench_result import BenchInterval

# Minimum median gain. A smaller one does not justify changing the plan.
MIN_GAIN = 0.02
# Minimum gain at the lower end of the confidence interval.
_CERTAIN_GAIN = 0.01

# Numbers of pairs after which a gain may be claimed, with the probability of a false claim at each. These probabilities
# add up in a sequential test; their sum is below 1 in 200.
_LOOKS = {8: 1 / 256, 12: 0.00025, 16: 0.0003, 20: 0.00025, 24: 0.00015, 32: 0.0001}
MAX_PAIRS = max(_LOOKS)

# Five pairs suffice for a large gain: each pair must show it, and their gains must differ by less than the smallest.
_LARGE_GAIN_PAIRS, _LARGE_GAIN = 5, 0.25
# Probability of missing a barely worthwhile gain. It is high, so that losers are dropped after only three pairs.
_GIVE_UP_LEVEL = 0.2
# Maximum probability that the true median lies below a reported interval. The same applies to its upper end.
_TAIL = 1 / 32
_MIN_STABLE_PAIRS, _STABLE_CHANGE = 8, 0.05

# Shorter steps are timed several at a time, because the clock and the scheduler would distort single ones. A process
# that shares a core pauses for milliseconds: with 16 steps of 0.14 ms, intervals were up to 14 times as wide.
_MIN_VISIT_SECONDS = 0.02
MAX_STEPS_PER_VISIT = 128
# With fewer steps, the 95th percentile is the maximum.
_MIN_STEPS_FOR_PERCENTILE = 20
_MIN_VISITS_FOR_DRIFT = 8

Decision = Literal["faster", "no gain", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupEstimate:
    """A speedup (the baseline's time over the candidate's) with its confidence interval."""

    pairs: int
    speedup: float
    low: float
    high: float
    confidence: float

    @property
    def spread(self) -> float:
        """Half the width of the confidence interval, relative to the speedup."""
        return (self.high - self.low) / 2 / self.speedup


def estimate(log_ratios: Sequence[float]) -> SpeedupEstimate:
    """Return the median speedup with its confidence interval.

    The interval is exact for five or more pairs. For fewer, it is the range. Requires at least one pair.
    """
    level = _reported_level(len(log_ratios))
    return SpeedupEstimate(
        pairs=len(log_ratios),
        speedup=math.exp(-median(log_ratios)),
        low=math.exp(-upper_bound(log_ratios, level=level)),
        high=math.exp(upper_bound([-ratio for ratio in log_ratios], level=level)),
        confidence=1 - 2 * level,
    )


def decide(log_ratios: Sequence[float]) -> Decision:
    """Return whether the pairs show a worthwhile gain ("faster"), rule one out ("no gain"), or are too few ("open").

    >>> decide([-0.3] * 5), decide([0.1, 0.2, 0.1]), decide([-0.05] * 7), decide([-0.05] * 8), decide([-0.3] * 4 + [-3])
    ('faster', 'no gain', 'open', 'faster', 'open')
    """
    pairs = len(log_ratios)
    least, most = -max(log_ratios), -min(log_ratios)
    # Noise that doubles step times can fake gains of any size, and five gains in a row occur by chance with a
    # probability of 1 in 32. So the pairs must also agree with each other.
    if pairs >= _LARGE_GAIN_PAIRS and least >= math.log1p(_LARGE_GAIN) and most - least <= least:
        return "faster"
    if (
        pairs in _LOOKS
        and upper_bound(log_ratios, level=_LOOKS[pairs]) <= -math.log1p(_CERTAIN_GAIN)
        and median(log_ratios) <= -math.log1p(MIN_GAIN)
        and is_stable(log_ratios)
    ):
        return "faster"
    if -upper_bound([-ratio for ratio in log_ratios], level=_GIVE_UP_LEVEL) > -math.log1p(MIN_GAIN):
        return "no gain"
    return "open"


def is_slower(log_ratios: Sequence[float]) -> bool:
    """Return whether the candidate is clearly slower: by the minimum gain and by the width of the interval."""
    result = estimate(log_ratios)
    return result.high < 1 and 1 - result.speedup >= max(MIN_GAIN, result.high - result.low)


def is_stable(values: Sequence[float]) -> bool:
    """Return whether both halves of a series of logarithms agree.

    The measured quantity drifts if the halves do not overlap and differ by more than 5 %.

    >>> is_stable([0.0, 0.1] * 4), is_stable([0.0] * 4 + [0.1] * 4)
    (True, False)
    """
    if len(values) < _MIN_STABLE_PAIRS:
        return True
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    are_separate = max(first) < min(second) or max(second) < min(first)
    return not (are_separate and abs(median(first) - median(second)) > math.log1p(_STABLE_CHANGE))


def upper_bound(values: Sequence[float], *, level: float) -> float:
    """Return a value that the true median exceeds with a probability of at most `level`; infinity for too few values.

    >>> upper_bound([1.0, 2.0, 3.0], level=1 / 8), upper_bound([1.0, 2.0], level=1 / 8)
    (3.0, inf)
    """
    num_trimmed = _max_trimmed(len(values), level)
    return math.inf if num_trimmed is None else sorted(values)[len(values) - 1 - num_trimmed]


def median_interval(values: Sequence[float]) -> BenchInterval:
    """Return the median with a confidence interval between two order statistics.

    >>> result = median_interval([5.0, 1.0, 2.0, 4.0, 3.0])
    >>> result.low, result.median, result.high, result.confidence
    (1.0, 3.0, 5.0, 0.9375)
    """
    ordered, count = sorted(values), len(values)
    num_trimmed = _max_trimmed(count, _reported_level(count)) or 0
    tail = sum(math.comb(count, heads) for heads in range(num_trimmed + 1)) / 2**count
    return BenchInterval(
        median=median(ordered),
        low=ordered[num_trimmed],
        high=ordered[count - 1 - num_trimmed],
        confidence=1 - 2 * min(tail, 0.5),
        repeats=count,
    )


def ratio_interval(log_ratios: Sequence[float]) -> BenchInterval:
    """Return the median speedup of the pairs with its confidence interval."""
    result = estimate(log_ratios)
    return BenchInterval(
        # With few pairs, rounding may place the median just outside its bounds.
        median=min(max(result.speedup, result.low), result.high),
        low=result.low,
        high=result.high,
        confidence=max(0.0, result.confidence),
        repeats=result.pairs,
    )


def rate_interval(amount: int, seconds: BenchInterval) -> BenchInterval:
    """Return the rate per second of processing `amount` items in these seconds."""
    return seconds.model_copy(
        update={"median": amount / seconds.median, "low": amount / seconds.high, "high": amount / seconds.low}
    )


def scaled_interval(interval: BenchInterval, factor: float) -> BenchInterval:
    """Return the interval with median and bounds multiplied by a factor."""
    return interval.model_copy(
        update={"median": interval.median * factor, "low": interval.low * factor, "high": interval.high * factor}
    )


def steps_per_visit(step_seconds: float) -> int:
    """Return the number of steps to time together, so that clock resolution and scheduling do not matter.

    >>> steps_per_visit(0.5), steps_per_visit(0.003), steps_per_visit(0.0002)
    (1, 7, 100)
    """
    return max(1, min(MAX_STEPS_PER_VISIT, math.ceil(_MIN_VISIT_SECONDS / max(step_seconds, 1e-9))))


@dataclass(slots=True)
class StepTimings:
    """Step times of one variant in chronological order. A visit is a few consecutive steps."""

    visits: list[float] = field(default_factory=list)
    """Mean seconds per step in each visit."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each step."""
    longest: float = 0.0
    """Seconds of the longest visit."""

    def visit(self, prepared: PreparedStep, *, first: int, steps: int) -> float:
        """Run and time a few steps, and return the mean seconds per step."""
        # A coarse clock may report zero, which has no logarithm.
        seconds = [max(prepared.step(first + offset), 1e-9) for offset in range(steps)]
        self.steps += seconds
        self.visits.append(sum(seconds) / steps)
        self.longest = max(self.longest, sum(seconds))
        return self.visits[-1]

    @property
    def slow_steps(self) -> float | None:
        """95th percentile of the step times divided by their median, or None for too few steps."""
        if len(self.steps) < _MIN_STEPS_FOR_PERCENTILE:
            return None
        ordered = sorted(self.steps)
        return ordered[math.ceil(0.95 * len(ordered)) - 1] / median(ordered)

    @property
    def drift(self) -> float | None:
        """Median of the second half divided by the median of the first half, or None for too few visits."""
        half = len(self.visits) // 2
        return median(self.visits[half:]) / median(self.visits[:half]) if half * 2 >= _MIN_VISITS_FOR_DRIFT else None


def _reported_level(count: int) -> float:
    """Return the smallest achievable tail probability of at least `_TAIL` for `count` values."""
    return max(_TAIL, 0.5**count)


@cache
def _max_trimmed(count: int, level: float) -> int | None:
    """Return how many values may be trimmed on one side, or None if not even the maximum is a bound.

    The result is the largest k such that `count` coin tosses show at most k heads with a probability of at most
    `level`.

    >>> _max_trimmed(8, 1 / 256), _max_trimmed(16, 0.0003), _max_trimmed(7, 1 / 256)
    (0, 1, None)
    """
    total, result = 0, None
    for heads in range(count + 1):
        total += math.comb(count, heads)
        if total > level * 2**count:
            break
        result = heads
    return result
