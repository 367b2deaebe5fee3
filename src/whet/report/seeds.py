"""What do runs that differ in their seed alone say together? The mean of each metric, and how far they spread."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from whet.base.errors import UsageError
from whet.base.record import Record
from whet.report.interval import interval_words
from whet.report.summary import Report, summarize
from whet.run import durable, strict_json
from whet.run.folder import RUN_FILE, open_run
from whet.run.plain_file import read_plain
from whet.run.strict_json import StrictRecord

SEEDS_FILE = "seeds.json"
FORMAT_VERSION = 1

_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t: 95 % lie within so many standard errors, for 1 to 30 degrees of freedom."""


class Spread(Record):
    """One metric over all seeds that have it."""

    name: str
    values: tuple[float, ...]
    mean: float
    deviation: float | None = None
    """The standard deviation of a run; None for a single one, as are the bounds."""
    low: float | None = None
    """The 95 % interval of the mean, by Student's t."""
    high: float | None = None


class Seeds(StrictRecord):
    """What is written beside the runs."""

    format_version: int = FORMAT_VERSION
    recipe: str
    seeds: tuple[int, ...]
    """All that were asked for."""
    done: tuple[int, ...]
    """Those whose run is done; the metrics are theirs."""
    metrics: tuple[Spread, ...] = ()


def folder_of_seed(folder: Path, seed: int) -> Path:
    """Where the run of a seed lies."""
    return folder / f"seed-{seed}"


def spread(name: str, values: Sequence[float]) -> Spread:
    """The mean of some values and what can be said about it.

    >>> found = spread("accuracy", [0.7, 0.8, 0.9])
    >>> round(found.mean, 3), round(found.deviation, 3), round(found.low, 3), round(found.high, 3)
    (0.8, 0.1, 0.552, 1.048)
    """
    mean = statistics.fmean(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Spread(name=name, values=tuple(values), mean=mean)
    deviation = statistics.stdev(values)
    freedom = len(values) - 1
    # Beyond the table the first term of the expansion around the normal distribution is right to three digits.
    t = _T_95[freedom - 1] if freedom <= len(_T_95) else 1.960 + 2.372 / freedom
    half = t * deviation / math.sqrt(len(values))
    return Spread(name=name, values=tuple(values), mean=mean, deviation=deviation, low=mean - half, high=mean + half)


def gather_seeds(folder: Path, seeds: Sequence[int], *, recipe: str) -> Seeds:
    """What the runs of these seeds say; those that are not done are left out."""
    paths = {seed: folder_of_seed(folder, seed) for seed in seeds}
    reports = {seed: summarize(path) for seed, path in paths.items() if (path / RUN_FILE).exists()}
    done = {seed: report for seed, report in reports.items() if report.state == "done"}
    figures = [_figures(report) for report in done.values()]
    names = dict.fromkeys(name for one in figures for name in one)
    return Seeds(
        recipe=recipe,
        seeds=tuple(seeds),
        done=tuple(done),
        metrics=tuple(spread(name, [one[name] for one in figures if name in one]) for name in names),
    )


def refuse_other_data(folder: Path, done: Sequence[int]) -> None:
    """Runs of different data have no mean: a file may have changed after the first of them was done."""
    prints = {seed: open_run(folder_of_seed(folder, seed)).kept.get("data") for seed in done}
    other = [seed for seed in done if prints[seed] != prints[done[0]]]
    if other:
        raise UsageError(
            f"the seeds in {folder} were trained on different data",
            got=f"seed {', '.join(map(str, other))} on other data than seed {done[0]}",
            try_="remove the folders of one kind and train again, or another --run for the new data",
        )


def _figures(report: Report) -> dict[str, float]:
    """The best goal on the dev part, and the test metrics; without a test part the newest ones."""
    goal = report.goal
    best = {} if goal is None or goal.best is None else {f"best {goal.name} on dev": goal.best}
    tested = {name: value for name, value in report.metrics.items() if name.startswith("test_")}
    return {**best, **(tested or report.metrics)}


def write_seeds(folder: Path, found: Seeds) -> None:
    """Puts them beside the runs."""
    durable.write_file(folder / SEEDS_FILE, data=(strict_json.encode(found.as_json(), pretty=True) + "\n").encode())


def read_seeds(folder: Path) -> Seeds:
    """What `write_seeds` wrote."""
    path = folder / SEEDS_FILE
    try:
        return Seeds.from_json(strict_json.decode(read_plain(path)), where=path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}", got=str(error)[:200], try_="the same training command again") from None


def seeds_lines(found: Seeds) -> list[str]:
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
                "-" if low is None or high is None else interval_words(name, mean=mean, low=low, high=high, form=".4f"),
                " ".join(f"{value:.4f}" for value in metric.values[:10]) + (" ..." if len(metric.values) > 10 else ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [*lines, *("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)]
