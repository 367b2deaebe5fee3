"""Downsampled curves of a run: a few hundred points from a million steps, without losing a spike.

A curve shows one field of one kind of event and is named after both: "step/loss", "step/seconds/data",
"health/memory/process", "eval/accuracy". Each point has the minimum, maximum and mean of neighboring steps. The x
position of its first step is given as `step`, `samples`, `time` (unix seconds) and `elapsed` (training seconds), so
that several runs can be plotted over any of them.

    history = History(run)
    downsample_curves(history, points=400)["step/loss"].points[0].samples
    downsample_curve(history, field="memory/process", kind="health", points=400)
"""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from whet.base.model import FrozenModel
from whet.run.event_block import SUMMARIZED_KINDS
from whet.run.events import History
from whet.run.folder import Run

# Kinds of events whose numeric fields become curves.
CURVE_KINDS = SUMMARIZED_KINDS


class CurvePoint(NamedTuple):
    """One point of a curve, which summarizes several neighboring steps."""

    step: int
    """First of the summarized steps."""
    low: float | None
    high: float | None
    mean: float | None
    """Mean of the finite values, or None if there are none."""
    nonfinite: int = 0
    """Number of values that were NaN or infinite."""
    time: float | None = None
    """Unix seconds at the first step."""
    elapsed: float | None = None
    """Training seconds so far, excluding the time between sessions."""
    samples: int | None = None
    """Samples so far, or None if unknown."""


class Curve(FrozenModel):
    """The values of one field of one kind of event, by step."""

    field: str
    points: tuple[CurvePoint, ...]
    last_step: int
    kind: str = "step"

    @property
    def name(self) -> str:
        """Kind and field, such as "step/loss"."""
        return f"{self.kind}/{self.field}"


def downsample_curves(
    run: Run | Path | History, *, points: int, kinds: Collection[str] = CURVE_KINDS, is_growing: bool = False
) -> dict[str, Curve]:
    """Return all curves of a run by name ("step/loss"), each with at most `points` points.

    Curves of long runs are computed from the index alone. With `is_growing`, points keep their x positions while the
    run grows. When there would be more than `points`, pairs are merged, so a long run always has at least `points` / 2.
    """
    from whet.run.downsample import bucket_curves  # imports numpy, which takes 0.1 s

    history = run if isinstance(run, History) else History(run)
    curves = (
        curve for kind in kinds for curve in bucket_curves(history, kind=kind, points=points, is_growing=is_growing)
    )
    return {curve.name: curve for curve in curves}


def downsample_curve(run: Run | Path | History, *, field: str, points: int, kind: str = "step") -> Curve:
    """Return the curve of one field with at most `points` points.

    `field` is a name, or a path such as "seconds/data" for an entry of a map. Curves of long runs are computed from the
    index alone.
    """
    from whet.run.downsample import bucket_curves

    history = run if isinstance(run, History) else History(run)
    empty = Curve(field=field, kind=kind, points=(), last_step=0)
    return next(bucket_curves(history, kind=kind, points=points, field=field), empty)
