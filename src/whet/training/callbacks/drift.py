"""Detect steps that have become slower than they were.

Throttling shows in step times whatever sensors say. Heat cannot be told from another program or from longer samples.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WARMUP_STEPS = 16
"""Steps at the start that are ignored: kernels are compiled, caches filled, clocks raised."""
WINDOW = 36
"""Steps that are compared with the baseline, by their interquartile mean: a quarter may be spikes."""
BASELINE_WINDOW = 64
"""Steps of a window that may become the baseline; longer, so that a lucky moment does not."""
CHECK_EVERY = 4
"""Steps between two checks: one takes about 12 us, too much for every step of 5 ms."""
CONFIRMATIONS = 2
"""Consecutive checks that must agree, for a slowdown and for its end."""
MIN_LOG_SLOWDOWN = 0.155
"""The smallest slowdown that is reported, as a logarithm: 17 %."""
MIN_STANDARD_ERRORS = 5.0
"""If step times vary much, a slowdown must exceed this many standard errors of a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    factor: float
    """Ratio of step times: 1.3 is 30 % slower."""
    since_step: int
    """The step at which it probably began."""


class SlowdownDetector:
    """Compares recent step times with the fastest calm period so far."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._steps: deque[int] = deque(maxlen=BASELINE_WINDOW)
        self._paces: deque[float] = deque(maxlen=BASELINE_WINDOW)
        """Logarithms of seconds per unit of work."""
        self._baseline: float | None = None
        self._threshold = MIN_LOG_SLOWDOWN
        self._num_agreeing = 0
        self.verdict: Slowdown | None = None
        """The current slowdown; None: as fast as ever, or too early to tell."""

    def observe(self, step: int, seconds: float, *, work: float = 1.0) -> Slowdown | None:
        """Take the time of a step, for `work` tokens or samples. Returns the current slowdown."""
        if 0 < seconds < math.inf and 0 < work < math.inf:
            self._num_seen += 1
            if self._num_seen > WARMUP_STEPS:
                self._steps.append(step)
                self._paces.append(math.log(seconds / work))
                if self._num_seen % CHECK_EVERY == 0:
                    self._check()
        return self.verdict

    def forget_recent(self) -> None:
        """After a pause: forget recent times, and keep the baseline."""
        self._steps.clear()
        self._paces.clear()
        self._num_agreeing = 0
        self.verdict = None

    def _check(self) -> None:
        paces = list(self._paces)
        if len(paces) == BASELINE_WINDOW:
            calm = sorted(paces)
            if self._baseline is None or _interquartile_mean(calm) < self._baseline:
                self._baseline = _interquartile_mean(calm)
                self._threshold = max(MIN_LOG_SLOWDOWN, MIN_STANDARD_ERRORS * _spread(calm) / math.sqrt(WINDOW))
        if self._baseline is not None and len(paces) >= WINDOW:
            self._judge(_interquartile_mean(sorted(paces[-WINDOW:])) - self._baseline)

    def _judge(self, slower: float) -> None:
        """`slower` is the logarithm of the slowdown."""
        is_slow = self.verdict is not None
        # It ends well below the threshold at which it began, so that it does not flutter.
        changes = slower < self._threshold / 2 if is_slow else slower > self._threshold
        self._num_agreeing = self._num_agreeing + 1 if changes else 0
        if self._num_agreeing >= CONFIRMATIONS:
            self._num_agreeing = 0
            self.verdict = None if is_slow else Slowdown(factor=math.exp(slower), since_step=self._rise())
        elif self.verdict is not None:
            self.verdict = Slowdown(factor=math.exp(slower), since_step=self.verdict.since_step)

    def _rise(self) -> int:
        """The first step of the newest stretch in which most steps are slow."""
        assert self._baseline is not None
        level = self._baseline + self._threshold / 2
        best, score, since = 0, 0, self._steps[0]
        for pace, step in zip(reversed(self._paces), reversed(self._steps), strict=True):
            score += 1 if pace > level else -1
            if score > best:
                best, since = score, step
        return since


def _interquartile_mean(ordered: Sequence[float]) -> float:
    """The mean of the middle half."""
    quarter = len(ordered) // 4
    half = ordered[quarter : len(ordered) - quarter]
    return sum(half) / len(half)


def _spread(ordered: Sequence[float]) -> float:
    """The standard deviation, from the distance of the quartiles, so that spikes do not count."""
    quarter = len(ordered) // 4
    return (ordered[-quarter - 1] - ordered[quarter]) / 1.349
