"""How does a run read in an issue or a README? A page of Markdown that shows nothing but itself.

Names and logs come from anywhere, so whatever a reader of Markdown would take for a sign is escaped: no picture is
fetched, no link made, nobody is called by name.
"""

import re
from collections.abc import Iterable, Sequence

from whet.base.units import format_bytes, format_count, format_seconds
from whet.plan.render import format_value
from whet.report.comparison import RunComparison, comparison_sections, key_figures
from whet.report.plan_evidence import PlannedVsActual
from whet.report.run_view import RunView
from whet.report.text_chart import draw_curve
from whet.report.tracks import Track
from whet.run.curve import Curve, CurvePoint

_SIGNS = re.compile(r"([\\`*\[\]<>|~&])")
_CURVE_WIDTH, _CURVE_HEIGHT = 90, 8
_MAX_TIMELINE = 12
_MAX_TEXT = 400


def run_markdown(view: RunView) -> str:
    """The page of one run."""
    report = view.report
    sections = [
        f"# {escape_markdown(view.name)}",
        f"{escape_markdown(report.recipe)} on {escape_markdown(report.machine)}.",
        _failure(view),
        markdown_table(
            ("figure", "value"),
            [(escape_markdown(name), escape_markdown(value)) for name, value in key_figures(view).items()],
        ),
        _curves(view),
        _advice(view),
        _time(view),
        _timeline(view),
        _evidence(view),
        _planned_vs_actual(view.foretold),
        _plan(view),
        _classes(view),
        _confusions(view),
        _provenance(view),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def comparison_markdown(comparison: RunComparison) -> str:
    """The page of several runs."""
    header = ("", *(escape_markdown(label) for label in comparison.labels))
    each = [key_figures(view) for view in comparison.runs]
    names = dict.fromkeys(name for one in each for name in one)
    sections = [
        f"# {' / '.join(escape_markdown(label) for label in comparison.labels)}",
        markdown_table(
            header, [(escape_markdown(name), *(escape_markdown(one.get(name, "-")) for one in each)) for name in names]
        ),
    ]
    for title, rows in comparison_sections(comparison):
        different = [
            (code_span(row.name), *(escape_markdown(v or "-") for v in row.values)) for row in rows if row.differs
        ]
        said = markdown_table(header, different) if different else "Nothing differs."
        sections.append(f"## Different: {title}\n\n{said}")
    return "\n\n".join(sections) + "\n"


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> escaped("![x](http://y) a|b @you")
    '!\\\\[x\\\\](http:\\u200b//y) a\\\\|b @\\u200byou'
    """
    line = " ".join("".join(char if char.isprintable() else " " for char in text[:_MAX_TEXT]).split())
    return re.sub(r"@(?=\w)", "@\u200b", _SIGNS.sub(r"\\\1", line)).replace("://", ":\u200b//") if line else ""


def code_span(text: str) -> str:
    """A code span; a backtick in it would end it."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split()).replace("`", "'")
    return f"`{line.replace('|', chr(92) + '|')}`" if line else ""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines])


def _failure(view: RunView) -> str:
    return f"**It failed:** {escape_markdown(view.report.failure)}" if view.report.failure else ""


def _curves(view: RunView) -> str:
    goal = view.report.goal.name if view.report.goal else None
    drawn: list[str] = []
    for source, name in (("step", "loss"), ("eval", goal)):
        track = next((track for track in view.tracks if track.source == source), None)
        curve = _curve(track, name) if track is not None and name is not None else None
        lines = draw_curve(curve, width=_CURVE_WIDTH, height=_CURVE_HEIGHT) if curve is not None else ()
        if len(lines) and curve is not None and len(curve.points) > 1:
            drawn += ["", f"{code_span(name or '')[1:-1]} by step", *lines]
    # A fence of four: no line of ours begins with a backtick.
    return "\n".join(["````text", *drawn[1:], "````"]) if drawn else ""


def _curve(track: Track, name: str) -> Curve | None:
    line = track.line(name)
    if line is None:
        return None
    columns = zip(track.step, line.low or line.mean, line.high or line.mean, line.mean, strict=True)
    points = tuple(CurvePoint(step=step, low=low, high=high, mean=mean) for step, low, high, mean in columns)
    return Curve(field=name, points=points, last_step=track.step[-1] if track.step else 0)


def _advice(view: RunView) -> str:
    if not view.advice:
        return ""
    lines = [f"- **{escape_markdown(one.try_)}**. Measured: {escape_markdown(one.measured)}." for one in view.advice]
    return "## What to try next\n\n" + "\n".join(lines)


def _time(view: RunView) -> str:
    rows = [
        (escape_markdown(p.name), f"{100 * p.share:.1f} %", format_seconds(p.seconds), p.words) for p in view.phases
    ]
    return "## Where the time went\n\n" + markdown_table(("part", "share", "time", "what it is"), rows) if rows else ""


def _timeline(view: RunView) -> str:
    told = [m for m in view.moments if m.kind not in ("checkpoint", "start")]
    rows = [
        (format_seconds(m.seconds), f"{m.step:,}", escape_markdown(m.kind), escape_markdown(m.words))
        for m in told[:_MAX_TIMELINE]
    ]
    more = len(told) - _MAX_TIMELINE + view.moments_left_out
    text = markdown_table(("when", "step", "what", "told"), rows)
    return f"## What happened\n\n{text}" + (f"\n\nand {more:,} more" if more > 0 else "") if rows else ""


def _evidence(view: RunView) -> str:
    rows = [
        (
            ("**" + code_span(one.label) + "**") if one.chosen else code_span(one.label),
            code_span(one.against),
            "-" if one.speedup is None else f"{one.speedup:.2f}x",
            "-" if one.low is None or one.high is None else f"{one.low:.2f}x to {one.high:.2f}x",
            "-" if one.median_seconds is None else format_seconds(one.median_seconds),
            "-" if one.peak_bytes is None else format_bytes(one.peak_bytes),
            one.verdict,
        )
        for group in view.evidence
        for one in group.candidates
    ]
    header = ("candidate", "against", "speed-up", "interval", "a step", "memory", "verdict")
    return "## What was measured\n\n" + markdown_table(header, rows) if rows else ""


def _planned_vs_actual(figures: Sequence[PlannedVsActual]) -> str:
    rows = [
        (one.name, _in_unit(one.planned, one.unit), _in_unit(one.happened, one.unit))
        for one in figures
        if one.planned is not None and one.alike and one.unit != "steps"
    ]
    return "## Planned against happened\n\n" + markdown_table(("figure", "planned", "happened"), rows) if rows else ""


def _in_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return format_seconds(value)
    return f"{format_count(value)} {unit}" if unit != "steps" else format_count(value)


def _plan(view: RunView) -> str:
    rows = [
        (
            code_span(s.name),
            escape_markdown(format_value(s.value)),
            escape_markdown(s.reason),
            escape_markdown(s.source),
        )
        for s in view.report.settings
        if s.value not in (None, "unused") or s.source == "you"
    ]
    if not rows:
        return ""
    plan = markdown_table(("setting", "value", "why", "from"), rows)
    return f"<details><summary>The plan: {len(rows)} settings</summary>\n\n{plan}\n\n</details>"


def _classes(view: RunView) -> str:
    made = []
    for scores in view.findings.classes:
        shown = [
            tuple(
                format_count(value) if name == "support" else f"{value:.3f}"
                for name, value in zip(scores.columns, row, strict=True)
            )
            for row in scores.rows
        ]
        rows = [(escape_markdown(label), *cells) for label, cells in zip(scores.labels, shown, strict=True)]
        header = ("class", *(escape_markdown(name) for name in scores.columns))
        made.append(f"## Each class ({scores.part}, step {scores.step:,})\n\n{markdown_table(header, rows)}")
    return "\n\n".join(made)


def _confusions(view: RunView) -> str:
    made = []
    for matrix in view.findings.confusions:
        rows = [
            (escape_markdown(label), *(format_count(count) if count else "" for count in counts))
            for label, counts in zip(matrix.labels, matrix.counts, strict=True)
        ]
        header = ("is \\\\ taken for", *(escape_markdown(label) for label in matrix.labels))
        made.append(f"## Confusion matrix ({matrix.part}, step {matrix.step:,})\n\n{markdown_table(header, rows)}")
    return "\n\n".join(made)


def _provenance(view: RunView) -> str:
    origin = view.origin
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items() if name != "platform")
    lines = [
        f"- command: {code_span(origin.command) if origin.command else 'started from Python'}",
        f"- seed: {origin.seed if origin.seed is not None else 'none written down'}",
        f"- data: {code_span(origin.data[:16]) if origin.data else 'no fingerprint'}"
        + (f", {origin.num_samples:,} samples" if origin.num_samples is not None else ""),
        f"- versions: {escape_markdown(versions) or 'unknown'}",
    ]
    return "## How to do it again\n\n" + "\n".join(lines)
