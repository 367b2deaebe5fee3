"""Schedule checkpoints: balance lost work against the cost of saving."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from whet.plan.plan import Plan

MAX_SAVE_SHARE = 0.01
"""Saving takes at most this part of the time, unless you set the interval."""
MEAN_SECONDS_BETWEEN_FAILURES = 24 * 3600.0
RETRY_SECONDS = 60.0
_BASELINE_STEPS = 64
_MIN_BACKGROUND_SAVES = 2
_SLOW_SHARE = 0.3

SaveDue = Literal["no", "time", "asked"]
"""Whether; and whether by the clock, which may be late, or at a place that you asked for."""


def best_interval(cost: float, *, least: float) -> float:
    """Seconds between saves that cost `cost` seconds each: Young's square root, the 1 % bound, and the plan's least.

    >>> round(best_interval(0.2, least=60)), round(best_interval(0.2, least=300)), round(best_interval(20, least=300))
    (186, 300, 2000)
    """
    return max(least, math.sqrt(2 * cost * MEAN_SECONDS_BETWEEN_FAILURES), cost / MAX_SAVE_SHARE)


class SaveInterval:
    """Says when a checkpoint is due, and learns from what saving costs."""

    def __init__(self, plan: Plan, *, clock: Callable[[], float] = time.monotonic) -> None:
        minutes = plan.checkpoint_minutes
        assert isinstance(minutes, int | float)
        self._steps = plan.checkpoint_steps
        self._epochs = plan.checkpoint_epochs
        self._is_yours = plan.settings["checkpoint_minutes"].source == "you"
        self._least = minutes * 60.0
        self._clock = clock
        self.interval = self._least
        """Seconds between saves, as it stands now."""
        self._due_at = clock() + self.interval

    def is_due(self, step: int, *, epochs_done: int | None) -> SaveDue:
        """Whether a checkpoint should be written after this step; `epochs_done` counts if the step ended an epoch."""
        if isinstance(self._steps, int) and step % self._steps == 0:
            return "asked"
        if isinstance(self._epochs, int) and epochs_done is not None and epochs_done % self._epochs == 0:
            return "asked"
        return "time" if self._clock() >= self._due_at else "no"

    def began(self) -> None:
        """A save has begun, or was skipped since one is under way: the clock starts anew."""
        self._due_at = self._clock() + self.interval

    def learn(self, cost: float) -> None:
        """Takes in what a save cost in seconds of training; your own interval stays as it is."""
        if not self._is_yours:
            began = self._due_at - self.interval
            self.interval = best_interval(cost, least=self._least)
            self._due_at = began + self.interval

    def failed(self, step: int) -> str:
        """Sets the next try; when that will be, in words."""
        wait = min(RETRY_SECONDS, self.interval)
        self._due_at = self._clock() + wait
        words = f"in {wait:.0f} s"
        if isinstance(self._steps, int):
            words += f" or after step {(step // self._steps + 1) * self._steps:,}"
        return words


class WriteMode:
    """Whether writing costs less beside the training or in between: where training keeps all cores busy itself, a
    second writer can slow it down for longer than the write alone would take. Both are measured while the run goes."""

    def __init__(self) -> None:
        self._least: dict[bool, float] = {}
        """Seconds a byte, the least seen of each way: what a busy moment added does not count."""
        self._num_beside = 0
        self._share = 0.0

    @property
    def is_background(self) -> bool:
        """Whether the next one should be written beside the training."""
        if self._num_beside < _MIN_BACKGROUND_SAVES:
            return True
        if False not in self._least:
            # In between is tried only where steps have suffered much.
            return self._share < _SLOW_SHARE
        return self._least[True] <= self._least[False]

    def learn(self, *, is_background: bool, cost: float, seconds: float, num_bytes: int) -> None:
        """Takes in what a save cost the training, and how long it took."""
        per_byte = cost / max(1, num_bytes)
        self._least[is_background] = min(per_byte, self._least.get(is_background, per_byte))
        if is_background:
            self._num_beside += 1
            share = cost / max(seconds, 1e-9)
            self._share = share if self._num_beside == 1 else min(share, self._share)


class StepTimes:
    """How much slower steps are while a checkpoint is written beside them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._usual: deque[float] = deque(maxlen=_BASELINE_STEPS)
        self._last: float | None = None
        self._aside = 0.0
        self._was_busy = False
        self._busy_seconds, self._busy_steps = 0.0, 0

    def tick(self, *, is_busy: bool, aside: float) -> None:
        """After each step; `aside` counts all seconds so far that went elsewhere, to evaluations and saves."""
        now = self._clock()
        if self._last is not None:
            seconds = now - self._last - (aside - self._aside)
            if is_busy or self._was_busy:
                self._busy_seconds += seconds
                self._busy_steps += 1
            else:
                self._usual.append(seconds)
        self._last, self._aside, self._was_busy = now, aside, is_busy

    def slowed(self) -> float:
        """Seconds that steps took longer since the last call; 0 while there is nothing to compare with."""
        seconds, steps = self._busy_seconds, self._busy_steps
        self._busy_seconds, self._busy_steps = 0.0, 0
        return max(0.0, seconds - steps * statistics.median(self._usual)) if self._usual and steps else 0.0
