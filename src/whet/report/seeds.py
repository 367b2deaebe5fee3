"""Runs that differ only in their seed: mean, deviation and confidence interval of each metric."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.report.run_report import RunReport, summarize
from whet.run import durable, strict_json
from whet.run.disk import read_regular_file
from whet.run.folder import RUN_FILE, open_run
from whet.run.strict_json import StrictModel

_FRACTIONS = {"accuracy", "f1", "precision", "recall", "auc", "top1", "top5", "exact"}
_NOT_FRACTIONS = {"loss", "error"}
"""A loss on top of a share is none."""


def is_fraction(name: str) -> bool:
    """Whether a metric of this name is a part of a whole.

    >>> [is_share(name) for name in ("macro_f1", "best accuracy on dev", "brier", "accuracy_loss")]
    [True, True, False, False]
    """
    words = set(name.lower().replace("_", " ").split())
    return bool(words & _FRACTIONS) and not words & _NOT_FRACTIONS


def format_interval(name: str, *, mean: float, low: float, high: float, form: str) -> str:
    """The bounds as they are shown; a share that is told in percent is left as it is.

    >>> interval_words("accuracy", mean=0.2136, low=-0.1906, high=0.6179, form=".4g")
    '0 to 0.6179'
    """
    if is_fraction(name) and 0 <= mean <= 1:
        low, high = max(0.0, low), min(1.0, high)
    return f"{low:{form}} to {high:{form}}"


SEEDS_FILE = "seeds.json"
FORMAT_VERSION = 1

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t: 95 % lie within so many standard errors, for 1 to 30 degrees of freedom."""


class MetricSpread(FrozenModel):
    """One metric over all seeds that have it."""

    name: str
    values: tuple[float, ...]
    mean: float
    deviation: float | None = None
    """The standard deviation of a run; None for a single one, as are the bounds."""
    low: float | None = None
    """The 95 % interval of the mean, by Student's t."""
    high: float | None = None


class SeedsResult(StrictModel):
    """What is written beside the runs."""

    format_version: int = FORMAT_VERSION
    recipe: str
    seeds: tuple[int, ...]
    """All that were asked for."""
    done: tuple[int, ...]
    """Those whose run is done; the metrics are theirs."""
    metrics: tuple[MetricSpread, ...] = ()


def seed_folder(folder: Path, seed: int) -> Path:
    """Where the run of a seed lies."""
    return folder / f"seed-{seed}"


def metric_spread(name: str, values: Sequence[float]) -> MetricSpread:
    """The mean of some values and what can be said about it.

    >>> found = spread("accuracy", [0.7, 0.8, 0.9])
    >>> round(found.mean, 3), round(found.deviation, 3), round(found.low, 3), round(found.high, 3)
    (0.8, 0.1, 0.552, 1.048)
    """
    mean = statistics.fmean(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return MetricSpread(name=name, values=tuple(values), mean=mean)
    deviation = statistics.stdev(values)
    freedom = len(values) - 1
    # Beyond the table the first term of the expansion around the normal distribution is right to three digits.
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.960 + 2.372 / freedom
    half = t * deviation / math.sqrt(len(values))
    return MetricSpread(
        name=name, values=tuple(values), mean=mean, deviation=deviation, low=mean - half, high=mean + half
    )


def gather_seeds(folder: Path, seeds: Sequence[int], *, recipe: str) -> SeedsResult:
    """What the runs of these seeds say; those that are not done are left out."""
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
    """Runs of different data have no mean: a file may have changed after the first of them was done."""
    prints = {seed: open_run(seed_folder(folder, seed)).metadata.get("data") for seed in done}
    other = [seed for seed in done if prints[seed] != prints[done[0]]]
    if other:
        raise UsageError(
            f"the seeds in {folder} were trained on different data",
            got=f"seed {', '.join(map(str, other))} on other data than seed {done[0]}",
            try_="remove the folders of one kind and train again, or another --run for the new data",
        )


def _figures(report: RunReport) -> dict[str, float]:
    """The best goal on the dev part, and the test metrics; without a test part the newest ones."""
    best = {} if report.best_goal is None else {f"best {report.goal} on val": report.best_goal}
    tested = {name: value for name, value in report.metrics.items() if name.startswith("test_")}
    return {**best, **(tested or report.metrics)}


def write_seeds(folder: Path, found: SeedsResult) -> None:
    """Puts them beside the runs."""
    durable.write_file(folder / SEEDS_FILE, data=(strict_json.encode(found.as_json(), pretty=True) + "\n").encode())


def read_seeds(folder: Path) -> SeedsResult:
    """What `write_seeds` wrote."""
    path = folder / SEEDS_FILE
    try:
        return SeedsResult.from_json(strict_json.decode(read_regular_file(path)), where=path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}", got=str(error)[:200], try_="the same training command again") from None


def render_seeds(found: SeedsResult) -> list[str]:
    """A table of them."""
    open_ones = [str(seed) for seed in found.seeds if seed not in found.done]
    waiting = f"; not done yet: {', '.join(open_ones)}" if open_ones else ""
    lines = [f"seeds     {', '.join(map(str, found.done)) or 'none'} are done{waiting}"]
    if not found.metrics:
        return lines
    rows = [("metric", "mean", "deviation", "95 % of the mean", "each")]
    for metric in found.metrics:
        name, mean, low, high = metric.name, metric.mean, metric.low, metric.high
        rows.append(
            (
                name,
                f"{mean:.4f}",
                "-" if metric.deviation is None else f"{metric.deviation:.4f}",
                "-"
                if low is None or high is None
                else format_interval(name, mean=mean, low=low, high=high, form=".4f"),
                " ".join(f"{value:.4f}" for value in metric.values[:10]) + (" ..." if len(metric.values) > 10 else ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [*lines, *("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
