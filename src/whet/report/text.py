"""How does a report read as plain text? No colours, no control characters, every line within the width."""

import statistics
import textwrap
from collections.abc import Iterable

from whet.base.units import format_bytes, format_count, format_seconds
from whet.plan.render import format_value, settings_table
from whet.report.run_report import EpochSummary, GoalSummary, Incident, LossSummary, ReportSetting, RunReport
from whet.report.text_chart import curve_from_values, draw_curve
from whet.report.timeline import incident_text

MIN_WIDTH = 20
_LABEL = 10
_CURVE_HEIGHT = 8
_CURVE_WIDTH = 100
_MAX_INCIDENTS = 12
_MAX_TEXT = 4_000
"""Characters of one text; a damaged plan may give a reason of megabytes, which would take a minute to wrap."""


def render_text(report: RunReport, *, width: int = 100, unicode: bool = True, has_settings: bool = True) -> str:
    """The report as text. Only the command to resume may be longer than `width`, so that it can be copied whole."""
    width = max(width, MIN_WIDTH)
    sections = [
        _facts(report, width=width),
        _classes(report, width=width),
        _curves(report, width=width, unicode=unicode),
        _settings(report.settings if has_settings else (), width=width),
        _incidents(report, width=width),
        _seconds(report, width=width),
    ]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines)
    if report.resume:
        text += "\n\nresume it with\n  " + _clean(report.resume)
    return text if unicode else text.encode("ascii", "replace").decode()


def _facts(report: RunReport, *, width: int) -> list[str]:
    facts = [
        ("run", f"{report.path.name}: {report.recipe}, {_progress(report)}"),
        ("machine", report.machine),
        *([("failed", report.failure)] if report.failure else []),
        ("time", _time(report)),
        ("loss", _loss(report.loss)),
    ]
    if report.goal:
        facts.append(("goal", _goal(report.goal)))
    tested = {name: value for name, value in report.metrics.items() if name.startswith("test_")}
    if tested:
        shown = ", ".join(f"{name.removeprefix('test_')} {value:.4g}" for name, value in tested.items())
        beside = "".join(f"; {name} {value:.4g} on the same data" for name, value in report.baseline.items())
        whose = f"; weights of step {report.tested_step:,}" if report.tested_step not in (None, report.step) else ""
        facts.append(("test", shown + whose + beside))
    if report.epochs:
        facts.append(("epochs", _epochs(report.epochs)))
        if held := report.epochs[-1].held:
            shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items())
            facts.append(("holds", f"{shown} between steps; whet plan RUN --why memory_gb says what was expected"))
    facts.append(("saved", _saved(report)))
    if report.proof is not None:
        facts.append(("proof", report.proof))
    if report.inexact_since is not None:
        facts.append(("exact", f"not bit-exact since step {report.inexact_since:,}: {report.inexact_reason}"))
    if report.damaged_lines:
        facts.append(("damage", f"{report.damaged_lines:,} lines of events.jsonl could not be read and are left out"))
    return [line for label, fact in facts for line in _labelled(label, fact, width=width)]


