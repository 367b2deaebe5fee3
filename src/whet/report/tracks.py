"""The curves of a run over steps, samples and training time, and where its time went."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from whet.base.model import FrozenModel
from whet.run.curve import Curve, CurvePoint, downsample_curves
from whet.run.events import History

_PHASE_NOTES = {
    "data": "waiting for the next samples",
    "transfer": "copying samples to the device",
    "forward": "computing the loss",
    "backward": "computing the gradients",
    "optimizer": "updating the weights",
    "evaluate": "measuring how good the model is",
    "save": "standing still for checkpoints",
    "cooldown": "pausing to cool down",
}


class PhaseTime(FrozenModel):
    """One part of the time."""

    name: str
    seconds: float
    share: float
    words: str


def phase_times(seconds: Mapping[str, float]) -> tuple[PhaseTime, ...]:
    """The parts in the order of a step, known ones first, with their shares of the whole."""
    whole = sum(seconds.values())
    if whole <= 0:
        return ()
    names = [
        *(name for name in _PHASE_NOTES if name in seconds),
        *(name for name in seconds if name not in _PHASE_NOTES),
    ]
    return tuple(
        PhaseTime(name=name, seconds=seconds[name], share=seconds[name] / whole, words=_PHASE_NOTES.get(name, ""))
        for name in names
    )


MAX_CURVES = 40
"""Of one track: an evaluation may return any number of numbers."""

Source = Literal["step", "eval", "health", "epoch"]
Unit = Literal["", "bytes", "samples/s", "percent"]

NON_STEP_PHASES = ("evaluate", "save", "cooldown")
"""Phases that are no part of an optimizer step."""

_SOURCES: tuple[Source, ...] = ("step", "eval", "health", "epoch")
_NO_CURVES = ("epoch", "samples", "shapes")
_SECONDS = "seconds/"


class TrackLine(FrozenModel):
    """One curve of a track; None where it has no finite value."""

    name: str
    unit: Unit = ""
    mean: tuple[float | None, ...]
    low: tuple[float | None, ...] | None = None
    """The least and greatest of the values behind a point; None where each point is one value."""
    high: tuple[float | None, ...] | None = None
    nonfinite: int = 0
    """How many values were NaN or infinite."""


class Track(FrozenModel):
    """Curves that share their places."""

    source: Source
    step: tuple[int, ...]
    seconds: tuple[float, ...]
    """Of work: the time between sittings does not count."""
    samples: tuple[int | None, ...]
    lines: tuple[TrackLine, ...]

    def line(self, name: str) -> TrackLine | None:
        """The curve of that name."""
        return next((line for line in self.lines if line.name == name), None)


def tracks(history: History, *, points: int, is_growing: bool = False) -> tuple[Track, ...]:
    """The tracks of a run that have something to show, each of at most `points` places or so.

    With `is_growing` places stay where they are while the run grows, so that a page need not jump.
    """
    curves = downsample_curves(history, points=points, kinds=_SOURCES, is_growing=is_growing).values()
    found = (_track(source, [curve for curve in curves if curve.kind == source]) for source in _SOURCES)
    return tuple(track for track in found if track.lines)


def _track(source: Source, curves: Sequence[Curve]) -> Track:
    drawn = [c for c in curves if c.field not in _NO_CURVES and not (source == "step" and c.field.startswith(_SECONDS))]
    places = {point.step: point for curve in drawn for point in curve.points}
    steps = sorted(places)
    lines = [_line(curve, steps) for curve in drawn[:MAX_CURVES]]
    speed = _speed(curves, steps) if source == "step" else None
    return Track(
        source=source,
        step=tuple(steps),
        seconds=tuple(_rounded(places[step].elapsed) or 0.0 for step in steps),
        samples=tuple(places[step].samples for step in steps),
        lines=tuple(lines if speed is None else [*lines, speed]),
    )


def _line(curve: Curve, steps: Sequence[int]) -> TrackLine:
    there = {point.step: point for point in curve.points}
    points = [there.get(step) for step in steps]
    is_single = all(point.low == point.high for point in curve.points)
    return TrackLine(
        name=curve.field,
        unit=_unit(curve.field),
        mean=tuple(_rounded(point.mean) if point else None for point in points),
        low=None if is_single else tuple(_rounded(point.low) if point else None for point in points),
        high=None if is_single else tuple(_rounded(point.high) if point else None for point in points),
        nonfinite=sum(point.nonfinite for point in curve.points),
    )


def _speed(curves: Sequence[Curve], steps: Sequence[int]) -> TrackLine | None:
    """Samples per second of step time: what evaluations, saves and rests took is not in it."""
    samples = next((_by_step(curve) for curve in curves if curve.field == "samples"), {})
    phases = [curve for curve in curves if curve.field.startswith(_SECONDS)]
    spent = [_by_step(curve) for curve in phases if curve.field.removeprefix(_SECONDS) not in NON_STEP_PHASES]
    values: list[float | None] = []
    for place, step in enumerate(steps):
        seconds = sum(one[step].mean or 0.0 for one in spent if step in one)
        batch = _samples_per_step(samples, steps, place)
        values.append(_rounded(batch / seconds) if batch and seconds > 0 else None)
    if all(value is None for value in values):
        return None
    return TrackLine(name="samples_per_second", unit="samples/s", mean=tuple(values))


def _by_step(curve: Curve) -> dict[int, CurvePoint]:
    return {point.step: point for point in curve.points}


def _samples_per_step(samples: dict[int, CurvePoint], steps: Sequence[int], place: int) -> float | None:
    """Between the first steps of this place and the next one; at the end as before."""
    left = place if place + 1 < len(steps) else place - 1
    here = samples.get(steps[max(0, left)])
    there = samples.get(steps[left + 1]) if left >= 0 else None
    if here is None or here.low is None:
        return None
    if there is None or there.low is None:
        return here.low / max(1, here.step)
    return (there.low - here.low) / max(1, there.step - here.step)


def _unit(name: str) -> Unit:
    if name.startswith("memory/") or name.endswith("_bytes"):
        return "bytes"
    if name == "samples_per_second":
        return "samples/s"
    return "percent" if name.startswith("use/") or name.endswith("_percent") else ""


def _rounded(value: float | None) -> float | None:
    """Seven digits are more than a page can show, and half the bytes."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.7g}")
