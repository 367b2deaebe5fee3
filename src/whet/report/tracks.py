"""The curves of a run over steps, samples and training time, and the time of its steps by phase.

A track holds the curves of one kind of event. They share their x positions, so that a page can plot several runs by
step, samples or time. Curves of long runs are computed from the index of the log alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from whet.base.model import FrozenModel
from whet.config.goal import GoalMode, metric_mode
from whet.run.curve import Curve, CurvePoint, downsample_curves
from whet.run.event import as_number
from whet.run.events import History

# Maximum curves per track, because an evaluation may return any number of metrics.
MAX_CURVES = 40

CurveSource = Literal["step", "eval", "health", "epoch"]
Unit = Literal["", "bytes", "samples/s", "percent"]

# Phases that are not part of an optimizer step.
NON_STEP_PHASES = ("evaluate", "save", "cooldown")

_SOURCES: tuple[CurveSource, ...] = ("step", "eval", "health", "epoch")
_NOT_DRAWN = ("epoch", "samples", "num_shapes")
_SECONDS = "seconds/"
# Phases in the order of a step.
_PHASE_NOTES = {
    "data": "waiting for the next samples",
    "transfer": "copying samples to the device",
    "forward": "computing the loss",
    "backward": "computing the gradients",
    "optimizer": "updating the weights",
    "evaluate": "evaluating the model",
    "save": "training paused for checkpoints",
    "cooldown": "pausing to cool down",
    "verify": "checking the model before the first step",
}


class TrackLine(FrozenModel):
    """One curve of a track. None in `mean`, `low` and `high` marks a point without a finite value."""

    name: str
    unit: Unit = ""
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    """Minimum of the values of each point, or None if each point is a single value. `high` is the maximum."""
    high: tuple[float | None, ...] | None = None
    nonfinite: int = 0
    """Number of values that were NaN or infinite."""
    mode: GoalMode | None = None
    """Whether lower ("min") or higher ("max") values are better, or None if unknown."""


class Track(FrozenModel):
    """Curves that share their x positions."""

    source: CurveSource
    step: tuple[int, ...]
    seconds: tuple[float, ...]
    """Training seconds, without the time between sessions."""
    samples: tuple[int | None, ...]
    lines: tuple[TrackLine, ...]

    def line(self, name: str) -> TrackLine | None:
        return next((line for line in self.lines if line.name == name), None)

    def curve(self, name: str) -> Curve | None:
        """Return the curve with this name as points, for text charts."""
        line = self.line(name)
        if line is None:
            return None
        columns = zip(self.step, line.low or line.mean, line.high or line.mean, line.mean, strict=True)
        points = tuple(
            # A point without a mean is a gap if its values were NaN or Inf. Otherwise it has no values, and is dropped.
            CurvePoint(step=step, low=low, high=high, mean=mean, nonfinite=int(mean is None))
            for step, low, high, mean in columns
            if mean is not None or line.nonfinite
        )
        return Curve(field=name, kind=self.source, points=points, last_step=self.step[-1] if self.step else 0)


class PhaseTime(FrozenModel):
    """The total time of one phase of the run, such as the forward pass of all steps."""

    name: str
    seconds: float
    share: float
    note: str


def tracks(history: History, *, points: int, is_growing: bool = False) -> tuple[Track, ...]:
    """Return the tracks of a run that have curves, each with at most about `points` x positions.

    With `is_growing`, x positions stay the same while the run grows, so that curves on a page do not jump.
    """
    curves = downsample_curves(history, points=points, kinds=_SOURCES, is_growing=is_growing).values()
    candidates = (_track(source, [curve for curve in curves if curve.kind == source]) for source in _SOURCES)
    return tuple(track for track in candidates if track.lines)


def phase_times(history: History) -> tuple[PhaseTime, ...]:
    """Return the time and share of each phase. Known phases come first, in the order of a step."""
    seconds: dict[str, float] = {}
    for block in history.step_blocks():
        for field in block.fields:
            if field.startswith("step/seconds/") and (stats := block.stat(field.removeprefix("step/"))) is not None:
                name = field.removeprefix("step/seconds/")
                seconds[name] = seconds.get(name, 0.0) + stats.total
    for event in history.events(kinds=("end",)):  # Add the time after the last step.
        spent = event.get("seconds")
        for name, value in spent.items() if isinstance(spent, Mapping) else ():
            seconds[name] = seconds.get(name, 0.0) + (as_number(value) or 0.0)
    total = sum(seconds.values())
    if total <= 0:
        return ()
    names = [*(name for name in _PHASE_NOTES if name in seconds), *(n for n in seconds if n not in _PHASE_NOTES)]
    return tuple(
        PhaseTime(name=name, seconds=seconds[name], share=seconds[name] / total, note=_PHASE_NOTES.get(name, ""))
        for name in names
    )


def _track(source: CurveSource, curves: Sequence[Curve]) -> Track:
    drawn = [c for c in curves if c.field not in _NOT_DRAWN and not (source == "step" and c.field.startswith(_SECONDS))]
    points = {point.step: point for curve in drawn for point in curve.points}
    steps = sorted(points)
    lines = [_line(curve, steps) for curve in drawn[:MAX_CURVES]]
    speed = _speed(curves, steps) if source == "step" else None
    return Track(
        source=source,
        step=tuple(steps),
        seconds=tuple(_rounded(points[step].elapsed) or 0.0 for step in steps),
        samples=tuple(points[step].samples for step in steps),
        lines=tuple(lines if speed is None else [*lines, speed]),
    )


def _line(curve: Curve, steps: Sequence[int]) -> TrackLine:
    by_step = _by_step(curve)
    points = [by_step.get(step) for step in steps]
    is_single = all(point.low == point.high for point in curve.points)
    return TrackLine(
        name=curve.field,
        unit=_unit(curve.field),
        mean=tuple(_rounded(point.mean) if point else None for point in points),
        low=None if is_single else tuple(_rounded(point.low) if point else None for point in points),
        high=None if is_single else tuple(_rounded(point.high) if point else None for point in points),
        nonfinite=sum(point.nonfinite for point in curve.points),
        mode=metric_mode(curve.field) if curve.kind in ("step", "eval") else None,
    )


def _speed(curves: Sequence[Curve], steps: Sequence[int]) -> TrackLine | None:
    """Return the curve of samples per second of step time, without evaluations, saves and cooldown pauses."""
    samples = next((_by_step(curve) for curve in curves if curve.field == "samples"), {})
    phases = [curve for curve in curves if curve.field.startswith(_SECONDS)]
    spent = [_by_step(curve) for curve in phases if curve.field.removeprefix(_SECONDS) not in NON_STEP_PHASES]
    values: list[float | None] = []
    for position, step in enumerate(steps):
        seconds = sum(phase[step].mean or 0.0 for phase in spent if step in phase)
        batch = _samples_per_step(samples, steps, position)
        values.append(_rounded(batch / seconds) if batch and seconds > 0 else None)
    if all(value is None for value in values):
        return None
    return TrackLine(name="samples_per_second", unit="samples/s", mean=tuple(values))


def _by_step(curve: Curve) -> dict[int, CurvePoint]:
    return {point.step: point for point in curve.points}


def _samples_per_step(samples: dict[int, CurvePoint], steps: Sequence[int], position: int) -> float | None:
    """Return the mean samples per step from this point to the next one."""
    # The last point has no next point, so use the interval before it.
    left = position if position + 1 < len(steps) else position - 1
    start = samples.get(steps[max(0, left)])
    following = samples.get(steps[left + 1]) if left >= 0 else None
    if start is None or start.low is None:
        return None
    if following is None or following.low is None:
        return start.low / max(1, start.step)
    return (following.low - start.low) / max(1, following.step - start.step)


def _unit(name: str) -> Unit:
    if name.startswith("memory/") or name.endswith("_bytes"):
        return "bytes"
    if name == "samples_per_second":
        return "samples/s"
    return "percent" if name.startswith("utilization/") or name.endswith("_percent") else ""


def _rounded(value: float | None) -> float | None:
    """Round a value to seven digits. A page cannot show more, and the JSON becomes half as large."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
