"""Is a difference real? Answers that hold whatever the noise is like: heavy tails, drift, interference.

Everything rests on pairs: two steps on the same batch, one right after the other, in an order that a coin decides. If
the two sides are equal, the coin alone decides which one an outside disturbance hits, so the log ratio of a pair is as
often above zero as below by the same amount. The exact distribution of signed ranks (Wilcoxon 1945) then bounds how
often chance alone looks like a gain. No bell curve is assumed, and one pair's noise may resemble the next one's.

Log ratios are own time over the rival's: below zero is faster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal

WORTH_HAVING = 0.02
"""A smaller gain is not worth another plan."""
_SURELY = 0.01
"""The gain must be at least this, with the certainty of the look."""

_LOOKS = {8: 1 / 256, 12: 0.0005, 16: 0.0002, 24: 0.0001, 32: 0.0001}
"""After how many pairs a gain may be claimed, and the chance of a false claim there. Together: less than 1 in 200."""
MOST_PAIRS = max(_LOOKS)

_PLAIN_PAIRS, _PLAIN_GAIN = 5, 0.25
"""Where each of five pairs shows a gain this large, noise has been ruled out with less."""
_GIVE_UP_LEVEL = 1 / 8
_SHOWN_LEVEL = 1 / 32
_QUIET_PAIRS, _QUIET_CHANGE = 8, 0.05

Answer = Literal["faster", "no gain", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
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


def estimate(log_ratios: Sequence[float]) -> Estimate:
    """The speed-up that pairs show; the interval is exact where five pairs or more allow one, else the range."""
    level = max(_SHOWN_LEVEL, 0.5 ** len(log_ratios))
    return Estimate(
        pairs=len(log_ratios),
        speedup=math.exp(-median(log_ratios)),
        low=math.exp(-upper_bound(log_ratios, level=level)),
        high=math.exp(upper_bound([-ratio for ratio in log_ratios], level=level)),
        confidence=1 - 2 * level,
    )


def judge(log_ratios: Sequence[float]) -> Answer:
    """Whether a gain worth having is real, is ruled out, or needs more pairs; to be asked after each pair.

    >>> judge([-0.3] * 5), judge([0.1, 0.2, 0.1]), judge([-0.05] * 7), judge([-0.05] * 8)
    ('faster', 'no gain', 'open', 'faster')
    """
    pairs = len(log_ratios)
    if pairs >= _PLAIN_PAIRS and max(log_ratios) <= -math.log1p(_PLAIN_GAIN):
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
    """Whether the pairs show that ours is the slower one, and not merely no faster."""
    return -upper_bound([-ratio for ratio in log_ratios], level=_GIVE_UP_LEVEL) > 0


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
    """What the centre of the values lies above with a chance of `level` at most; infinite for too few values.

    The largest means of two values (each with itself too) are left off, as many as signed ranks allow.

    >>> upper_bound([1.0, 2.0, 3.0], level=1 / 8), upper_bound([1.0, 2.0], level=1 / 8)
    (3.0, inf)
    """
    num_left_off = _most_left_off(len(values), level)
    if num_left_off is None:
        return math.inf
    means = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    return means[len(means) - 1 - num_left_off]


@cache
def _most_left_off(count: int, level: float) -> int | None:
    """The largest k for which a sum of signed ranks is k or less with a chance of `level` at most."""
    # How many of the 2**count sign patterns give each sum of ranks.
    ways = [1]
    for rank in range(1, count + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    allowed, reached, answer = level * 2**count, 0, None
    for total, number in enumerate(ways):
        reached += number
        if reached > allowed:
            return answer
        answer = total
    return answer
