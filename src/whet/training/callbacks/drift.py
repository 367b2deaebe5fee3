"""Detection of steps that have become slower.

Throttling shows in step times even without a sensor. However, step times alone cannot distinguish heat from other
programs or longer samples.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WARMUP_STEPS = 16
"""Number of initial steps to ignore, during which kernels compile, caches fill and clock speeds rise."""
WINDOW = 36
"""Number of recent steps whose interquartile mean is compared with the baseline. Up to a quarter may be spikes."""
BASELINE_WINDOW = 64
"""Number of steps in a baseline. It exceeds WINDOW, so that a few fast steps do not become the baseline."""
CHECK_EVERY = 4
"""Number of steps between checks. A check takes about 12 us, which is too much for every step of 5 ms."""
CONFIRMATIONS = 2
"""Number of consecutive checks that must agree before a slowdown starts or ends."""
MIN_LOG_SLOWDOWN = 0.155
"""Minimum slowdown that is reported, as a natural logarithm: 17 %."""
MIN_STANDARD_ERRORS = 5.0
"""Minimum slowdown that is reported, in standard errors of a window, for step times that vary considerably."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdown:
    """The slowdown of recent steps relative to the baseline."""

    factor: float
    """Ratio to the baseline step time; 1.3 means 30 % slower."""
    since_step: int
    """The estimated first slow step."""


class SlowdownDetector:
    """Compares recent step times with the fastest steady period so far."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._steps: deque[int] = deque(maxlen=BASELINE_WINDOW)
        self._paces: deque[float] = deque(maxlen=BASELINE_WINDOW)
        """Logarithms of seconds per unit of work."""
        self._baseline: float | None = None
        self._threshold = MIN_LOG_SLOWDOWN
        self._num_agreeing = 0
        self.verdict: Slowdown | None = None
        """The current slowdown; None if there is none or there are too few steps to detect one."""

    def observe(self, step: int, seconds: float, *, work: float = 1.0) -> Slowdown | None:
        """Record the seconds of a step that processed `work` tokens or samples.

        Return the current slowdown, or None.
        """
        if 0 < seconds < math.inf and 0 < work < math.inf:
            self._num_seen += 1
            if self._num_seen > WARMUP_STEPS:
                self._steps.append(step)
                self._paces.append(math.log(seconds / work))
                if self._num_seen % CHECK_EVERY == 0:
                    self._check()
        return self.verdict

    def forget_recent(self) -> None:
        """Discard recent step times, for example after a pause, but keep the baseline."""
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
        """Update the verdict. `slower` is the logarithm of the ratio to the baseline."""
        is_slow = self.verdict is not None
        # Hysteresis: a slowdown ends at half the threshold, so that the verdict does not oscillate.
        changes = slower < self._threshold / 2 if is_slow else slower > self._threshold
        self._num_agreeing = self._num_agreeing + 1 if changes else 0
        if self._num_agreeing >= CONFIRMATIONS:
            self._num_agreeing = 0
            self.verdict = None if is_slow else Slowdown(factor=math.exp(slower), since_step=self._rise())
        elif self.verdict is not None:
            self.verdict = Slowdown(factor=math.exp(slower), since_step=self.verdict.since_step)

    def _rise(self) -> int:
        """Return the first step of the most recent period in which most steps are slow."""
        assert self._baseline is not None
        level = self._baseline + self._threshold / 2
        # Walk backward and count +1 for a slow step and -1 for a fast one. The maximum marks the start of the period.
        best, score, since = 0, 0, self._steps[0]
        for pace, step in zip(reversed(self._paces), reversed(self._steps), strict=True):
            score += 1 if pace > level else -1
            if score > best:
                best, since = score, step
        return since


def _interquartile_mean(ordered: Sequence[float]) -> float:
    """Return the mean of the middle half of the values."""
    quarter = len(ordered) // 4
    half = ordered[quarter : len(ordered) - quarter]
    return sum(half) / len(half)


def _spread(ordered: Sequence[float]) -> float:
    """Estimate the standard deviation from the interquartile range, which ignores spikes."""
    quarter = len(ordered) // 4
    # The interquartile range of a normal distribution is 1.349 standard deviations.
    return (ordered[-quarter - 1] - ordered[quarter]) / 1.349
