"""The report of a run as Markdown, for an issue or a README."""

from collections.abc import Sequence

from whet.base.units import format_bytes, format_count, format_seconds, printable
from whet.plan.render import format_value
from whet.report.comparison import RunComparison, figure_rows, key_figures
from whet.report.plan_evidence import PlannedVsActual
from whet.report.run_report import RunReport
from whet.report.table import code_span, escape_markdown, markdown_table
from whet.report.text import main_curves
from whet.report.text_chart import draw_curve

_CURVE_WIDTH, _CURVE_HEIGHT = 90, 8
_MAX_TIMELINE = 12


def run_markdown(report: RunReport) -> str:
    figures = [(escape_markdown(name), escape_markdown(value)) for name, value in key_figures(report).items()]
    sections = [
        f"# {escape_markdown(report.name)}",
        f"{escape_markdown(report.recipe)} on {escape_markdown(report.machine)}.",
        f"**Ended:** {escape_markdown(report.reason)}" if report.reason else "",
        _fenced([printable(line) for line in (report.traceback or "").splitlines()]),
        markdown_table(("figure", "value"), figures),
        _curves(report),
        _advice(report),
        _time(report),
        _timeline(report),
        _evidence(report),
        _planned_vs_actual(report.planned_vs_actual),
        _plan(report),
        *_classes(report),
        *_confusions(report),
        _provenance(report),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def comparison_markdown(comparison: RunComparison) -> str:
    labels = [escape_markdown(label) for label in comparison.labels]
    header = ("", *labels)
    figures = [(escape_markdown(name), *map(escape_markdown, values)) for name, values in figure_rows(comparison)]
    sections = [f"# {' / '.join(labels)}", markdown_table(header, figures)]
    for title, rows in comparison.sections:
        different = [(code_span(r.name), *(escape_markdown(v or "-") for v in r.values)) for r in rows if r.differs]
        table = markdown_table(header, different) if different else "No differences."
        sections.append(f"## Different: {title}\n\n{table}")
    return "\n\n".join(sections) + "\n"


def _section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"## {title}\n\n{markdown_table(header, rows)}" if rows else ""


def _curves(report: RunReport) -> str:
    drawn: list[str] = []
    for name, curve in main_curves(report):
        lines = draw_curve(curve, width=_CURVE_WIDTH, height=_CURVE_HEIGHT)
        drawn += ["", f"{name} by step", *lines] if lines else []
    return _fenced(drawn[1:])


def _fenced(lines: Sequence[str]) -> str:
    """Return lines as a block of code, which no backticks in them can end."""
    return "\n".join(["````text", *(line.replace("`", chr(39)) for line in lines), "````"]) if lines else ""


def _advice(report: RunReport) -> str:
    lines = [f"- **{escape_markdown(one.try_)}**. Measured: {escape_markdown(one.measured)}." for one in report.advice]
    return "## What to try next\n\n" + "\n".join(lines) if lines else ""


def _time(report: RunReport) -> str:
    rows = [
        (escape_markdown(p.name), f"{100 * p.share:.1f} %", format_seconds(p.seconds), p.note) for p in report.phases
    ]
    return _section("Where the time went", ("phase", "share", "time", "what it is"), rows)


def _timeline(report: RunReport) -> str:
    entries = [entry for entry in report.timeline if entry.kind not in ("checkpoint", "start")]
    rows = [
        (format_seconds(e.seconds), f"{e.step:,}", escape_markdown(e.kind), escape_markdown(e.text))
        for e in entries[:_MAX_TIMELINE]
    ]
    more = len(entries) - _MAX_TIMELINE + report.timeline_omitted
    text = _section("What happened", ("when", "step", "event", "details"), rows)
    return text + (f"\n\nand {more:,} more" if text and more > 0 else "")


def _evidence(report: RunReport) -> str:
    rows = [
        (
            ("**" + code_span(one.label) + "**") if one.chosen else code_span(one.label),
            code_span(one.baseline),
            "-" if one.speedup is None else f"{one.speedup:.2f}x",
            "-" if one.interval is None else "{:.2f}x to {:.2f}x".format(*one.interval),
            "-" if one.median_seconds is None else format_seconds(one.median_seconds),
            "-" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            one.verdict,
        )
        for group in report.evidence
        for one in group.trials
    ]
    return _section(
        "What was measured", ("candidate", "against", "speed-up", "interval", "step", "memory", "verdict"), rows
    )


def _planned_vs_actual(figures: Sequence[PlannedVsActual]) -> str:
    rows = [
        (one.name, _in_unit(one.planned, one.unit), _in_unit(one.actual, one.unit))
        for one in figures
        if one.planned is not None and one.is_comparable and one.unit != "steps"
    ]
    return _section("Planned vs. actual", ("figure", "planned", "actual"), rows)


def _in_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    return f"{format_count(value)} {unit}" if unit != "steps" else format_count(value)


def _plan(report: RunReport) -> str:
    rows = [
        (code_span(s.name), *map(escape_markdown, (format_value(s.value), s.reason, s.source)))
        for s in report.settings
        if s.value not in (None, "unused") or s.source == "you"
    ]
    if not rows:
        return ""
    plan = markdown_table(("setting", "value", "why", "from"), rows)
    return f"<details><summary>The plan: {len(rows)} settings</summary>\n\n{plan}\n\n</details>"


def _classes(report: RunReport) -> list[str]:
    sections = []
    for scores in report.details.classes:
        rows = [
            (
                escape_markdown(label),
                *(
                    format_count(value) if name == "support" else f"{value:.3f}"
                    for name, value in zip(scores.columns, row, strict=True)
                ),
            )
            for label, row in zip(scores.labels, scores.rows, strict=True)
        ]
        header = ("class", *map(escape_markdown, scores.columns))
        sections.append(_section(f"Scores per class ({scores.split}, step {scores.step:,})", header, rows))
    return sections


def _confusions(report: RunReport) -> list[str]:
    sections = []
    for matrix in report.details.confusions:
        rows = [
            (escape_markdown(label), *(format_count(count) if count else "" for count in counts))
            for label, counts in zip(matrix.labels, matrix.counts, strict=True)
        ]
        header = ("true \\\\ predicted", *map(escape_markdown, matrix.labels))
        sections.append(_section(f"Confusion matrix ({matrix.split}, step {matrix.step:,})", header, rows))
    return sections


def _provenance(report: RunReport) -> str:
    origin = report.provenance
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items() if name != "platform")
    samples = f", {origin.num_samples:,} samples" if origin.num_samples is not None else ""
    lines = [
        f"- command: {code_span(origin.command) if origin.command else 'started from Python'}",
        f"- seed: {origin.seed if origin.seed is not None else 'not recorded'}",
        f"- data: {code_span(origin.data[:16]) if origin.data else 'no fingerprint'}{samples}",
        f"- versions: {escape_markdown(versions) or 'unknown'}",
    ]
    return "## How to reproduce it\n\n" + "\n".join(lines)
