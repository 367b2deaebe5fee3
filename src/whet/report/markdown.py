"""How does a run read in an issue or a README? A page of Markdown that shows nothing but itself.

Names and logs come from anywhere, so whatever a reader of Markdown would take for a sign is escaped: no picture is
fetched, no link made, nobody is called by name.
"""

import re
from collections.abc import Iterable, Sequence

from whet.base.units import show_bytes, show_count, show_seconds
from whet.plan.words import show_value
from whet.report.comparing import CompareView
from whet.report.comparison_text import parts
from whet.report.curve import draw
from whet.report.figures import figures
from whet.report.parts.foresight import Foretold
from whet.report.parts.tracks import Track
from whet.report.view import RunView
from whet.run.thin import Curve, CurvePoint

_SIGNS = re.compile(r"([\\`*\[\]<>|~&])")
_CURVE_WIDTH, _CURVE_HEIGHT = 90, 8
_MOST_MOMENTS = 12
_LONGEST = 400


def run_markdown(view: RunView) -> str:
    """The page of one run."""
    report = view.report
    sections = [
        f"# {escaped(view.name)}",
        f"{escaped(report.recipe)} on {escaped(report.machine)}.",
        _failure(view),
        table(("figure", "value"), [(escaped(name), escaped(value)) for name, value in figures(view).items()]),
        _curves(view),
        _advice(view),
        _time(view),
        _moments(view),
        _evidence(view),
        _foretold(view.foretold),
        _plan(view),
        _classes(view),
        _confusions(view),
        _origin(view),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def comparison_markdown(comparison: CompareView) -> str:
    """The page of several runs."""
    header = ("", *(escaped(label) for label in comparison.labels))
    each = [figures(view) for view in comparison.runs]
    names = dict.fromkeys(name for one in each for name in one)
    sections = [
        f"# {' / '.join(escaped(label) for label in comparison.labels)}",
        table(header, [(escaped(name), *(escaped(one.get(name, "-")) for one in each)) for name in names]),
    ]
    for title, rows in parts(comparison):
        different = [(code(row.name), *(escaped(v or "-") for v in row.values)) for row in rows if row.differs]
        said = table(header, different) if different else "Nothing differs."
        sections.append(f"## Different: {title}\n\n{said}")
    return "\n\n".join(sections) + "\n"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> escaped("![x](http://y) a|b @you")
    '!\\\\[x\\\\](http:\\u200b//y) a\\\\|b @\\u200byou'
    """
    line = " ".join("".join(char if char.isprintable() else " " for char in text[:_LONGEST]).split())
    return re.sub(r"@(?=\w)", "@\u200b", _SIGNS.sub(r"\\\1", line)).replace("://", ":\u200b//") if line else ""


def code(text: str) -> str:
    """A code span; a backtick in it would end it."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split()).replace("`", "'")
    return f"`{line.replace('|', chr(92) + '|')}`" if line else ""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines])


def _failure(view: RunView) -> str:
    return f"**It failed:** {escaped(view.report.failure)}" if view.report.failure else ""


def _curves(view: RunView) -> str:
    goal = view.report.goal.name if view.report.goal else None
    drawn: list[str] = []
    for source, name in (("step", "loss"), ("eval", goal)):
        track = next((track for track in view.tracks if track.source == source), None)
        curve = _curve(track, name) if track is not None and name is not None else None
        lines = draw(curve, width=_CURVE_WIDTH, height=_CURVE_HEIGHT) if curve is not None else ()
        if len(lines) and curve is not None and len(curve.points) > 1:
            drawn += ["", f"{code(name or '')[1:-1]} by step", *lines]
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
    lines = [f"- **{escaped(one.try_)}**. Measured: {escaped(one.measured)}." for one in view.advice]
    return "## What to try next\n\n" + "\n".join(lines)


def _time(view: RunView) -> str:
    rows = [(escaped(p.name), f"{100 * p.share:.1f} %", show_seconds(p.seconds), p.words) for p in view.phases]
    return "## Where the time went\n\n" + table(("part", "share", "time", "what it is"), rows) if rows else ""


def _moments(view: RunView) -> str:
    told = [m for m in view.moments if m.kind not in ("checkpoint", "start")]
    rows = [(show_seconds(m.seconds), f"{m.step:,}", escaped(m.kind), escaped(m.words)) for m in told[:_MOST_MOMENTS]]
    more = len(told) - _MOST_MOMENTS + view.moments_left_out
    text = table(("when", "step", "what", "told"), rows)
    return f"## What happened\n\n{text}" + (f"\n\nand {more:,} more" if more > 0 else "") if rows else ""


def _evidence(view: RunView) -> str:
    rows = [
        (
            ("**" + code(one.label) + "**") if one.chosen else code(one.label),
            code(one.against),
            "-" if one.speedup is None else f"{one.speedup:.2f}x",
            "-" if one.low is None or one.high is None else f"{one.low:.2f}x to {one.high:.2f}x",
            "-" if one.median_seconds is None else show_seconds(one.median_seconds),
            "-" if one.peak_bytes is None else show_bytes(one.peak_bytes),
            one.verdict,
        )
        for group in view.evidence
        for one in group.candidates
    ]
    header = ("candidate", "against", "speed-up", "interval", "a step", "memory", "verdict")
    return "## What was measured\n\n" + table(header, rows) if rows else ""


def _foretold(figures: Sequence[Foretold]) -> str:
    rows = [
        (one.name, _in_unit(one.planned, one.unit), _in_unit(one.happened, one.unit))
        for one in figures
        if one.planned is not None and one.alike and one.unit != "steps"
    ]
    return "## Planned against happened\n\n" + table(("figure", "planned", "happened"), rows) if rows else ""


def _in_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "bytes":
        return show_bytes(value)
    if unit == "seconds":
        return show_seconds(value)
    return f"{show_count(value)} {unit}" if unit != "steps" else show_count(value)


def _plan(view: RunView) -> str:
    rows = [
        (code(s.name), escaped(show_value(s.value)), escaped(s.reason), escaped(s.source))
        for s in view.report.settings
        if s.value not in (None, "unused") or s.source == "you"
    ]
    if not rows:
        return ""
    plan = table(("setting", "value", "why", "from"), rows)
    return f"<details><summary>The plan: {len(rows)} settings</summary>\n\n{plan}\n\n</details>"


def _classes(view: RunView) -> str:
    made = []
    for scores in view.findings.classes:
        shown = [
            tuple(
                show_count(value) if name == "support" else f"{value:.3f}"
                for name, value in zip(scores.columns, row, strict=True)
            )
            for row in scores.rows
        ]
        rows = [(escaped(label), *cells) for label, cells in zip(scores.labels, shown, strict=True)]
        header = ("class", *(escaped(name) for name in scores.columns))
        made.append(f"## Each class ({scores.part}, step {scores.step:,})\n\n{table(header, rows)}")
    return "\n\n".join(made)


def _confusions(view: RunView) -> str:
    made = []
    for matrix in view.findings.confusions:
        rows = [
            (escaped(label), *(show_count(count) if count else "" for count in counts))
            for label, counts in zip(matrix.labels, matrix.counts, strict=True)
        ]
        header = ("is \\\\ taken for", *(escaped(label) for label in matrix.labels))
        made.append(f"## Confusion matrix ({matrix.part}, step {matrix.step:,})\n\n{table(header, rows)}")
    return "\n\n".join(made)


def _origin(view: RunView) -> str:
    origin = view.origin
    versions = ", ".join(f"{name} {version}" for name, version in origin.versions.items() if name != "platform")
    lines = [
        f"- command: {code(origin.command) if origin.command else 'started from Python'}",
        f"- seed: {origin.seed if origin.seed is not None else 'none written down'}",
        f"- data: {code(origin.data[:16]) if origin.data else 'no fingerprint'}"
        + (f", {origin.num_samples:,} samples" if origin.num_samples is not None else ""),
        f"- versions: {escaped(versions) or 'unknown'}",
    ]
    return "## How to do it again\n\n" + "\n".join(lines)
