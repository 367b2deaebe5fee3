"""How do the curves of a run look as a picture? One small SVG, a panel for each curve, that needs nothing beside it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whet.base.errors import UsageError
from whet.report.picture import round_ticks, safe, text_at
from whet.run import durable

_WIDTH, _PANEL_HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 24, 30, 36
_HEAD = 50
_FEW = 40
"""So few points are also marked one by one."""
_STYLE = """
.whet-curves { color: #1f2328; font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
.whet-curves text { fill: currentColor; }
.whet-curves .paper { fill: #ffffff; }
.whet-curves .quiet { opacity: .65; }
.whet-curves .grid { stroke: currentColor; opacity: .14; }
.whet-curves .axis { stroke: currentColor; opacity: .5; }
.whet-curves .band { fill: #2f6fde; opacity: .22; stroke: none; }
.whet-curves .line { stroke: #2f6fde; fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.whet-curves .dot { fill: #2f6fde; }
@media (prefers-color-scheme: dark) {
  .whet-curves { color: #e6edf3; }
  .whet-curves .paper { fill: #0d1117; }
  .whet-curves .band, .whet-curves .dot { fill: #79a8ff; }
  .whet-curves .line { stroke: #79a8ff; }
}
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG that a notebook shows by itself; `save` writes it to a file."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<a picture of {len(self.svg):,} bytes of SVG; .save(path) writes it>"

    def save(self, path: Path | str) -> Path:
        """Writes the picture; a file of that name is replaced."""
        path = Path(path).expanduser().absolute()
        if path.suffix.lower() not in ("", ".svg"):
            raise UsageError("the picture is SVG", got=path.name, try_=f"{path.stem}.svg")
        durable.write_file(path, data=self.svg.encode())
        return path


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: places on the x axis, and above each the least, mean and greatest value; NaN leaves a gap."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]


def draw_curves(title: str, lines: Sequence[Line], *, subtitle: str, x_title: str) -> Picture:
    """The curves below each other."""
    height = _HEAD + _PANEL_HEIGHT * max(1, len(lines)) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="whet-curves" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" role="img" aria-label="{safe(title)}">',
        f"<title>{safe(title)}</title>",
        f"<style>{_STYLE}</style>",
        # A notebook may be dark where the system is light, or the other way round.
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        text_at(_LEFT - 62, 20, title, extra='font-weight="600" font-size="15"'),
        text_at(_LEFT - 62, 38, subtitle, css="quiet"),
    ]
    for number, line in enumerate(lines):
        parts.append(f'<g transform="translate(0 {_HEAD + number * _PANEL_HEIGHT})">')
        parts += _draw_panel(line, x_title=x_title)
        parts.append("</g>")
    if not lines:
        parts.append(text_at(_LEFT, _HEAD + 40, "no steps yet", css="quiet"))
    return Picture("\n".join([*parts, "</svg>"]) + "\n")


def _draw_panel(line: Line, *, x_title: str) -> Iterator[str]:
    floor, right = _PANEL_HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    values = [v for v in (*line.low, *line.high) if math.isfinite(v)]
    yield text_at(_LEFT, 18, line.name, extra='font-weight="600"')
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    if not values:
        yield text_at(_LEFT, floor - 20, "no finite numbers", css="quiet")
        return
    across = _Axis(min(line.x), max(line.x), _LEFT, right)
    up = _Axis(min(values), max(values), floor, _TOP)
    for tick in _ticks(up, most=4):
        y = up.place(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield text_at(_LEFT - 8, y + 4, f"{tick:.6g}", css="quiet", extra='text-anchor="end"')
    for tick in _ticks(across, most=6):
        yield text_at(across.place(tick), floor + 18, f"{tick:,.10g}", css="quiet", extra='text-anchor="middle"')
    yield text_at(right, 18, x_title, css="quiet", extra='text-anchor="end"')
    for piece in _pieces(line):
        yield from _draw_piece(line, piece, across, up)


def _draw_piece(line: Line, piece: range, across: "_Axis", up: "_Axis") -> Iterator[str]:
    if len(piece) <= _FEW:
        places = ((across.place(line.x[i]), up.place(line.mean[i])) for i in piece)
        yield from (f'<circle class="dot" cx="{x}" cy="{y}" r="2.5"/>' for x, y in places)
    there = [f"{across.place(line.x[i])},{up.place(line.high[i])}" for i in piece]
    back = [f"{across.place(line.x[i])},{up.place(line.low[i])}" for i in reversed(piece)]
    yield f'<polygon class="band" points="{" ".join(there + back)}"/>'
    middle = " ".join(f"{across.place(line.x[i])},{up.place(line.mean[i])}" for i in piece)
    yield f'<polyline class="line" points="{middle}"/>'


def _pieces(line: Line) -> Iterator[range]:
    """Neighbouring points without a gap between them."""
    start = None
    for i, value in enumerate((*line.mean, math.nan)):
        if math.isfinite(value):
            start = i if start is None else start
        elif start is not None:
            yield range(start, i)
            start = None


@dataclass(frozen=True, slots=True)
class _Axis:
    """From numbers to places in the picture."""

    low: float
    high: float
    begin: float
    end: float

    def place(self, value: float) -> float:
        # In halves: the distance between two finite numbers may be infinite.
        half = self.high / 2 - self.low / 2
        share = (value / 2 - self.low / 2) / half if half > 0 else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def _ticks(axis: _Axis, *, most: int) -> list[float]:
    """Round numbers within the axis; where there is no room for any, its two ends."""
    span = axis.high - axis.low
    if not (0 < span < math.inf):
        return [axis.low] if span == 0 else [axis.low, axis.high]
    try:
        step = round_ticks(span, most=most)[1]
        first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    except (ValueError, OverflowError, ZeroDivisionError, StopIteration, IndexError):
        return [axis.low, axis.high]
    return [number * step for number in range(first, last + 1)] if last - first <= 2 * most else [axis.low, axis.high]
