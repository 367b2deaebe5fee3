"""Mean, standard deviation and confidence interval of metrics over runs that differ only in their seed."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.base.statistics import mean_interval
from whet.report.run_report import RunReport, summarize
from whet.report.table import align_columns
from whet.run import durable, strict_json
from whet.run.disk import read_regular_file
from whet.run.folder import RUN_FILE, open_run
from whet.run.strict_json import StrictModel

SEEDS_FILE = "seeds.json"
FORMAT_VERSION = 1

_FRACTIONS = {"accuracy", "f1", "precision", "recall", "auc", "top1", "top5", "exact"}
# Words that mark a metric as not a fraction, as in "accuracy_loss".
_NOT_FRACTIONS = {"loss", "error"}


class MetricSpread(FrozenModel):
    """The distribution of one metric over all seeds that have it."""

    name: str
    values: tuple[float, ...]
    mean: float
    deviation: float | None = None
    """Standard deviation over seeds. Like the bounds, it is None for a single value or non-finite values."""
    low: float | None = None
    """Lower bound of the 95 % confidence interval of the mean (Student's t)."""
    high: float | None = None


class SeedsResult(StrictModel):
    """The results of all seeds, stored in the folder of their runs."""

    format_version: int = FORMAT_VERSION
    recipe: str
    seeds: tuple[int, ...]
    """All requested seeds."""
    done: tuple[int, ...]
    """Seeds whose runs are done. Only these are included in the metrics."""
    metrics: tuple[MetricSpread, ...] = ()


def seed_folder(folder: Path, seed: int) -> Path:
    return folder / f"seed-{seed}"


def metric_spread(name: str, values: Sequence[float]) -> MetricSpread:
    """Return the mean, standard deviation and confidence interval of the values.

    >>> spread = metric_spread("accuracy", [0.7, 0.8, 0.9])
    >>> round(spread.mean, 3), round(spread.deviation, 3), round(spread.low, 3), round(spread.high, 3)
    (0.8, 0.1, 0.552, 1.048)
    """
    mean = statistics.fmean(values)
    interval = mean_interval(values) if all(map(math.isfinite, values)) else None
    if interval is None:
        return MetricSpread(name=name, values=tuple(values), mean=mean)
    low, high = interval
    deviation = statistics.stdev(values)
    return MetricSpread(name=name, values=tuple(values), mean=mean, deviation=deviation, low=low, high=high)


def gather_seeds(folder: Path, seeds: Sequence[int], *, recipe: str) -> SeedsResult:
    """Collect the results of the finished runs of these seeds."""
    paths = {seed: seed_folder(folder, seed) for seed in seeds}
    reports = {seed: summarize(path) for seed, path in paths.items() if (path / RUN_FILE).exists()}
    done = {seed: report for seed, report in reports.items() if report.state == "done"}
    figures = [_figures(report) for report in done.values()]
    names = dict.fromkeys(name for one in figures for name in one)
    return SeedsResult(
        recipe=recipe,
        seeds=tuple(seeds),
        done=tuple(done),
        metrics=tuple(metric_spread(name, [one[name] for one in figures if name in one]) for name in names),
    )


def check_same_data(folder: Path, done: Sequence[int]) -> None:
    """Raise UsageError if seeds were trained on different data, because a file has changed between runs."""
    fingerprints = {seed: open_run(seed_folder(folder, seed)).metadata.get("data") for seed in done}
    other = [seed for seed in done if fingerprints[seed] != fingerprints[done[0]]]
    if other:
        raise UsageError(
            f"the seeds in {folder} were trained on different data",
            got=f"seed {', '.join(map(str, other))} on other data than seed {done[0]}",
            try_="remove the folders of one kind and train again, or another --run for the new data",
        )


def _figures(report: RunReport) -> dict[str, float]:
    """Return the best goal on the validation split, and the test metrics, or the newest metrics if there are none."""
    best = {} if report.best_goal is None else {f"best {report.goal} on val": report.best_goal}
    tested = {name: value for name, value in report.metrics.items() if name.startswith("test_")}
    return {**best, **(tested or report.metrics)}


def write_seeds(folder: Path, result: SeedsResult) -> None:
    """Write the results into the folder of the runs."""
    durable.write_file(folder / SEEDS_FILE, data=(strict_json.encode(result.as_json(), pretty=True) + "\n").encode())


def read_seeds(folder: Path) -> SeedsResult:
    """Read the results written by `write_seeds`."""
    path = folder / SEEDS_FILE
    try:
        return SeedsResult.from_json(strict_json.decode(read_regular_file(path)), where=path)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {path}", got=str(error)[:200], try_="run the same training command again"
        ) from None


def render_seeds(result: SeedsResult) -> list[str]:
    missing = [str(seed) for seed in result.seeds if seed not in result.done]
    pending = f"; not done yet: {', '.join(missing)}" if missing else ""
    lines = [f"seeds     {', '.join(map(str, result.done)) or 'none'} are done{pending}"]
    if not result.metrics:
        return lines
    rows = [("metric", "mean", "deviation", "95 % of the mean", "each")]
    for m in result.metrics:
        has_interval = m.low is not None and m.high is not None
        interval = format_interval(m.name, mean=m.mean, low=m.low, high=m.high, form=".4f") if has_interval else "-"  # type: ignore[arg-type]
        values = " ".join(f"{value:.4f}" for value in m.values[:10]) + (" ..." if len(m.values) > 10 else "")
        deviation = "-" if m.deviation is None else f"{m.deviation:.4f}"
        rows.append((m.name, f"{m.mean:.4f}", deviation, interval, values))
    return [*lines, *align_columns(rows)]


def format_interval(name: str, *, mean: float, low: float, high: float, form: str) -> str:
    """Format the bounds of a confidence interval. Bounds of a fraction are clipped to 0 and 1.

    >>> format_interval("accuracy", mean=0.2136, low=-0.1906, high=0.6179, form=".4g")
    '0 to 0.6179'
    """
    if is_fraction(name) and 0 <= mean <= 1:
        low, high = max(0.0, low), min(1.0, high)
    return f"{low:{form}} to {high:{form}}"


def is_fraction(name: str) -> bool:
    """Return whether a metric with this name lies between 0 and 1.

    >>> [is_fraction(name) for name in ("macro_f1", "best accuracy on val", "brier", "accuracy_loss")]
    [True, True, False, False]
    """
    words = set(name.lower().replace("_", " ").split())
    return bool(words & _FRACTIONS) and not words & _NOT_FRACTIONS