def _classes(report: RunReport, *, width: int) -> list[str]:
    """The test part's, else the dev part's; the classes with the lowest scores are the ones to look at."""
    if not report.classes:
        return []
    table = report.classes[-1]
    longest = max(10, min(40, width - 11 * len(table.columns)))
    lines = _wrapped(f"each class on the {table.part} part", width=width)
    cells = [("class", *table.columns)]
    cells += [
        (_clean(label)[:longest], *(_score(name, value) for name, value in zip(table.columns, row, strict=True)))
        for label, row in zip(table.labels, table.rows, strict=True)
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    for label, *numbers in cells:
        shown = "  ".join(cell.rjust(w) for cell, w in zip(numbers, widths[1:], strict=True))
        lines.append(f"  {label:<{widths[0]}}  {shown}"[:width].rstrip())
    return lines


def _score(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "support" else f"{value:.3f}"


def _epochs(epochs: tuple[EpochSummary, ...]) -> str:
    middle = statistics.median(epoch.seconds for epoch in epochs)
    memory = epochs[-1].memory_bytes
    return f"{format_seconds(middle)} each" + (f", {format_bytes(memory)} of memory at the end" if memory else "")


def _progress(report: RunReport) -> str:
    if report.state == "never started":
        return "never started"
    of_all = f" of {report.total_steps:,}" if report.total_steps else ""
    parts = [f"{report.state} at step {report.step:,}{of_all}"]
    if report.epoch is not None:
        parts.append(f"epoch {report.epoch + 1:g}")
    if report.samples is not None:
        parts.append(f"{format_count(report.samples)} samples")
    return ", ".join(parts)


def _time(report: RunReport) -> str:
    if not report.sittings:
        return "no time yet"
    sittings = f" in {report.sittings} sittings" if report.sittings > 1 else ""
    training, wall = format_seconds(report.training_seconds), format_seconds(report.wall_seconds)
    text = f"{training} of training{sittings}"
    if training == wall or report.uptime is None:
        return text
    return f"{text}, {wall} from first to last (uptime {100 * report.uptime:.0f} %)"


def _loss(loss: LossSummary) -> str:
    if loss.last is None:
        return "none yet"
    best = f", best {loss.best:.4g} (step {loss.best_step:,})" if loss.best is not None and loss.best_step else ""
    first = f", first {loss.first:.4g}" if loss.first is not None else ""
    return f"last {loss.last:.4g}{best}{first}"


def _goal(goal: GoalSummary) -> str:
    if goal.last is None:
        return f"{goal.name}, not evaluated yet"
    best = f", best {goal.best:.4g} (step {goal.best_step:,})" if goal.best is not None else ""
    return f"{goal.name}: last {goal.last:.4g}{best}"


def _saved(report: RunReport) -> str:
    if not report.checkpoints:
        return "no checkpoint"
    newest = report.checkpoints[-1]
    count = len(report.checkpoints)
    text = f"{count} checkpoint{'s' if count > 1 else ''}, newest {newest.name} ({format_bytes(newest.size_bytes)})"
    saving = report.saving
    if saving.count and report.training_seconds > 0:
        share = 100 * saving.cost_seconds / report.training_seconds
        saves = f"{saving.count:,} save{'s' if saving.count > 1 else ''}"
        shown = f"{share:.2g}" if share < 10 else f"{share:.0f}"
        text += f"; {saves} took {format_seconds(saving.cost_seconds)}, {shown} % of the time"
    return text


def _curves(report: RunReport, *, width: int, unicode: bool) -> list[str]:
    curves = [("loss", report.loss.curve)]
    if report.goal:
        name = report.goal.name
        values = {e.step: e.metrics[name] for e in report.evaluations if name in e.metrics}
        if len(values) > 1:
            curves.append((name, curve_from_values(values, field=name)))
    lines: list[str] = []
    for name, curve in curves:
        drawn = draw_curve(curve, width=min(width, _CURVE_WIDTH), height=_CURVE_HEIGHT, unicode=unicode)
        if drawn:
            lines += ["", *_wrapped(f"{name} by step", width=width), *drawn]
    return lines[1:]


def _settings(settings: Iterable[ReportSetting], *, width: int) -> list[str]:
    return settings_table(
        [
            (_clean(s.name), _clean(format_value(s.value)), _clean(s.reason), _clean(_source(s)))
            for s in settings
            if s.value not in (None, "unused") or s.source == "you"
        ],
        width=width,
    )


def _source(setting: ReportSetting) -> str:
    rule = setting.evidence.get("rule") if isinstance(setting.evidence, dict) else None
    return f"rule {rule}" if setting.source == "rule" and rule else setting.source


def _incidents(report: RunReport, *, width: int) -> list[str]:
    if not report.happenings:
        return []
    lines = ["happenings"]
    for happening in report.happenings[:_MAX_INCIDENTS]:
        lines += _wrapped(_incident_line(happening, created=report.created), width=width, indent="  ")
    more = len(report.happenings) - _MAX_INCIDENTS
    if more > 0:
        lines.append(f"  and {more:,} more")
    return lines


def _incident_line(happening: Incident, *, created: float) -> str:
    after = format_seconds(max(0.0, happening.time - created))
    return f"step {happening.step:,} after {after}: {incident_text(happening)}"


def _seconds(report: RunReport, *, width: int) -> list[str]:
    whole = sum(report.seconds.values())
    if whole <= 0:
        return []
    lines = _wrapped("where the time of the steps went", width=width)
    for name, seconds in report.seconds.items():
        lines += _wrapped(
            f"{100 * seconds / whole:3.0f} %  {format_seconds(seconds):>10}  {name}", width=width, indent="  "
        )
    return lines


def _labelled(label: str, text: str, *, width: int) -> list[str]:
    return _wrapped(text, width=width, indent=f"{label:<{_LABEL}}", hanging=" " * _LABEL)


def _wrapped(text: str, *, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    hanging = indent + "  " if hanging is None else hanging
    lines = textwrap.wrap(_clean(text), width, initial_indent=indent, subsequent_indent=hanging)
    return lines or [indent.rstrip()]


def _clean(text: str) -> str:
    """The text without anything that could steer a terminal or fill it: a run folder may come from anywhere."""
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]} ... ({len(text):,} characters)"
    return "".join(char if char.isprintable() else " " for char in text)
