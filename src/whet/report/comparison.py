"""Several runs side by side: key figures and what differs between them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.base.errors import UsageError
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_count, format_seconds, printable
from whet.plan.render import format_value
from whet.report.run_view import RunView
from whet.run.strict_json import StrictModel

MAX_COMPARED_RUNS = 12


class ComparisonRow(FrozenModel):
    """One thing, as each run has it; None where a run does not have it."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


class RunComparison(StrictModel):
    """Runs side by side, in the order they were named."""

    runs: tuple[RunView, ...]
    labels: tuple[str, ...]
    """What each run is called here: its name, with a number where two have the same."""
    settings: tuple[ComparisonRow, ...]
    """Of the plans; those that differ first."""
    config: tuple[ComparisonRow, ...]
    environment: tuple[ComparisonRow, ...]


def compare_runs(views: Sequence[RunView]) -> RunComparison:
    """The comparison of runs; between two and a dozen can be told apart."""
    if not 2 <= len(views) <= MAX_COMPARED_RUNS:
        raise UsageError(
            "that many runs cannot be compared",
            got=f"{len(views)} runs",
            try_=f"between 2 and {MAX_COMPARED_RUNS} of them",
        )
    return RunComparison(
        runs=tuple(views),
        labels=_labels([view.name for view in views]),
        settings=_comparison_rows(views, lambda view: {s.name: format_value(s.value) for s in view.report.settings}),
        config=_comparison_rows(views, lambda view: _flatten(view.origin.config)),
        environment=_comparison_rows(views, _environment),
    )


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    counted = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name} ({count})" for name, count in zip(names, counted, strict=True))


def _comparison_rows(
    views: Sequence[RunView], told: Callable[[RunView], Mapping[str, str]]
) -> tuple[ComparisonRow, ...]:
    each = [told(view) for view in views]
    names = dict.fromkeys(name for one in each for name in one)
    rows = []
    for name in names:
        values = tuple(one.get(name) for one in each)
        rows.append(ComparisonRow(name=name, values=values, differs=len(set(values)) > 1))
    return tuple(sorted(rows, key=lambda row: not row.differs))


def _flatten(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{above}{name}.")
        else:
            flat[above + name] = json.dumps(value) if isinstance(value, list | tuple) else format_value(value)
    return flat


def _environment(view: RunView) -> dict[str, str]:
    facts = {"machine": view.report.machine, "command": view.origin.command or "from Python"}
    return facts | {"data": (view.origin.data or "unknown")[:12]} | dict(view.origin.versions)


def key_figures(view: RunView) -> dict[str, str]:
    """The figures by name, as text; what is not known is left out."""
    report = view.report
    found = {"state": report.state, "steps": _steps_text(view)}
    if report.loss.last is not None:
        found["training loss"] = f"{report.loss.last:.4g}"
    if report.goal is not None and report.goal.last is not None:
        found[report.goal.name] = f"{report.goal.last:.4g}"
        if report.goal.best is not None and report.goal.best != report.goal.last:
            found[f"best {report.goal.name}"] = f"{report.goal.best:.4g} (step {report.goal.best_step:,})"
        tested = report.metrics.get(f"test_{report.goal.name}")
        if tested is not None:
            found[f"test {report.goal.name}"] = f"{tested:.4g}"
    speed = next((one.happened for one in view.foretold if one.name == "speed"), None)
    if speed is not None:
        found["speed"] = f"{speed:,.4g} samples/s" if speed < 1000 else f"{speed:,.0f} samples/s"
    if report.training_seconds > 0:
        found["time at work"] = format_seconds(report.training_seconds)
    memory = peak_memory(view)
    if memory is not None:
        found["most memory"] = format_bytes(memory)
    return found


def peak_memory(view: RunView) -> float | None:
    """The most that tensors took, or the process where there is no such counter."""
    for source in ("health", "epoch"):
        track = view.track(source)
        for name in ("memory/peak", "memory/allocated"):
            line = track.line(name) if track is not None else None
            seen = [value for value in (line.high or line.mean) if value is not None] if line is not None else []
            if seen:
                return max(seen)
    return None


def _steps_text(view: RunView) -> str:
    of_all = f" of {view.report.total_steps:,}" if view.report.total_steps else ""
    samples = f", {format_count(view.report.samples)} samples" if view.report.samples is not None else ""
    return f"{view.report.step:,}{of_all}{samples}"


_MAX_CELL = 40


def render_comparison(comparison: RunComparison) -> str:
    """Tables of what each run reached and of what is different between them."""
    each = [key_figures(view) for view in comparison.runs]
    names = dict.fromkeys(name for one in each for name in one)
    sections = [_text_table("", comparison.labels, [(name, [one.get(name, "-") for one in each]) for name in names])]
    for title, rows in comparison_sections(comparison):
        different = [row for row in rows if row.differs]
        if different:
            sections.append(
                _text_table(title, comparison.labels, [(r.name, [v or "-" for v in r.values]) for r in different])
            )
        else:
            sections.append(f"{title}: nothing differs")
    return "\n\n".join(sections)


def comparison_sections(comparison: RunComparison) -> tuple[tuple[str, tuple[ComparisonRow, ...]], ...]:
    """What may differ between runs, by name."""
    return (
        ("settings of the plan", comparison.settings),
        ("configuration", comparison.config),
        ("environment", comparison.environment),
    )


def _text_table(title: str, labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [(title, *labels), *((name, *values) for name, values in rows)]
    shown = [[_clip_cell(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in shown) for column in range(len(shown[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in shown)


def _clip_cell(text: str) -> str:
    clean = printable(text).replace("\n", " ")
    return clean if len(clean) <= _MAX_CELL else clean[: _MAX_CELL - 3] + "..."
