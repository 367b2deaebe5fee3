"""A run opened from Python, with methods for its curves, plots and summary."""

import math
from pathlib import Path
from typing import Literal

from whet.base.errors import UsageError, closest_match
from whet.base.units import format_seconds
from whet.report.export.tables import export_name
from whet.report.run_report import RunReport, summarize
from whet.report.run_status import goal_name, read_status
from whet.report.svg import CurveBand, SvgImage, draw_curve_panels
from whet.run import folder
from whet.run.curve import CurvePoint, downsample_curves
from whet.run.events import History

POINTS = 600
_MAX_PANELS = 8

Axis = Literal["step", "samples", "seconds"]
Curves = dict[str, dict[str, list[float]]]


class RunView(folder.Run):
    """A run folder with its curves. Each call reads the log again."""

    def curves(self, *, points: int = POINTS) -> Curves:
        """Return all curves by name ("train/loss", "eval/accuracy", "seconds/data", "health/memory/process").

        A curve is a dictionary of lists of equal length. The x positions are `step`, `samples`, `seconds` (of training)
        and `time` (unix seconds). `mean`, `low` and `high` are the mean, minimum and maximum over the steps up to the
        next point. Unknown and non-finite values are NaN. A curve has at most `points` points; `low` and `high` keep
        spikes. Use `pandas.DataFrame(run.curves()["train/loss"])` to get a table.
        """
        if points < 1:
            raise UsageError("a curve needs points", got=f"points={points}", try_=f"points={POINTS}")
        downsampled = downsample_curves(History(self), points=points)
        return {export_name(curve.kind, curve.field): _lists(curve.points) for curve in downsampled.values()}

    def plot(self, *names: str, by: Axis = "step", points: int = POINTS) -> SvgImage:
        """Plot curves, by default the loss and the goal metric. Notebooks display the image. `.save(path)` writes it.

        A name is a key of `curves()` or its last part, as in `run.plot("loss", "accuracy", by="samples")`.
        """
        if by not in ("step", "samples", "seconds"):
            raise UsageError("no such axis", got=by, try_="by='step', 'samples' or 'seconds'")
        curves = self.curves(points=points)
        chosen = [_match_curve(name, curves) for name in names] if names else self._default_curves(curves)
        lines = [_line(name, curves[name], by=by) for name in chosen[:_MAX_PANELS]]
        report = self.summary()
        of_all = f" of {report.total_steps:,}" if report.total_steps else ""
        took = format_seconds(report.training_seconds)
        return draw_curve_panels(
            f"{self.path.name}: {report.recipe}",
            lines,
            subtitle=f"{report.state}, step {report.step:,}{of_all}, {took} of training",
            x_title=by if by != "seconds" else "seconds of training",
        )

    def summary(self) -> RunReport:
        """Return the report of the run, as shown by `whet report`."""
        return summarize(self)

    def _default_curves(self, curves: Curves) -> list[str]:
        goal = goal_name(History(self))
        losses = read_status(self).losses
        usual = [
            *(f"train/{name}" for name in losses or ("loss",)),
            *([f"eval/{goal}"] if goal else [n for n in curves if n.startswith("eval/")][:2]),
        ]
        return [name for name in usual if name in curves]


def open_run(path: Path | str) -> RunView:
    """Open the run in a folder. It has `.curves()`, `.plot()`, `.summary()`, and its files, such as `.config`."""
    run = folder.open_run(path)
    return RunView(**{name: getattr(run, name) for name in type(run).model_fields})


def _match_curve(name: str, curves: Curves) -> str:
    if name in curves:
        return name
    ends = [known for known in curves if known.endswith(f"/{name}")]
    if ends:
        return ends[0]
    meant = closest_match(name, [*curves, *(known.partition("/")[2] for known in curves)])
    raise UsageError("the run has no such curve", got=name, try_=meant or ", ".join(curves) or "later: it has none yet")


def _lists(points: tuple[CurvePoint, ...]) -> dict[str, list[float]]:
    return {
        "step": [point.step for point in points],
        "samples": [_number(point.samples) for point in points],
        "seconds": [_number(point.elapsed) for point in points],
        "time": [_number(point.time) for point in points],
        "mean": [_number(point.mean) for point in points],
        "low": [_number(point.low) for point in points],
        "high": [_number(point.high) for point in points],
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _line(name: str, curve: dict[str, list[float]], *, by: Axis) -> CurveBand:
    # Plot by step if the number of samples is unknown.
    x = curve[by] if all(math.isfinite(place) for place in curve[by]) else curve["step"]
    return CurveBand(name, x, curve["low"], curve["mean"], curve["high"])
