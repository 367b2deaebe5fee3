"""Predictions of the memory that candidate settings need, corrected by measured peaks."""

from collections import defaultdict
from dataclasses import dataclass, field

from whet.autotune.step_bench import Settings
from whet.base.units import format_bytes

# One measured step: (micro-batch size, measured bytes, predicted bytes).
_Point = tuple[int, int, int | None]


@dataclass(slots=True)
class MemoryModel:
    """Estimates the memory of a step from predictions and from the measured peaks of earlier steps."""

    _points: dict[frozenset[object], list[_Point]] = field(default_factory=lambda: defaultdict(list))
    """Measured points, keyed by all settings except the micro-batch."""

    def add(self, settings: Settings, *, micro_batch: int, measured: int | None, predicted: int | None) -> None:
        """Record the measured peak of a step under these settings."""
        if measured is not None:
            self._points[_without_micro_batch(settings)].append((micro_batch, measured, predicted))

    def estimate(self, settings: Settings, *, micro_batch: int, predicted: int | None) -> int | None:
        """Return the estimated bytes of a step, or None if nothing is known.

        Two points with different micro-batches define a line. A single point corrects the prediction by its error.
        """
        points = sorted(self._points[_without_micro_batch(settings)])
        if points and points[-1][0] > points[0][0]:
            (few, low, _), (many, high, _) = points[0], points[-1]
            # Memory does not shrink as the micro-batch grows, so a negative slope is noise.
            slope = max(0.0, (high - low) / (many - few))
            return int(high + slope * (micro_batch - many))
        # If these settings have no points, use those of all other settings.
        points = points or [point for group in self._points.values() for point in group]
        if predicted is not None:
            # Assume that an underestimate grows with the micro-batch, which is the safer assumption.
            excesses = (
                (measured - before) * max(1.0, micro_batch / micro) for micro, measured, before in points if before
            )
            return int(predicted + max([0.0, *excesses]))
        # An upper bound, because memory grows at most in proportion to the micro-batch.
        return max((int(measured * max(1.0, micro_batch / micro)) for micro, measured, _ in points), default=None)

    def excess(self, settings: Settings, *, micro_batch: int, predicted: int | None, limit: int | None) -> str | None:
        """Return why the settings do not fit, such as "needs 9 of 5 GB", or None if they fit."""
        if limit is None:
            return None
        needed = self.estimate(settings, micro_batch=micro_batch, predicted=predicted)
        return None if needed is None or needed <= limit else f"needs {_ratio(needed, limit)}"


def _ratio(needed: int, limit: int) -> str:
    """Format two sizes as "A of B", with a single unit if they share it.

    >>> _ratio(9 * 2**30, 5 * 2**30), _ratio(300 * 2**20, 5 * 2**30)
    ('9 of 5 GB', '300 MB of 5 GB')
    """
    (number, unit), (most, most_unit) = format_bytes(needed).split(), format_bytes(limit).split()
    return f"{number} of {most} {unit}" if unit == most_unit else f"{number} {unit} of {most} {most_unit}"


def _without_micro_batch(settings: Settings) -> frozenset[object]:
    return frozenset((name, value) for name, value in settings.items() if name != "micro_batch")
