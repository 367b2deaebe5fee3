"""How does a search look? Its history, what mattered, and every trial as a line through its settings; small SVGs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whet.config.words import read_value
from whet.report.picture import safe, text_at
from whet.report.search_text import settings_words
from whet.run.search_result import SearchResult, SearchTrial

STYLE = """
.whet-search { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; max-width: 100%; height: auto; }
.whet-search text { fill: currentColor; }
.whet-search .quiet { opacity: .65; }
.whet-search .mark { paint-order: stroke; stroke: var(--back, Canvas); stroke-width: 4px; stroke-linejoin: round; }
.whet-search .axis { stroke: currentColor; opacity: .45; }
.whet-search .complete { fill: #2f6fde; }
.whet-search .pruned { fill: none; stroke: #2f6fde; }
.whet-search .trial { fill: none; stroke: #2f6fde; opacity: .45; }
.whet-search .left { stroke-dasharray: 3 4; opacity: .25; }
.whet-search .best { fill: none; stroke: #c2410c; stroke-width: 2; opacity: 1; }
.whet-search .bar { fill: #2f6fde; }
"""
_WIDTH, _LEFT, _RIGHT, _TOP = 640, 86, 30, 34


def search_pictures(result: SearchResult) -> dict[str, str]:
    """SVGs by title; only those that there is something to see in."""
    seen = [trial for trial in result.trials if trial.value is not None and math.isfinite(trial.value)]
    pictures = {}
    if seen:
        pictures["History"] = _picture("history", 260, _history(result, seen))
    if result.importance:
        height = _TOP + 26 * len(result.importance) + 10
        pictures["What mattered"] = _picture("importance", height, _importance(result))
    if len(seen) > 1:
        pictures["Settings"] = _picture("parallel coordinates", 320, _parallel(result, seen))
    return pictures


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, here = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        share = (here - low) / (high - low) if high > low else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def _picture(title: str, height: int, parts: Iterator[str]) -> str:
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="whet-search" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" role="img" aria-label="{title}">'
    )
    return "\n".join([begin, *parts, "</svg>"])


def _history(result: SearchResult, seen: Sequence[SearchTrial]) -> Iterator[str]:
    """Values by trial, and the best so far."""
    floor, right = 224, _WIDTH - _RIGHT
    values = [trial.value or 0.0 for trial in seen]
    across = _Scale(0, max(trial.number for trial in result.trials), _LEFT, right)
    up = _Scale(min(values), max(values), floor - 8, _TOP)
    yield text_at(_LEFT, 18, f"{result.goal} by trial", extra='font-weight="600"')
    yield text_at(right, 18, "filled: complete; hollow: pruned; line: the best so far", css="quiet", extra=_END)
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    for value in sorted({min(values), max(values)}):
        yield text_at(_LEFT - 8, up.place(value) + 4, f"{value:.4g}", css="quiet", extra=_END)
    for number in sorted({0, int(across.high)}):
        yield text_at(across.place(number), floor + 18, str(number), css="quiet", extra='text-anchor="middle"')
    for trial in seen:
        words = safe(f"trial {trial.number}: {result.goal} {trial.value:.4g}, {settings_words(trial.settings)}")
        place = f'cx="{across.place(trial.number)}" cy="{up.place(trial.value or 0.0)}"'
        css = "complete" if trial.state == "complete" else "pruned"
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
    yield text_at(_LEFT, 18, "share of the differences that a setting explains", extra='font-weight="600"')
    for number, (key, share) in enumerate(sorted(result.importance.items(), key=lambda item: -item[1])):
        y = _TOP + 26 * number
        width = round(share * (_WIDTH - 220 - _RIGHT - 50), 1)
        yield text_at(200, y + 13, key, extra=_END)
        yield f'<rect class="bar" x="210" y="{y}" width="{width}" height="16"/>'
        yield text_at(216 + width, y + 13, f"{100 * share:.0f} %", css="quiet")


def _parallel(result: SearchResult, seen: Sequence[SearchTrial]) -> Iterator[str]:
    """An axis for each setting and one for the goal; the winner stands out."""
    floor, right = 276, _WIDTH - _RIGHT - 60
    keys = [word.partition("=")[0] for word in result.space]
    places = [_LEFT + number * (right - _LEFT) / max(1, len(keys)) for number in range(len(keys) + 1)]
    axes = [_axis(word, floor) for word in result.space]
    values = [trial.value or 0.0 for trial in seen]
    goal = _Scale(min(values), max(values), floor, _TOP + 20)
    winner = None if result.winner is None else result.winner.number
    for trial in sorted(seen, key=lambda trial: trial.number == winner):
        at = [_on(axis, trial.settings.get(key)) for key, axis in zip(keys, axes, strict=True)]
        if any(y is None for y in at):
            continue
        points = " ".join(
            f"{round(x, 1)},{y}" for x, y in zip(places, [*at, goal.place(trial.value or 0.0)], strict=True)
        )
        css = "best" if trial.number == winner else "trial" if trial.state == "complete" else "trial left"
        words = safe(f"trial {trial.number}: {result.goal} {trial.value:.4g}, {settings_words(trial.settings)}")
        yield f'<polyline class="{css}" points="{points}"><title>{words}</title></polyline>'
    # Above the lines, which would strike them through.
    for x, key, (scale, labels) in zip(places[:-1], keys, axes, strict=True):
        yield from _drawn(x, key, {label: scale.place(value) for label, value in labels.items()}, floor)
    ends = {f"{value:.4g}": goal.place(value) for value in (min(values), max(values))}
    yield from _drawn(places[-1], result.goal, ends, floor, is_last=True)


def _axis(word: str, floor: int) -> tuple[_Scale, dict[str, float]]:
    """How the values of a setting lie on its axis, and what is written beside it; choices stand evenly."""
    said = word.partition("=")[2]
    if said.startswith("["):
        choices = [_named(choice) for choice in read_value(said, word)]
        return _Scale(0, len(choices) - 1, floor, _TOP + 20), {c: float(n) for n, c in enumerate(choices)}
    low, _, rest = said.partition("..")
    high, *options = rest.split(":")
    scale = _Scale(float(low), float(high), floor, _TOP + 20, "log" in options)
    return scale, {low: float(low), high: float(high)}


def _on(axis: tuple[_Scale, dict[str, float]], value: object) -> float | None:
    scale, labels = axis
    if _named(value) in labels:
        return scale.place(labels[_named(value)])
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value is not None
    return scale.place(float(value)) if is_number else None  # type: ignore[arg-type]


def _named(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _drawn(x: float, title: str, labels: dict[str, float], floor: int, *, is_last: bool = False) -> Iterator[str]:
    """An axis with what is written beside it: to its left, of the last one to its right."""
    yield f'<line class="axis" x1="{round(x, 1)}" x2="{round(x, 1)}" y1="{_TOP + 20}" y2="{floor}"/>'
    yield text_at(x, 30, title, extra='text-anchor="middle" font-weight="600"')
    for label, y in labels.items():
        yield text_at(x + 6 if is_last else x - 6, y + 4, label, css="mark", extra="" if is_last else _END)


_END = 'text-anchor="end"'
