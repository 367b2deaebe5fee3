"""Draw self-contained SVG charts: measured points with error bars, and curves with bands.

The charts need no other files, and follow the light or dark theme of the browser.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from whet.base.errors import UsageError
from whet.base.units import printable_line
from whet.run import durable

_WIDTH, _PANEL_HEIGHT = 640, 250
# Margins of a panel in pixels, for the labels and titles of the axes.
_LEFT, _RIGHT, _TOP, _BOTTOM = 86, 24, 34, 50
_HEAD = 50
_LINE = 18
# Sizes of a panel with a curve, which is lower, because there is no title below its x axis.
_CURVE_PANEL_HEIGHT, _CURVE_TOP, _CURVE_BOTTOM = 200, 30, 36
# Draw dots on curves with at most this many points.
_MAX_DOTS = 40
# If the limit is above this multiple of the highest point, use a logarithmic scale. A linear one would flatten them.
_WIDE_RANGE = 6.0
CHART_STYLE = """
.whet-chart { color: #1f2328; font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
.whet-chart text { fill: currentColor; }
.whet-chart .quiet { opacity: .65; }
.whet-chart .grid { stroke: currentColor; opacity: .14; }
.whet-chart .axis { stroke: currentColor; opacity: .5; }
.whet-chart .data { stroke: #2f6fde; fill: #2f6fde; }
.whet-chart .line { stroke: #2f6fde; fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.whet-chart .band { fill: #2f6fde; opacity: .22; }
.whet-chart .paper { fill: #ffffff; }
.whet-chart .chosen { stroke: #c2410c; fill: #c2410c; }
.whet-chart .ring { stroke: #c2410c; fill: none; stroke-width: 2; }
.whet-chart .cross { stroke: #b42318; stroke-width: 2; }
.whet-chart .limit { stroke: #b42318; stroke-dasharray: 6 4; stroke-width: 1.5; }
.whet-chart .limit-text { fill: #b42318; }
@media (prefers-color-scheme: dark) {
  .whet-chart { color: #e6edf3; }
  .whet-chart .data { stroke: #79a8ff; fill: #79a8ff; }
  .whet-chart .line { stroke: #79a8ff; }
  .whet-chart .band { fill: #79a8ff; }
  .whet-chart .paper { fill: #0d1117; }
  .whet-chart .chosen { stroke: #ff9a62; fill: #ff9a62; }
  .whet-chart .ring { stroke: #ff9a62; }
  .whet-chart .limit, .whet-chart .cross { stroke: #ff8a80; }
  .whet-chart .limit-text { fill: #ff8a80; }
}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartPoint:
    """One point of a chart. Without a value it is drawn as a cross, and its tooltip gives the reason."""

    label: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    is_chosen: bool = False
    is_hollow: bool = False
    """Whether the point is hollow, which means that its value is predicted or from a single step."""
    tooltip: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartPanel:
    """One pair of axes. Its points are evenly spaced, in the given order."""

    title: str
    x_title: str
    points: Sequence[ChartPoint]
    format_y: Callable[[float], str]
    """Function that formats the labels of the y axis."""
    limit: float | None = None
    limit_label: str = ""
    is_joined: bool = True
    """Whether a line connects the points. Use it only if the x axis has an order."""
    is_binary: bool = False
    """Whether units are powers of 1024 instead of 1000."""


def draw_chart(title: str, panels: Sequence[ChartPanel], *, subtitle: str = "", footer: Sequence[str] = ()) -> str:
    """Return an SVG document with the panels one below the other."""
    end = _HEAD + len(panels) * _PANEL_HEIGHT
    parts = [
        *_stacked([_draw_panel(panel) for panel in panels], height=_PANEL_HEIGHT),
        *(svg_text(_LEFT - 62, end + _LINE * number, line, css="quiet") for number, line in enumerate(footer, start=1)),
    ]
    return _document(title, subtitle, parts, height=end + _LINE * len(footer) + 10)


def _document(title: str, subtitle: str, parts: Iterable[str], *, height: int) -> str:
    return "\n".join(
        [
            svg_start(title, height),
            f"<title>{escape_svg(title)}</title>",
            f"<style>{CHART_STYLE}</style>",
            # Draw a background, because the themes of the notebook and of the system may differ.
            f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
            svg_text(_LEFT - 62, 20, title, extra='font-weight="600" font-size="15"'),
            svg_text(_LEFT - 62, 38, subtitle, css="quiet"),
            *parts,
            "</svg>",
            "",
        ]
    )


def svg_start(title: str, height: int) -> str:
    """Return the opening tag of an SVG document with the style of a chart."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="whet-chart" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}" role="img" aria-label="{escape_svg(title)}">'
    )


def _stacked(panels: Sequence[Iterable[str]], *, height: int) -> Iterator[str]:
    for number, panel in enumerate(panels):
        yield f'<g transform="translate(0 {_HEAD + number * height})">'
        yield from panel
        yield "</g>"


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps numbers to positions in an image, linearly or logarithmically."""

    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return the position of a number, or the middle of the axis if its range is empty."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        # Compute with halves, because the difference of two finite numbers may overflow.
        half = high / 2 - low / 2
        share = (value / 2 - low / 2) / half if half > 0 else 0.5
        return round(self.begin + share * (self.end - self.begin), 1)


def _draw_panel(panel: ChartPanel) -> Iterator[str]:
    floor, right = _PANEL_HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    scale, ticks = _scale(panel)
    yield svg_text(_LEFT, 22, panel.title + (", logarithmic" if scale.is_log else ""), extra='font-weight="600"')
    for tick in ticks:
        y = scale.place(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield svg_text(_LEFT - 8, y + 4, panel.format_y(tick), css="quiet", extra='text-anchor="end"')
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    yield svg_text((_LEFT + right) / 2, floor + 40, panel.x_title, css="quiet", extra='text-anchor="middle"')
    places = [(point, _across(number, len(panel.points))) for number, point in enumerate(panel.points)]
    if panel.is_joined:
        joined = " ".join(f"{x},{scale.place(point.value or 0)}" for point, x in places if _is_solid(point))
        yield f'<polyline class="line" points="{joined}"/>'
    if panel.limit is not None:
        y = scale.place(panel.limit)
        yield f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        # Put the label on the left, because rising values are close to the limit on the right.
        yield svg_text(_LEFT + 6, y - 6, panel.limit_label, css="limit-text")
    for point, x in places:
        yield svg_text(x, floor + 20, point.label, extra='text-anchor="middle"' + _bold(point))
        yield from _draw_point(point, x, scale)


def _draw_point(point: ChartPoint, x: float, scale: AxisScale) -> Iterator[str]:
    floor = _PANEL_HEIGHT - _BOTTOM
    tooltip = f"<title>{escape_svg(point.tooltip)}</title>" if point.tooltip else ""
    if point.value is None:
        yield f'<path class="cross" d="M{x - 5} {floor - 15}l10 10m0 -10l-10 10">{tooltip}</path>'
        return
    css, y = "chosen" if point.is_chosen else "data", scale.place(point.value)
    if point.low is not None and point.high is not None:
        top, bottom = scale.place(point.high), scale.place(point.low)
        yield (
            f'<path class="{css}" style="fill:none" stroke-width="1.5" '
            f'd="M{x} {top}V{bottom}M{x - 5} {top}h10M{x - 5} {bottom}h10"/>'
        )
    hollow = ' style="fill:none"' if point.is_hollow else ""
    yield f'<circle class="{css}"{hollow} cx="{x}" cy="{y}" r="4">{tooltip}</circle>'
    if point.is_chosen:
        yield f'<circle class="ring" cx="{x}" cy="{y}" r="8"/>'


def _scale(panel: ChartPanel) -> tuple[AxisScale, list[float]]:
    floor = _PANEL_HEIGHT - _BOTTOM
    known = [v for p in panel.points for v in (p.value, p.low, p.high) if v is not None and math.isfinite(v)]
    highest = max([*known, 0.0])
    limit = panel.limit if panel.limit is not None else highest
    unit = 1024.0 ** int(math.log(max(limit, highest, 1), 1024)) if panel.is_binary else 1.0
    if known and min(known) > 0 and limit > _WIDE_RANGE * highest:
        low, high = min(known) / 1.5, limit * 1.6
        step = 4 if panel.is_binary else 10
        ticks = [float(step) ** power for power in range(math.ceil(math.log(low, step)), 64)]
        return AxisScale(low, high, floor, _TOP, is_log=True), [tick for tick in ticks if low <= tick <= high]
    top = max(limit, highest) or 1.0
    ticks = [tick * unit for tick in round_ticks(top / unit)]
    # Leave space at the top for the label of the limit and for error bars.
    return AxisScale(0.0, max(ticks[-1], top * 1.12), floor, _TOP), ticks


def round_ticks(top: float, *, most: int = 5) -> list[float]:
    """Return round numbers from 0 to `top`, in at most `most` steps of 1, 2 or 5 times a power of ten.

    >>> round_ticks(870.0), round_ticks(0.3)
    ([0.0, 200.0, 400.0, 600.0, 800.0], [0.0, 0.1, 0.2, 0.3])
    """
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if top / (power * factor) <= most)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(step * number, digits) for number in range(math.floor(top / step + 1e-9) + 1)]


def _across(number: int, count: int) -> float:
    return round(_LEFT + (number + 0.5) * (_WIDTH - _LEFT - _RIGHT) / count, 1)


def _is_solid(point: ChartPoint) -> bool:
    return point.value is not None and not point.is_hollow


def _bold(point: ChartPoint) -> str:
    return ' font-weight="700"' if point.is_chosen else ""


def svg_text(x: float, y: float, text: str, *, css: str = "", extra: str = "") -> str:
    named = f' class="{css}"' if css else ""
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}"{named} {extra}>{escape_svg(text)}</text>'


def escape_svg(text: str) -> str:
    """Escape markup and remove characters that XML forbids."""
    return escape(printable_line(text))


@dataclass(frozen=True, slots=True)
class SvgImage:
    """An SVG image that a notebook can display. `save` writes it to a file."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<SVG image of {len(self.svg):,} bytes; .save(path) writes it>"

    def save(self, path: Path | str) -> Path:
        """Write the image to a file, replacing an existing one, and return the path."""
        path = Path(path).expanduser().absolute()
        if path.suffix.lower() not in ("", ".svg"):
            raise UsageError("images are written as SVG", got=path.name, try_=f"{path.stem}.svg")
        durable.write_file(path, data=self.svg.encode())
        return path


@dataclass(frozen=True, slots=True)
class CurveBand:
    """One curve with the minimum, mean and maximum at each x position. NaN leaves a gap."""

    name: str
    x: Sequence[float]
    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]


def draw_curve_panels(title: str, lines: Sequence[CurveBand], *, subtitle: str, x_title: str) -> SvgImage:
    panels = _stacked([_draw_curve_panel(line, x_title=x_title) for line in lines], height=_CURVE_PANEL_HEIGHT)
    parts = [*panels] or [svg_text(_LEFT, _HEAD + 40, "no steps yet", css="quiet")]
    return SvgImage(_document(title, subtitle, parts, height=_HEAD + _CURVE_PANEL_HEIGHT * max(1, len(lines)) + 10))


def _draw_curve_panel(line: CurveBand, *, x_title: str) -> Iterator[str]:
    floor, right = _CURVE_PANEL_HEIGHT - _CURVE_BOTTOM, _WIDTH - _RIGHT
    values = [v for v in (*line.low, *line.high) if math.isfinite(v)]
    yield svg_text(_LEFT, 18, line.name, extra='font-weight="600"')
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>'
    if not values:
        yield svg_text(_LEFT, floor - 20, "no finite numbers", css="quiet")
        return
    across = AxisScale(min(line.x), max(line.x), _LEFT, right)
    up = AxisScale(min(values), max(values), floor, _CURVE_TOP)
    for tick in _ticks(up, most=4):
        y = up.place(tick)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield svg_text(_LEFT - 8, y + 4, f"{tick:.6g}", css="quiet", extra='text-anchor="end"')
    for tick in _ticks(across, most=6):
        yield svg_text(across.place(tick), floor + 18, f"{tick:,.10g}", css="quiet", extra='text-anchor="middle"')
    yield svg_text(right, 18, x_title, css="quiet", extra='text-anchor="end"')
    for piece in _gapless_ranges(line):
        yield from _draw_range(line, piece, across, up)


def _draw_range(line: CurveBand, piece: range, across: AxisScale, up: AxisScale) -> Iterator[str]:
    if len(piece) <= _MAX_DOTS:
        places = ((across.place(line.x[i]), up.place(line.mean[i])) for i in piece)
        yield from (f'<circle class="data" cx="{x}" cy="{y}" r="2.5"/>' for x, y in places)
    there = [f"{across.place(line.x[i])},{up.place(line.high[i])}" for i in piece]
    back = [f"{across.place(line.x[i])},{up.place(line.low[i])}" for i in reversed(piece)]
    yield f'<polygon class="band" points="{" ".join(there + back)}"/>'
    middle = " ".join(f"{across.place(line.x[i])},{up.place(line.mean[i])}" for i in piece)
    yield f'<polyline class="line" points="{middle}"/>'


def _gapless_ranges(line: CurveBand) -> Iterator[range]:
    """Yield the ranges of consecutive points without a gap."""
    start = None
    for i, value in enumerate((*line.mean, math.nan)):
        if math.isfinite(value):
            start = i if start is None else start
        elif start is not None:
            yield range(start, i)
            start = None


def _ticks(axis: AxisScale, *, most: int) -> list[float]:
    """Return round numbers within the axis, or its two ends if no round number fits."""
    span = axis.high - axis.low
    if not (0 < span < math.inf):
        return [axis.low] if span == 0 else [axis.low, axis.high]
    try:
        step = round_ticks(span, most=most)[1]
        first, last = math.ceil(axis.low / step - 1e-9), math.floor(axis.high / step + 1e-9)
    except (ValueError, OverflowError, ZeroDivisionError, StopIteration, IndexError):
        return [axis.low, axis.high]
    return [number * step for number in range(first, last + 1)] if last - first <= 2 * most else [axis.low, axis.high]
