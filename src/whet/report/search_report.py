"""Render search results as text, Markdown, charts and an HTML page."""

import html
import math
from collections.abc import Iterator, Sequence

from whet.base.units import format_bytes, format_seconds
from whet.report.page.html import DOCUMENT_START, content_policy, static_text
from whet.report.seeds import format_interval
from whet.report.svg import CHART_STYLE, AxisScale, escape_svg, svg_start, svg_text
from whet.report.table import align_columns, code_span, escape_markdown, markdown_table
from whet.run.search_result import SearchCandidate, SearchResult, SearchTrial

_MAX_ROWS = 40


def render_search(result: SearchResult) -> str:
    """Return the result as plain text."""
    rows = [_cells(result, trial) for trial in _ranked(result)[:_MAX_ROWS]]
    lines = [
        f"search    {result.name}: {result.recipe}, {' '.join(result.space)}",
        f"trials    {_trial_counts(result)}",
        "",
    ]
    lines += align_columns([("trial", result.goal, "settings", "steps", "time", "memory", ""), *rows])
    if len(result.trials) > len(rows):
        lines += [f"and {len(result.trials) - len(rows):,} more; --markdown and --json have them all"]
    if result.importance:
        lines += ["", "important " + ", ".join(f"{key} {100 * share:.0f} %" for key, share in _shares(result))]
    if result.candidates:
        lines += [
            "",
            *(f"{'seeds' if n == 0 else '':<10}{_seed_line(result, c)}" for n, c in enumerate(result.candidates)),
        ]
    return "\n".join([*lines, "", f"winner    {winner_text(result)}"])


