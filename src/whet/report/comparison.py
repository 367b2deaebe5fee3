"""Compare several runs: their key figures, and the differences between them."""

import json
from collections.abc import Callable, Mapping, Sequence

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_count, format_seconds, format_speed, one_line, printable_line
from whet.config.sources import flatten
from whet.plan.render import format_value
from whet.report.plan_evidence import peak_memory
from whet.report.run_report import RunReport
from whet.report.table import align_columns
from whet.run.strict_json import StrictModel

MAX_COMPARED_RUNS = 12
_MAX_CELL = 40


class ComparisonRow(FrozenModel):
    """One name, and its value in each run. None means that a run does not have the name."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


class RunComparison(StrictModel):
    """Several runs side by side, in the given order."""

    runs: tuple[RunReport, ...]
    labels: tuple[str, ...]
    """Name of each run, with a number if several runs have the same name."""
    settings: tuple[ComparisonRow, ...]
    """Settings of the plans. Settings that differ come first."""
    config: tuple[ComparisonRow, ...]
    environment: tuple[ComparisonRow, ...]

    @property
    def sections(self) -> tuple[tuple[str, tuple[ComparisonRow, ...]], ...]:
        """The rows of the comparison by the title of their section."""
        return (
            ("settings of the plan", self.settings),
            ("configuration", self.config),
            ("environment", self.environment),
        )

    def for_page(self) -> "RunComparison":
        """Return a copy for a page, limited in size, and without the paths of the runs."""
        return self.model_copy(update={"runs": tuple(run.for_page() for run in self.runs)})


def compare_runs(reports: Sequence[RunReport]) -> RunComparison:
    """Compare between 2 and 12 runs. Raise UsageError for any other number."""
    if not 2 <= len(reports) <= MAX_COMPARED_RUNS:
        raise UsageError(
            "this number of runs cannot be compared",
            got=f"{len(reports)} runs",
            try_=f"between 2 and {MAX_COMPARED_RUNS} of them",
        )
    return RunComparison(
        runs=tuple(reports),
        labels=_labels([report.name for report in reports]),
        settings=_rows(reports, lambda report: {s.name: format_value(s.value) for s in report.settings}),
        config=_rows(reports, _config),
        environment=_rows(reports, _environment),
    )


def key_figures(report: RunReport) -> dict[str, str]:
    """Return the most important figures of a run by name, as text. Unknown figures are omitted."""
    of_total = f" of {report.total_steps:,}" if report.total_steps else ""
    samples = f", {format_count(report.samples)} samples" if report.samples is not None else ""
    figures = {"state": report.state, "steps": f"{report.step:,}{of_total}{samples}"}
    losses = report.losses or {"training loss": report.loss}
    figures |= {one_line(name.replace("_", " ")): f"{loss:.4g}" for name, loss in losses.items() if loss is not None}
    if report.goal is not None and report.goal_value is not None:
        figures[report.goal] = f"{report.goal_value:.4g}"
        if report.best_goal is not None and report.best_goal != report.goal_value:
            figures[f"best {report.goal}"] = f"{report.best_goal:.4g} (step {report.best_goal_step:,})"
        name = report.goal.removeprefix("val_")
        tested = report.metrics.get(f"test_{name}")
        if tested is not None:
            figures[f"test {name}"] = f"{tested:.4g}"
    speed = next((figure.actual for figure in report.planned_vs_actual if figure.name == "speed"), None)
    if speed is not None:
        figures["speed"] = format_speed(speed)
    if report.training_seconds > 0:
        figures["training time"] = format_seconds(report.training_seconds)
    memory = peak_memory(report)
    if memory is not None:
        figures["peak memory"] = format_bytes(memory)
    return figures


def figure_rows(comparison: RunComparison) -> list[tuple[str, list[str]]]:
    """Return the key figures as rows of a name and the value of each run."""
    figures = [key_figures(report) for report in comparison.runs]
    names = dict.fromkeys(name for each in figures for name in each)
    return [(name, [each.get(name, "-") for each in figures]) for name in names]


def render_comparison(comparison: RunComparison) -> str:
    """Return the comparison as plain text: key figures first, then the differences."""
    sections = [_table("", comparison.labels, figure_rows(comparison))]
    for title, rows in comparison.sections:
        different = [(row.name, [value or "-" for value in row.values]) for row in rows if row.differs]
        sections.append(_table(title, comparison.labels, different) if different else f"{title}: no differences")
    return "\n\n".join(sections)


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    # Runs in different folders may have the same name.
    counted = [names[: position + 1].count(name) for position, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name} ({count})" for name, count in zip(names, counted, strict=True))


def _rows(
    reports: Sequence[RunReport], values_of: Callable[[RunReport], Mapping[str, str]]
) -> tuple[ComparisonRow, ...]:
    each = [values_of(report) for report in reports]
    rows = []
    for name in dict.fromkeys(name for values in each for name in values):
        row = tuple(values.get(name) for values in each)
        rows.append(ComparisonRow(name=name, values=row, differs=len(set(row)) > 1))
    # sorted() is stable, so rows keep their order within both groups.
    return tuple(sorted(rows, key=lambda row: not row.differs))


def _config(report: RunReport) -> dict[str, str]:
    values = flatten(report.provenance.config)
    return {name: json.dumps(v) if isinstance(v, list | tuple) else format_value(v) for name, v in values.items()}


def _environment(report: RunReport) -> dict[str, str]:
    origin = report.provenance
    facts = {"machine": report.machine, "command": origin.command or "from Python"}
    return facts | {"data": (origin.data or "unknown")[:12]} | dict(origin.versions)


def _table(title: str, labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [(title, *labels), *((name, *values) for name, values in rows)]
    return "\n".join(align_columns([[_clip(cell) for cell in line] for line in lines]))


def _clip(text: str) -> str:
    clean = printable_line(text)
    return clean if len(clean) <= _MAX_CELL else clean[: _MAX_CELL - 3] + "..."
