"""Detect NaN and Inf, and decide which steps to repeat or skip.

Losses are read late and in bulk, so that no step waits for the device. When a loss is not finite, the run is rolled
back to its last checkpoint, and every step up to the bad one is checked before its update. If the step is non-finite
again, it is skipped and logged with its samples. If all steps are finite this time, the fault was transient. Skipped
steps stay skipped after a resume.
"""

import math
from collections import deque
from collections.abc import Iterable

from whet.base.errors import DivergedError
from whet.run.event import Event

MAX_SKIPPED = 10
MAX_CONSECUTIVE_SKIPS = 3
MAX_SCALER_SKIPS = 20
"""Maximum number of consecutive steps that a loss scaler may skip. Each skip halves the scale."""
MAX_ROLLBACKS = 20

_WINDOW, _MIN_LOSSES, _SIGMAS = 128, 64, 6.0
_MIN_SPIKE_SHARE = 0.25
"""Losses below this share of the mean of the first losses are never spikes: near zero, one hard sample stands out."""
_HINT = "a smaller lr, clip=1.0, or precision=fp32; the last checkpoint is from before"
_DATA_HINT = "data without NaN and Inf: repair or drop these samples"


class NonFiniteGuard:
    """The non-finite steps, skipped steps and typical losses of one run."""

    def __init__(self, *, has_scaler: bool, earlier: Iterable[Event] = ()) -> None:
        self.skipped = {event.step for event in earlier if event.get("verdict") == "reproducible"}
        self.first_non_finite: tuple[int, str] | None = None
        """The first step known to be non-finite, and the symptom."""
        self.check_until_step = 0
        """Every step up to this one is checked before its update."""
        self.has_bad_step = False
        """Whether a bad step has been found since the last rollback."""
        self.is_data_bad = False
        """Whether the batch of a non-finite step itself contains NaN or Inf."""
        self.has_scaler = has_scaler
        self._num_scaler_skips = 0
        self._num_rollbacks = 0
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._sum = self._squares = 0.0
        self._initial_mean: float | None = None
        """The mean of the first losses; None until there are enough of them."""

    def observe(self, step: int, loss: float) -> str | None:
        """Record the loss of a step. Return a description if it is a spike, otherwise None."""
        if math.isfinite(loss):
            self._num_scaler_skips = 0
            return self._observe_finite(loss)
        self._num_scaler_skips += self.has_scaler
        if self.first_non_finite is None and not 0 < self._num_scaler_skips <= MAX_SCALER_SKIPS:
            self.first_non_finite = step, f"the loss is {loss}"
        return None

    def raise_diverged(self) -> None:
        """Raise the error for the non-finite step: the run cannot continue."""
        assert self.first_non_finite is not None
        step, how = self.first_non_finite
        raise self._diverged(f"step {step}: {how}")

    def _diverged(self, got: str) -> DivergedError:
        hint = _DATA_HINT if self.is_data_bad else _HINT
        return DivergedError("the loss or a weight is NaN or Inf", got=got, try_=hint)

    def start_rollback(self) -> str:
        """Start a rollback because of a non-finite step and return the reason. Raise after too many rollbacks."""
        assert self.first_non_finite is not None
        self._num_rollbacks += 1
        if self.has_scaler or self._num_rollbacks > MAX_ROLLBACKS:
            self.raise_diverged()
        (step, how), self.first_non_finite = self.first_non_finite, None
        self.check_until_step = max(self.check_until_step, step)
        self.has_bad_step = False
        return f"step {step:,}: {how}"

    def skip(self, step: int, how: str) -> None:
        """Skip a step from now on. Raise if too many steps have been skipped."""
        self.skipped.add(step)
        self.has_bad_step = True
        in_a_row = next(n for n in range(1, len(self.skipped) + 2) if step - n not in self.skipped)
        if len(self.skipped) > MAX_SKIPPED or in_a_row > MAX_CONSECUTIVE_SKIPS:
            got = f"step {step}: {how}; with it {len(self.skipped)} steps would be skipped, {in_a_row} in a row"
            raise self._diverged(got) from None

    def _observe_finite(self, loss: float) -> str | None:
        count, mean, deviation = len(self._recent), *self._mean_and_deviation()
        if count == _WINDOW:
            self._add(-1, self._recent[0])
        self._recent.append(loss)
        self._add(1, loss)
        if self._initial_mean is None and count == _MIN_LOSSES:
            self._initial_mean = mean
        if self._initial_mean is None:
            return None
        if loss <= max(mean + _SIGMAS * deviation, _MIN_SPIKE_SHARE * self._initial_mean):
            return None
        return f"the loss is {loss:.4g}; the last {count} were {mean:.4g} with a spread of {deviation:.2g}"

    def _add(self, sign: int, loss: float) -> None:
        # Running sums avoid a pass over the window in every step.
        self._sum += sign * loss
        self._squares += sign * loss * loss

    def _mean_and_deviation(self) -> tuple[float, float]:
        count = max(1, len(self._recent))
        mean = self._sum / count
        return mean, math.sqrt(max(0.0, self._squares / count - mean * mean))
