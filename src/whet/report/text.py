"""Render the report of a run as plain text without colors or control characters, wrapped to a width."""

import contextlib
import statistics
import textwrap
import time
from collections.abc import Iterator

from whet.base.units import format_bytes, format_count, format_seconds, format_speed, one_line, printable_line
from whet.plan.render import format_value, settings_table
from whet.report.run_report import Incident, RunReport
from whet.report.run_status import loss_text
from whet.report.text_chart import draw_curve
from whet.report.timeline import incident_text
from whet.run.curve import Curve
from whet.run.folder import shell_path, short_path

MIN_WIDTH = 20
_LABEL_WIDTH = 10
_CURVE_HEIGHT = 8
BETTER = {"min": "lower is better", "max": "higher is better"}
_CURVE_WIDTH = 100
_MAX_INCIDENTS = 12
# Maximum characters of one text. Wrapping megabytes of text, as a damaged plan may contain, would take a minute.
_MAX_TEXT = 4_000


def render_summary(report: RunReport, *, width: int = 100) -> str:
    """Return a few lines on how a run ended, and its results."""
    took = format_seconds(report.training_seconds)
    speed = next((one.actual for one in report.planned_vs_actual if one.name == "speed"), None)
    rate = f" at {format_speed(speed)}" if speed else ""
    first = "" if report.losses or report.first_loss is None else f", {report.first_loss:.4g} at the start"
    facts = [
        ("ended", f"{report.reason or report.state}; {report.step:,} steps in {took}{rate}"),
        ("loss", f"{loss_text(report)}{first}" if report.step else "none yet"),
        ("goal", _goal(report) if report.goal else ""),
        ("test", _tested(report, only=report.goal)),
        ("exact", _exactness(report) or ""),
        ("saved", f"{short_path(report.path)}: {len(report.checkpoints)} checkpoints"),
    ]
    width = max(width, MIN_WIDTH)
    return "\n".join(line for label, fact in facts if fact for line in _labelled(label, fact, width=width))


def render_text(report: RunReport, *, width: int = 100, unicode: bool = True) -> str:
    """Return the report as text. Only a traceback and the resume command may exceed `width`, so they can be copied."""
    width = max(width, MIN_WIDTH)
    facts = [line for label, fact in _facts(report) for line in _labelled(label, fact, width=width)]
    sections = [
        facts,
        [_clean(line) for line in (report.traceback or "").splitlines()],
        _classes(report, width=width),
        _curves(report, width=width, unicode=unicode),
        _advice(report, width=width),
        _settings(report, width=width),
        _incidents(report, width=width),
        _seconds(report, width=width),
    ]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines)
    if report.resume:
        # Do not wrap the command, so that it can be copied.
        text += "\n\nresume it with\n  " + _clean(report.resume)
    # If the output has no Unicode, replace all non-ASCII characters, because names in a run folder may contain any.
    return text if unicode else text.encode("ascii", "replace").decode()


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    yield "run", f"{report.name}: {report.recipe}, {_progress(report)}"
    if report.reason:
        yield "ended", report.reason
    yield "machine", report.machine
    yield "time", _time(report)
    yield "loss", _loss(report)
    if report.goal:
        yield "goal", _goal(report)
    if tested := _tested(report):
        yield "test", tested
    if report.epochs:
        median = statistics.median(epoch.seconds for epoch in report.epochs)
        memory = report.epochs[-1].memory_bytes
        peak = f", {format_bytes(memory)} of memory at the end" if memory else ""
        yield "epochs", f"{format_seconds(median)} each{peak}"
        if state := report.epochs[-1].state_bytes:
            sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in state.items())
            command = f"whet plan {shell_path(report.path)} --why memory_gb"
            yield "state", f"{sizes} between steps; `{command}` shows what was expected"
    yield "saved", _saved(report)
    if report.proof is not None:
        yield "proof", report.proof
    if exactness := _exactness(report):
        yield "exact", exactness
    if report.damaged_lines:
        yield "damage", f"skipped {report.damaged_lines:,} unreadable lines of events.jsonl"