def search_markdown(result: SearchResult) -> str:
    space = " ".join(code_span(word) for word in result.space)
    candidates = [
        (f"trial {c.number}", format_settings(c.settings), f"{c.mean:.4g}", _interval(result, c))
        for c in result.candidates
    ]
    importance = [(code_span(key), f"{100 * share:.0f} %") for key, share in _shares(result)]
    trials = [_cells(result, trial) for trial in _ranked(result)]
    goal = escape_markdown(result.goal)
    sections = [
        f"# {escape_markdown(result.name)}",
        f"{escape_markdown(result.recipe)}: {space}. {escape_markdown(_trial_counts(result))}.",
        f"**Winner:** {escape_markdown(winner_text(result))}",
        markdown_table(("candidate", "settings", goal, "95 %"), _escaped(candidates)),
        markdown_table(("setting", "importance"), importance),
        "## Trials\n\n" + markdown_table(("trial", goal, "settings", "steps", "time", "memory", ""), _escaped(trials)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _escaped(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[escape_markdown(cell) for cell in row] for row in rows]


def winner_text(result: SearchResult) -> str:
    """Return a text with the winner, its interval and whether it is clearly ahead."""
    winner = result.winner
    if winner is None:
        return "none: no trial was completed"
    named = f"trial {winner.number} ({format_settings(winner.settings)}): {result.goal} {winner.mean:.4g}"
    if not winner.values:
        return f"{named}, from one run; " + (_lost_seeds(winner) if winner.lost else "no other seeds were trained")
    if not result.is_confirmed:
        return f"{named} from {len(winner.values)} of {result.seeds} seeds; run the same search again to continue"
    if winner.low is None:
        return f"{named} with one other seed; an interval needs two or more"
    text = f"{named}, {_interval(result, winner)} with {len(winner.values)} seeds"
    text += f"; {_lost_seeds(winner)}" if winner.lost else ""
    if len(result.candidates) < 2:
        return text
    second = f"trial {result.candidates[1].number}"
    return f"{text}; " + (f"clearly ahead of {second}" if result.is_clear else f"not clearly ahead of {second}")


def format_settings(settings: dict[str, object]) -> str:
    return " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in settings.items())


def _trial_counts(result: SearchResult) -> str:
    states = ("complete", "pruned", "infeasible", "failed", "running", "waiting")
    counts = {state: sum(trial.state == state for trial in result.trials) for state in states}
    parts = [f"{count} {state}" for state, count in counts.items() if count]
    steps = sum(trial.steps for trial in result.trials)
    more = f"; {result.continued} resumed after a stop or a kill" if result.continued else ""
    share = f"; on {100 * result.subset:g} % of the training split" if result.subset < 1 else ""
    return f"{len(result.trials)} ({', '.join(parts)}), {steps:,} steps, {format_seconds(result.seconds)}{share}{more}"


def _ranked(result: SearchResult) -> list[SearchTrial]:
    """Return the trials with a value, best first, then the other trials by number."""
    sign = -1 if result.is_higher_better else 1
    order = ("complete", "pruned")

    def key(trial: SearchTrial) -> tuple[int, float, int]:
        place = order.index(trial.state) if trial.state in order and trial.value is not None else len(order)
        return place, sign * (trial.value or 0.0) if place < len(order) else 0.0, trial.number

    return sorted(result.trials, key=key)


def _cells(result: SearchResult, trial: SearchTrial) -> tuple[str, ...]:
    value = "-" if trial.value is None else f"{trial.value:.4g}"
    why = f"{trial.state} on {trial.machine}" if trial.state == "infeasible" and trial.machine else trial.state
    is_winner = result.winner is not None and result.winner.number == trial.number
    note = f"{why}: {trial.note}"[:120] if trial.note else ("winner" if is_winner else why)
    return (
        str(trial.number),
        value,
        format_settings(trial.settings),
        f"{trial.steps:,}",
        format_seconds(trial.seconds),
        format_bytes(trial.peak_bytes) if trial.peak_bytes else "-",
        "" if note == "complete" else note,
    )


def _shares(result: SearchResult) -> list[tuple[str, float]]:
    return sorted(result.importance.items(), key=lambda item: -item[1])


def _seed_line(result: SearchResult, candidate: SearchCandidate) -> str:
    around = _interval(result, candidate)
    values = ", ".join(f"{value:.4g}" for value in candidate.values.values())
    text = f"{candidate.mean:.4g} ({around}; {values})" if values else f"{candidate.mean:.4g} (one run)"
    text += f", {_lost_seeds(candidate)}" if candidate.lost else ""
    return f"trial {candidate.number}  {text}  {format_settings(candidate.settings)}"


def _lost_seeds(candidate: SearchCandidate) -> str:
    return f"no value with {candidate.lost} other seed{'s' if candidate.lost > 1 else ''}"


def _interval(result: SearchResult, candidate: SearchCandidate) -> str:
    if candidate.low is None or candidate.high is None:
        return "no interval"
    return format_interval(result.goal, mean=candidate.mean, low=candidate.low, high=candidate.high, form=".4g")


_STYLE = (
    CHART_STYLE
    + """
.whet-chart { max-width: 100%; height: auto; color: inherit; }
.whet-chart .pruned { fill: none; stroke: #2f6fde; }
.whet-chart .best { fill: none; stroke: #c2410c; stroke-width: 2; }
main.search { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
main.search pre { white-space: pre-wrap; overflow-wrap: anywhere; }
main.search pre span { display: block; min-height: 1.5em; padding-left: 10ch; text-indent: -10ch; }
"""
)
_WIDTH, _LEFT, _RIGHT, _TOP = 640, 86, 30, 34


def search_charts(result: SearchResult) -> dict[str, str]:
    """Return the SVG charts by title, without empty ones."""
    seen = [trial for trial in result.trials if trial.value is not None and math.isfinite(trial.value)]
    pictures: dict[str, list[str]] = {}
    if seen:
        pictures["History"] = [svg_start("history", 260), *_history(result, seen), "</svg>"]
    if result.importance:
        height = _TOP + 26 * len(result.importance) + 10
        pictures["Importance"] = [svg_start("importance", height), *_importance(result), "</svg>"]
    return {title: "\n".join(parts) for title, parts in pictures.items()}


def _history(result: SearchResult, seen: Sequence[SearchTrial]) -> Iterator[str]:
    """Yield a chart of the values by trial, with the best value so far."""
    floor, right = 224, _WIDTH - _RIGHT
    values = [trial.value or 0.0 for trial in seen]
    across = AxisScale(0, max(trial.number for trial in result.trials), _LEFT, right)
    up = AxisScale(min(values), max(values), floor - 8, _TOP)
    yield svg_text(_LEFT, 18, f"{result.goal} by trial", extra='font-weight="600"')
    yield svg_text(right, 18, "filled: complete; hollow: pruned; line: the best so far", css="quiet", extra=_END)
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    for value in sorted({min(values), max(values)}):
        yield svg_text(_LEFT - 8, up.place(value) + 4, f"{value:.4g}", css="quiet", extra=_END)
    for number in sorted({0, int(across.high)}):
        yield svg_text(across.place(number), floor + 18, str(number), css="quiet", extra='text-anchor="middle"')
    for trial in seen:
        words = escape_svg(f"trial {trial.number}: {result.goal} {trial.value:.4g}, {format_settings(trial.settings)}")
        place = f'cx="{across.place(trial.number)}" cy="{up.place(trial.value or 0.0)}"'
        css = "data" if trial.state == "complete" else "pruned"
        yield f'<circle class="{css}" {place} r="4"><title>{words}</title></circle>'
    better, best, points = (max if result.is_higher_better else min), None, []
    for trial in sorted(seen, key=lambda trial: trial.number):
        if trial.state != "complete" or trial.value is None:
            continue
        x = across.place(trial.number)
        if best is not None:
            points.append(f"{x},{up.place(best)}")
        best = trial.value if best is None else better(best, trial.value)
        points.append(f"{x},{up.place(best)}")
    yield f'<polyline class="best" points="{" ".join(points)}"/>'


def _importance(result: SearchResult) -> Iterator[str]:
    yield svg_text(_LEFT, 18, "share of the variance that a setting explains", extra='font-weight="600"')
    for number, (key, share) in enumerate(sorted(result.importance.items(), key=lambda item: -item[1])):
        y = _TOP + 26 * number
        width = round(share * (_WIDTH - 220 - _RIGHT - 50), 1)
        yield svg_text(200, y + 13, key, extra=_END)
        yield f'<rect class="data" x="210" y="{y}" width="{width}" height="16"/>'
        yield svg_text(216 + width, y + 13, f"{100 * share:.0f} %", css="quiet")


_END = 'text-anchor="end"'


def search_page(result: SearchResult) -> str:
    """Return the report of a search as an HTML file without scripts or connections."""
    styles = [static_text("page.css"), _STYLE]
    pictures = [
        part
        for title, picture in search_charts(result).items()
        for part in (f"<section><h2>{html.escape(title)}</h2>", picture, "</section>")
    ]
    return "\n".join(
        [
            DOCUMENT_START,
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{content_policy(scripts=[], styles=styles)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(result.name)} - whet</title>",
            *(f"<style>{style}</style>" for style in styles),
            "</head>",
            '<body><main class="search">',
            f"<h1>{html.escape(result.name)}</h1>",
            f"<p><strong>Winner:</strong> {html.escape(winner_text(result))}</p>",
            *pictures,
            "<section><h2>Trials</h2>",
            f"<pre>{_html_lines(render_search(result))}</pre></section>",
            "</main></body>",
            "</html>",
            "",
        ]
    )


def _html_lines(text: str) -> str:
    """Return each line as a separate element, so that a wrapped line gets a hanging indent."""
    return "".join(f"<span>{html.escape(line)}</span>" for line in text.splitlines())
