"""Detect NaN and Inf, and decide which steps are repeated or skipped."""

import math
from collections import deque
from collections.abc import Iterable

from whet.base.errors import DivergedError
from whet.run.event import Event

MAX_SKIPPED = 10
MAX_CONSECUTIVE_SKIPS = 3
MAX_SCALER_SKIPS = 20
"""Steps in a row that a loss scaler may leave out by itself: each halves the scale."""
MAX_ROLLBACKS = 20

_WINDOW, _MIN_LOSSES, _SIGMAS = 128, 64, 6.0
_MIN_SPIKE_SHARE = 0.25
"""A spike is worth a word from this share of the first losses on: near zero one hard sample is far above the usual."""
_ADVICE = "a smaller lr, clip=1.0, or precision=fp32; the last checkpoint is from before"


class NonFiniteGuard:
    """What is known about the steps of one run: which are suspect, which are left out, what losses are usual."""

    def __init__(self, *, has_scaler: bool, earlier: Iterable[Event] = ()) -> None:
        self.skipped = {event.step for event in earlier if event.get("verdict") == "reproducible"}
        self.broken: tuple[int, str] | None = None
        """The first step known to have spoilt the numbers, and how it showed."""
        self.careful_until = 0
        """Up to this step every one is looked at before its update."""
        self.has_found = False
        """Whether a step that is bad was found since the run went back."""
        self.has_scaler = has_scaler
        self._num_scaled = 0
        self._num_returns = 0
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._sum = self._squares = 0.0
        self._level: float | None = None
        """The mean of the first losses."""

    def observe(self, step: int, loss: float) -> str | None:
        """Takes the loss of a step; in words what is unusual about it, if anything is."""
        if math.isfinite(loss):
            self._num_scaled = 0
            return self._observe_finite(loss)
        self._num_scaled += self.has_scaler
        if self.broken is None and not 0 < self._num_scaled <= MAX_SCALER_SKIPS:
            self.broken = step, f"the loss is {loss}"
        return None

    def _observe_finite(self, loss: float) -> str | None:
        count, mean, spread = len(self._usual), *self._mean_and_spread()
        if count == _WINDOW:
            self._add(-1, self._usual[0])
        self._usual.append(loss)
        self._add(1, loss)
        if self._level is None and count == _MIN_LOSSES:
            self._level = mean
        if self._level is None or loss <= max(mean + _SIGMAS * spread, _MIN_SPIKE_SHARE * self._level):
            return None
        return f"the loss is {loss:.4g}; the last {count} were {mean:.4g} with a spread of {spread:.2g}"

    def _add(self, sign: int, loss: float) -> None:
        # Sums that go along: a pass over the window for every step would cost more than all else here.
        self._sum += sign * loss
        self._squares += sign * loss * loss

    def _mean_and_spread(self) -> tuple[float, float]:
        count = max(1, len(self._usual))
        mean = self._sum / count
        return mean, math.sqrt(max(0.0, self._squares / count - mean * mean))

    def refuse(self) -> None:
        """Raises for the broken step: there is no way on."""
        assert self.broken is not None
        raise DivergedError("the loss is not a number", got=f"step {self.broken[0]}: {self.broken[1]}", try_=_ADVICE)

    def go_back(self) -> str:
        """The run returns to a checkpoint because of the broken step; why, in words. Refuses to do so forever."""
        assert self.broken is not None
        self._num_returns += 1
        if self.has_scaler or self._num_returns > MAX_ROLLBACKS:
            self.refuse()
        (step, how), self.broken = self.broken, None
        self.careful_until = max(self.careful_until, step)
        self.has_found = False
        return f"step {step:,}: {how}"

    def skip(self, step: int, how: str) -> None:
        """Leaves a step out from now on, unless too many were."""
        self.skipped.add(step)
        self.has_found = True
        in_a_row = next(n for n in range(1, len(self.skipped) + 2) if step - n not in self.skipped)
        if len(self.skipped) > MAX_SKIPPED or in_a_row > MAX_CONSECUTIVE_SKIPS:
            got = f"step {step}: {how}; with it {len(self.skipped)} steps would be left out, {in_a_row} in a row"
            raise DivergedError("the loss is not a number", got=got, try_=_ADVICE)