def _exactness(report: RunReport) -> str | None:
    if report.inexact_since is None:
        return report.exactness
    return f"not bit-exact since step {report.inexact_since:,}: {report.inexact_reason}"


def _progress(report: RunReport) -> str:
    if report.state == "never started":
        return "never started"
    of_total = f" of {report.total_steps:,}" if report.total_steps else ""
    parts = [f"{report.state} at step {report.step:,}{of_total}"]
    if report.epoch is not None:
        parts.append(f"epoch {report.epoch + 1:g}")
    if report.samples is not None:
        parts.append(f"{format_count(report.samples)} samples")
    if report.state == "running" and report.sessions:
        # A damaged log may contain times that no clock shows.
        with contextlib.suppress(ValueError, OverflowError, OSError):
            parts.append(time.strftime("as of %H:%M", time.localtime(report.sessions[-1].ended)))
    return ", ".join(parts)


def _time(report: RunReport) -> str:
    if not report.sessions:
        return "none yet"
    sessions = f" in {len(report.sessions)} sessions" if len(report.sessions) > 1 else ""
    training, wall = format_seconds(report.training_seconds), format_seconds(report.wall_seconds)
    text = f"{training} of training{sessions}"
    # Compare the formatted texts, because a difference that is not visible is not worth mentioning.
    if training == wall or report.uptime is None:
        return text
    return f"{text}, {wall} from first to last (uptime {100 * report.uptime:.0f} %)"


def _loss(report: RunReport) -> str:
    if report.loss is None:
        return "none yet"
    if report.losses:
        return f"last {loss_text(report)}"
    best = ""
    if report.best_loss is not None and report.best_loss_step:
        best = f", best {report.best_loss:.4g} (step {report.best_loss_step:,})"
    first = f", first {report.first_loss:.4g}" if report.first_loss is not None else ""
    return f"last {report.loss:.4g}{best}{first}"


def _goal(report: RunReport) -> str:
    if report.goal_value is None:
        return f"{report.goal}, not evaluated yet"
    best = f", best {report.best_goal:.4g} (step {report.best_goal_step:,})" if report.best_goal is not None else ""
    return f"{report.goal}: last {report.goal_value:.4g}{best}"


def _tested(report: RunReport, *, only: str | None = None) -> str:
    """Return the metrics on the test split as text. With `only`, restrict them to this metric if it is there."""
    tested = {n.removeprefix("test_"): value for n, value in report.metrics.items() if n.startswith("test_")}
    goal = (only or "").removeprefix("val_")
    tested = {goal: tested[goal]} if goal in tested else tested
    if not tested:
        return ""
    scores = ", ".join(f"{name} {value:.4g}" for name, value in tested.items())
    weights = f", weights of step {report.tested_step:,}" if report.tested_step not in (None, report.step) else ""
    others = ", ".join(f"{name} {value:.4g}" for name, value in report.baseline.items())
    return scores + weights + (f"; for comparison: {others}" if others else "")


def _saved(report: RunReport) -> str:
    if not report.checkpoints:
        return "no checkpoint"
    newest, count, saving = report.checkpoints[-1], len(report.checkpoints), report.saving
    text = f"{count} checkpoint{'s' if count > 1 else ''}, newest {newest.name} ({format_bytes(newest.size_bytes)})"
    if saving.count and report.training_seconds > 0:
        share = 100 * saving.cost_seconds / report.training_seconds
        percent = f"{share:.2g}" if share < 10 else f"{share:.0f}"
        saves = f"{saving.count:,} save{'s' if saving.count > 1 else ''}"
        text += f"; {saves} took {format_seconds(saving.cost_seconds)}, {percent} % of the time"
    return text


