"""Have the steps become slower than they were? Throttling shows in the time of steps, whatever sensors say.

Pure: seconds in, a verdict out. It cannot tell heat from a neighbour that takes a core, or from longer samples.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

WARM_UP = 16
"""Steps at the start that say nothing: kernels are compiled, caches filled, clocks raised."""
WINDOW = 36
"""Steps that are compared with the baseline, by the mean of their middle half: a quarter may be spikes."""
CALM = 64
"""Steps of a window that may become the baseline; more, so that a lucky moment does not."""
CONFIRM = 4
"""Steps in a row that must agree, for a slow-down and for its end."""
LEAST = 0.155
"""The smallest slow-down that is reported, as a logarithm: 17 %."""
SPREADS = 5.0
"""Where steps vary much, a slow-down must exceed so many standard errors of a window."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowDown:
    factor: float
    """How much longer a step takes than it did: 1.3 is 30 % slower."""
    since_step: int
    """The step at which it began, as far as can be told."""


class Drift:
    """Watches the seconds of steps."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._recent = _Window(WINDOW)
        self._calm = _Window(CALM)
        self._baseline: float | None = None
        self._threshold = LEAST
        self._num_agreeing = 0
        self.verdict: SlowDown | None = None
        """What holds now; None: as fast as ever, or too early to tell."""

    @property
    def has_baseline(self) -> bool:
        """Whether enough steps were seen to judge."""
        return self._baseline is not None

    def observe(self, step: int, seconds: float, *, work: float = 1.0) -> SlowDown | None:
        """Takes the time of a step, for `work` tokens or samples, and gives the verdict after it."""
        if not (0 < seconds < math.inf and 0 < work < math.inf):
            return self.verdict
        self._num_seen += 1
        if self._num_seen <= WARM_UP:
            return None
        pace = math.log(seconds / work)
        self._recent.add(pace, step)
        self._calm.add(pace, step)
        if self._calm.is_full and (self._baseline is None or self._calm.middle < self._baseline):
            self._baseline = self._calm.middle
            self._threshold = max(LEAST, SPREADS * self._calm.spread / math.sqrt(WINDOW))
        if self._baseline is not None and self._recent.is_full:
            self._judge(self._recent.middle - self._baseline)
        return self.verdict

    def forget_recent(self) -> None:
        """After a break: what was before it says nothing about now. The baseline stays."""
        self._recent, self._calm = _Window(WINDOW), _Window(CALM)
        self._num_agreeing = 0
        self.verdict = None

    def _judge(self, slower: float) -> None:
        """`slower` is the logarithm of the slow-down."""
        assert self._baseline is not None
        is_slow = self.verdict is not None
        # It ends well below where it began, so that it does not flutter.
        changes = slower < self._threshold / 2 if is_slow else slower > self._threshold
        self._num_agreeing = self._num_agreeing + 1 if changes else 0
        if self._num_agreeing >= CONFIRM:
            self._num_agreeing = 0
            since = self._recent.first_above(self._baseline + self._threshold / 2)
            self.verdict = None if is_slow else SlowDown(factor=math.exp(slower), since_step=since)
        elif self.verdict is not None:
            self.verdict = SlowDown(factor=math.exp(slower), since_step=self.verdict.since_step)


class _Window:
    """The last few values, in order of arrival and of size."""

    def __init__(self, size: int) -> None:
        self._arrived: deque[tuple[float, int]] = deque(maxlen=size)
        self._sorted: list[float] = []

    def add(self, value: float, step: int) -> None:
        if self.is_full:
            del self._sorted[bisect_left(self._sorted, self._arrived[0][0])]
        self._arrived.append((value, step))
        insort(self._sorted, value)

    @property
    def is_full(self) -> bool:
        return len(self._arrived) == self._arrived.maxlen

    @property
    def middle(self) -> float:
        """The mean of the middle half."""
        quarter = len(self._sorted) // 4
        half = self._sorted[quarter : len(self._sorted) - quarter]
        return sum(half) / len(half)

    @property
    def spread(self) -> float:
        """The standard deviation, from the distance of the quartiles, so that spikes do not count."""
        quarter = len(self._sorted) // 4
        return (self._sorted[-quarter - 1] - self._sorted[quarter]) / 1.349

    def first_above(self, level: float) -> int:
        """The first step of the newest stretch whose values lie mostly above the level."""
        best, score, since = 0, 0, self._arrived[0][1]
        for value, step in reversed(self._arrived):
            score += 1 if value > level else -1
            if score > best:
                best, since = score, step
        return since
