"""Downsampled curves of a run: a few hundred points from a million steps, without losing a spike.

A curve belongs to a field of one kind of event and is named by both: "step/loss", "step/seconds/data",
"health/memory/process", "eval/accuracy". Each point has the least, greatest and mean value of neighboring steps, and
the position of its first step on three axes: `step`, `samples` and time (`time` in unix seconds, `elapsed` in
training seconds), so that runs can be plotted over each other by any of them.

    history = History(run)
    downsample_curves(history, points=400)["step/loss"].points[0].samples
    downsample_curve(history, field="memory/process", kind="health", points=400)
"""

from collections.abc import Collection
from pathlib import Path

from whet.base.model import FrozenModel
from whet.run.event_block import SUMMARIZED_KINDS
from whet.run.events import History
from whet.run.folder import Run

# The kinds of events whose numbers make curves.
CURVE_KINDS = SUMMARIZED_KINDS


class CurvePoint(FrozenModel):
    """Neighboring steps as one point of a curve."""

    step: int
    """The first of the steps."""
    low: float | None
    high: float | None
    mean: float | None
    """Of the finite values; None when there are none."""
    nonfinite: int = 0
    """How many values were NaN or infinite."""
    time: float | None = None
    """Unix seconds at the first of the steps."""
    elapsed: float | None = None
    """Training seconds so far: the time between sessions does not count."""
    samples: int | None = None
    """Samples so far; None where unknown."""


class Curve(FrozenModel):
    """One field of one kind of event over the steps."""

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
    """All curves of a run by name ("step/loss"), each in at most `points` points. Long runs: from the index alone.

    With `is_growing`, points stay where they are while the run grows, until their number would exceed `points`; then
    pairs are merged. A long run then has between half of `points` and `points`.
    """
    from whet.run.downsample import bucket_curves  # numpy, which takes a tenth of a second to import

    history = run if isinstance(run, History) else History(run)
    curves = (
        curve for kind in kinds for curve in bucket_curves(history, kind=kind, points=points, is_growing=is_growing)
    )
    return {curve.name: curve for curve in curves}


def downsample_curve(run: Run | Path | History, *, field: str, points: int, kind: str = "step") -> Curve:
    """The curve of one field in at most `points` points.

    `field` is a name, or "seconds/data" for a name in a map. Long runs are drawn from the index alone.
    """
    from whet.run.downsample import bucket_curves

    history = run if isinstance(run, History) else History(run)
    empty = Curve(field=field, kind=kind, points=(), last_step=0)
    return next(bucket_curves(history, kind=kind, points=points, field=field), empty)