def _classes(report: RunReport, *, width: int) -> list[str]:
    """Return a table of the scores of each class on the test split, or else on the validation split."""
    if not report.details.classes:
        return []
    table = report.details.classes[-1]
    max_label = max(10, min(40, width - 11 * len(table.columns)))
    cells = [("class", *table.columns)]
    cells += [
        (_clean(label)[:max_label], *(_score(name, value) for name, value in zip(table.columns, row, strict=True)))
        for label, row in zip(table.labels, table.rows, strict=True)
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = _wrapped(f"each class on the {table.split} split", width=width)
    for label, *numbers in cells:
        shown = "  ".join(cell.rjust(w) for cell, w in zip(numbers, widths[1:], strict=True))
        lines.append(f"  {label:<{widths[0]}}  {shown}"[:width].rstrip())
    return lines


def _score(name: str, value: float) -> str:
    return f"{value:,.0f}" if name == "support" else f"{value:.3f}"


def _curves(report: RunReport, *, width: int, unicode: bool) -> list[str]:
    lines: list[str] = []
    for name, curve in main_curves(report):
        drawn = draw_curve(curve, width=min(width, _CURVE_WIDTH), height=_CURVE_HEIGHT, unicode=unicode)
        if drawn:
            lines += ["", *_wrapped(f"{name} by step", width=width), *drawn]
    return lines[1:]


def main_curves(report: RunReport) -> Iterator[tuple[str, Curve]]:
    """Yield the curves for text charts, with titles: each training loss, and the goal metric."""
    wanted = [(report.track("step"), name) for name in report.losses or ("loss",)]
    wanted += [(report.track("eval"), report.goal)] if report.goal else []
    for track, name in wanted:
        curve = track.curve(name) if track is not None else None
        if curve is not None and len(curve.points) > 1:
            mode = report.goal_mode if track is report.track("eval") else "min"
            yield f"{one_line(name)} ({BETTER[mode]})", curve


def _advice(report: RunReport, *, width: int) -> list[str]:
    lines = ["what to try next"] if report.advice else []
    for one in report.advice:
        lines += _wrapped(f"{one.try_} ({one.measured})", width=width, indent="  ")
    return lines


def _settings(report: RunReport, *, width: int) -> list[str]:
    """Return a table of the settings that no rule has chosen, and a line with the command that shows all settings."""
    shown = [s for s in report.settings if s.value not in (None, "unused") or s.source == "you"]
    rows = [
        (_clean(s.name), _clean(format_value(s.value)), _clean(s.reason), _clean(s.source))
        for s in shown
        if s.source != "rule"
    ]
    lines = settings_table(rows, width=width)
    num_rules = len(shown) - len(rows)
    more = f"{num_rules} setting{'s' if num_rules > 1 else ''} by rules: whet plan {shell_path(report.path)}"
    return [*lines, *_wrapped(more, width=width)] if num_rules else lines


def _incidents(report: RunReport, *, width: int) -> list[str]:
    if not report.incidents:
        return []
    lines = ["events"]
    for incident in report.incidents[:_MAX_INCIDENTS]:
        lines += _wrapped(_incident(incident, created=report.created), width=width, indent="  ")
    more = len(report.incidents) - _MAX_INCIDENTS
    if more > 0:
        lines.append(f"  and {more:,} more")
    return lines


def _incident(incident: Incident, *, created: float) -> str:
    after = format_seconds(max(0.0, incident.time - created))
    return f"step {incident.step:,} after {after}: {incident_text(incident.kind, incident.fields)}"


def _seconds(report: RunReport, *, width: int) -> list[str]:
    if not report.phases:
        return []
    lines = _wrapped("time of the steps by phase", width=width)
    for phase in sorted(report.phases, key=lambda phase: -phase.seconds):
        text = f"{100 * phase.share:3.0f} %  {format_seconds(phase.seconds):>10}  {phase.name}"
        lines += _wrapped(text, width=width, indent="  ")
    return lines


def _labelled(label: str, text: str, *, width: int) -> list[str]:
    return _wrapped(text, width=width, indent=f"{label:<{_LABEL_WIDTH}}", hanging=" " * _LABEL_WIDTH)


def _wrapped(text: str, *, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    hanging = indent + "  " if hanging is None else hanging
    lines = textwrap.wrap(_clean(text), width, initial_indent=indent, subsequent_indent=hanging)
    return lines or [indent.rstrip()]


def _clean(text: str) -> str:
    """Remove control characters and truncate the text, because a run folder may be untrusted."""
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]} ... ({len(text):,} characters)"
    return printable_line(text)
