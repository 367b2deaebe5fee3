"""Distribution-free statistics of step times: medians with exact intervals and a sequential sign test.

Comparisons rest on pairs: two steps on the same batch, one right after the other, in random order. If both sides are
equal, chance alone decides which of them a disturbance hits, so the log ratio of a pair is as often positive as
negative. The probability that noise looks like a gain is then a binomial tail (the sign test). Nothing is assumed about
the distribution: one step may take twenty times as long as the next, and the noise of pairs may be correlated.

Log ratios are the candidate's time over the baseline's: below zero is faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

from whet.autotune.step_bench import PreparedStep
from whet.run.bench_result import BenchInterval

# A smaller gain is not worth changing the plan.
MIN_GAIN = 0.02
# The gain must be at least this at the confidence of the look.
_CERTAIN_GAIN = 0.01

# Pairs after which a gain may be claimed, with the probability of a false claim there. The sum is below 1 in 200.
_LOOKS = {8: 1 / 256, 12: 0.00025, 16: 0.0003, 20: 0.00025, 24: 0.00015, 32: 0.0001}
MAX_PAIRS = max(_LOOKS)

# If every one of this many pairs shows a gain this large, and they differ by less than that, they rule out noise.
_LARGE_GAIN_PAIRS, _LARGE_GAIN = 5, 0.25
# The probability of missing a gain that is just worth having; three pairs are enough for it.
_GIVE_UP_LEVEL = 0.2
# The probability that the true median lies below a reported interval, and above it, at most.
_TAIL = 1 / 32
_MIN_STABLE_PAIRS, _STABLE_CHANGE = 8, 0.05

# Shorter steps are timed several at a time: the clock and the scheduler would disturb single ones too much.
_MIN_VISIT_SECONDS = 0.02
MAX_STEPS_PER_VISIT = 16
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
        """Half the width of the interval, relative to the speedup."""
        return (self.high - self.low) / 2 / self.speedup


def estimate(log_ratios: Sequence[float]) -> SpeedupEstimate:
    """Return the median speedup; the interval is exact from five pairs on, below that it is the range."""
    level = _reported_level(len(log_ratios))
    return SpeedupEstimate(
        pairs=len(log_ratios),
        speedup=math.exp(-median(log_ratios)),
        low=math.exp(-upper_bound(log_ratios, level=level)),
        high=math.exp(upper_bound([-ratio for ratio in log_ratios], level=level)),
        confidence=1 - 2 * level,
    )


def decide(log_ratios: Sequence[float]) -> Decision:
    """Decide after each pair whether a worthwhile gain is real, is ruled out, or needs more pairs.

    >>> decide([-0.3] * 5), decide([0.1, 0.2, 0.1]), decide([-0.05] * 7), decide([-0.05] * 8), decide([-0.3] * 4 + [-3])
    ('faster', 'no gain', 'open', 'faster', 'open')
    """
    pairs = len(log_ratios)
    least, most = -max(log_ratios), -min(log_ratios)
    # Noise that doubles step times also fakes gains of any size, so the pairs must agree with each other as well:
    # five gains alone have a probability of 1 in 32.
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
    """Whether the candidate is slower, not just no faster: by at least twice the spread."""
    result = estimate(log_ratios)
    return result.high < 1 and 1 - result.speedup >= max(MIN_GAIN, result.high - result.low)


def is_stable(values: Sequence[float]) -> bool:
    """Whether both halves of a series of logarithms agree.

    They do not if they lie more than 5 % apart without overlap: the measured quantity is drifting.

    >>> is_stable([0.0, 0.1] * 4), is_stable([0.0] * 4 + [0.1] * 4)
    (True, False)
    """
    if len(values) < _MIN_STABLE_PAIRS:
        return True
    first, second = values[: len(values) // 2], values[len(values) // 2 :]
    are_separate = max(first) < min(second) or max(second) < min(first)
    return not (are_separate and abs(median(first) - median(second)) > math.log1p(_STABLE_CHANGE))


def upper_bound(values: Sequence[float], *, level: float) -> float:
    """Return a value that the true median exceeds with probability `level` at most; infinite for too few values.

    >>> upper_bound([1.0, 2.0, 3.0], level=1 / 8), upper_bound([1.0, 2.0], level=1 / 8)
    (3.0, inf)
    """
    num_trimmed = _max_trimmed(len(values), level)
    return math.inf if num_trimmed is None else sorted(values)[len(values) - 1 - num_trimmed]


def median_interval(values: Sequence[float]) -> BenchInterval:
    """Return the median and the order statistics that enclose the true one.

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
    """Return the speedup of pairs as an interval."""
    result = estimate(log_ratios)
    return BenchInterval(
        # With few pairs, rounding may put the median just outside its bounds.
        median=min(max(result.speedup, result.low), result.high),
        low=result.low,
        high=result.high,
        confidence=max(0.0, result.confidence),
        repeats=result.pairs,
    )


def rate_interval(amount: int, seconds: BenchInterval) -> BenchInterval:
    """Return a rate per second from the time that an amount takes."""
    return seconds.model_copy(
        update={"median": amount / seconds.median, "low": amount / seconds.high, "high": amount / seconds.low}
    )


def scaled_interval(interval: BenchInterval, factor: float) -> BenchInterval:
    """Return an interval in another unit."""
    return interval.model_copy(
        update={"median": interval.median * factor, "low": interval.low * factor, "high": interval.high * factor}
    )


def steps_per_visit(step_seconds: float) -> int:
    """Return how many steps are timed at once, so that the clock's resolution and the scheduler do not matter."""
    return max(1, min(MAX_STEPS_PER_VISIT, math.ceil(_MIN_VISIT_SECONDS / max(step_seconds, 1e-9))))


@dataclass(slots=True)
class StepTimings:
    """Step times of one variant in the order they were taken; a visit is a few consecutive steps."""

    visits: list[float] = field(default_factory=list)
    """Seconds per step, the mean of each visit."""
    steps: list[float] = field(default_factory=list)
    """Seconds of each single step."""
    longest: float = 0.0
    """Seconds of the longest visit."""

    def visit(self, prepared: PreparedStep, *, first: int, steps: int) -> float:
        """Run a few steps and return the seconds of one."""
        # A clock that stands still would give a ratio of zero.
        seconds = [max(prepared.step(first + offset), 1e-9) for offset in range(steps)]
        self.steps += seconds
        self.visits.append(sum(seconds) / steps)
        self.longest = max(self.longest, sum(seconds))
        return self.visits[-1]

    @property
    def slow_steps(self) -> float | None:
        """The 95th percentile over the median."""
        if len(self.steps) < _MIN_STEPS_FOR_PERCENTILE:
            return None
        ordered = sorted(self.steps)
        return ordered[math.ceil(0.95 * len(ordered)) - 1] / median(ordered)

    @property
    def drift(self) -> float | None:
        """The median of the second half over the median of the first."""
        half = len(self.visits) // 2
        return median(self.visits[half:]) / median(self.visits[:half]) if half * 2 >= _MIN_VISITS_FOR_DRIFT else None


def _reported_level(count: int) -> float:
    return max(_TAIL, 0.5**count)


@cache
def _max_trimmed(count: int, level: float) -> int | None:
    """Return how many values may be trimmed on one side: the largest k with P(at most k heads of `count`) <= level.

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
