"""Memory predictions, corrected by measured peaks."""

from collections import defaultdict
from dataclasses import dataclass, field

from whet.autotune.step_bench import Settings
from whet.base.units import format_bytes

_Point = tuple[int, int, int | None]
"""Micro-batch, bytes measured, bytes predicted."""


@dataclass(slots=True)
class MemoryModel:
    """What is known about memory: grows by one point with each preparation."""

    _points: dict[frozenset[object], list[_Point]] = field(default_factory=lambda: defaultdict(list))
    """By all other settings."""

    def learn(self, settings: Settings, *, micro_batch: int, measured: int | None, predicted: int | None) -> None:
        """A step under these settings has shown what it needs."""
        if measured is not None:
            self._points[_others(settings)].append((micro_batch, measured, predicted))

    def needed(self, settings: Settings, *, micro_batch: int, predicted: int | None) -> int | None:
        """The bytes a step will need; None where nothing is known.

        Two points give a line: what each sample adds. One point says by how much predictions were too low.
        """
        points = sorted(self._points[_others(settings)])
        if points and points[-1][0] > points[0][0]:
            (few, low, _), (many, high, _) = points[0], points[-1]
            slope = max(0.0, (high - low) / (many - few))
            return int(high + slope * (micro_batch - many))
        points = points or self._all()
        if predicted is not None:
            # What was predicted too low is taken to grow with the samples: the worse of two guesses.
            excesses = (
                (measured - before) * max(1.0, micro_batch / micro) for micro, measured, before in points if before
            )
            return int(predicted + max([0.0, *excesses]))
        # Nothing grows faster than the number of samples.
        return max((int(measured * max(1.0, micro_batch / micro)) for micro, measured, _ in points), default=None)

    def refusal(self, settings: Settings, *, micro_batch: int, predicted: int | None, limit: int | None) -> str | None:
        """Why it must not be tried, in words; None where it may."""
        if limit is None:
            return None
        needed = self.needed(settings, micro_batch=micro_batch, predicted=predicted)
        if needed is None or needed <= limit:
            return None
        return f"needs {_of(needed, limit)}"

    def _all(self) -> list[_Point]:
        return [point for points in self._points.values() for point in points]


def _of(needed: int, limit: int) -> str:
    """
    >>> _of(9 * 2**30, 5 * 2**30), _of(300 * 2**20, 5 * 2**30)
    ('9 of 5 GB', '300 MB of 5 GB')
    """
    (number, unit), (most, most_unit) = format_bytes(needed).split(), format_bytes(limit).split()
    return f"{number} of {most} {unit}" if unit == most_unit else f"{number} {unit} of {most} {most_unit}"


def _others(settings: Settings) -> frozenset[object]:
    return frozenset((name, value) for name, value in settings.items() if name != "micro_batch")
