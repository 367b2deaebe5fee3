"""Draw curves with characters: braille dots, or ASCII if the terminal has no Unicode."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whet.run.curve import Curve

_BRAILLE = 0x2800
# _DOTS[x][y] is the bit of the dot in column x and row y of a braille character.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_MIN_PLOT_COLUMNS = 8
_BARS = "".join(chr(0x2581 + height) for height in range(8))
_ASCII_BARS = "_.-=+*#"


def draw_curve(curve: Curve, *, width: int, height: int, unicode: bool = True) -> tuple[str, ...]:
    """Draw a curve in `height` lines of at most `width` characters, plus a line with step numbers.

    Each point is drawn from its minimum to its maximum. NaN leaves a gap. Return no lines if there are no values.
    """
    drawable = [p for p in curve.points if p.low is not None and p.high is not None]
    if not drawable or width < 2 or height < 1:
        return ()
    low = min(p.low for p in drawable if p.low is not None)
    high = max(p.high for p in drawable if p.high is not None)
    labels = (_label(high), _label(low))
    margin = max(map(len, labels)) + 2
    if width - margin < _MIN_PLOT_COLUMNS:
        margin = 0
    columns = width - margin
    dots = (2, 4) if unicode else (1, 1)  # A braille character has 2 by 4 dots.
    canvas = _Canvas(num_x=columns * dots[0], num_y=height * dots[1], marks=set())
    _plot(canvas, curve, low=low, high=high)
    rows = [canvas.text(row, dots=dots) for row in range(height)]
    bar = "\u2502" if unicode else "|"
    if margin:
        rows = [f"{_row_label(i, height, labels):>{margin - 2}} {bar}{row}" for i, row in enumerate(rows)]
    return (*(row.rstrip() for row in rows), " " * margin + _steps(curve, columns=columns))


def sparkline(means: Sequence[float | None], *, width: int, unicode: bool = True) -> str:
    """Draw values on one line of at most `width` characters. None leaves a gap."""
    columns = min(width, len(means))
    cells = [_mean(means[i * len(means) // columns : (i + 1) * len(means) // columns]) for i in range(columns)]
    there = [value for value in cells if value is not None]
    if not there:
        return ""
    marks = _BARS if unicode else _ASCII_BARS
    low, span = min(there) / 2, max(there) / 2 - min(there) / 2

    def mark(value: float | None) -> str:
        return " " if value is None else marks[round((value / 2 - low) / span * (len(marks) - 1)) if span > 0 else 0]

    return "".join(map(mark, cells))


def _mean(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(value / len(there) for value in there) if there else None


@dataclass(frozen=True, slots=True)
class _Canvas:
    num_x: int
    num_y: int
    marks: set[tuple[int, int]]
    """Positions of the dots as (x, y), with y = 0 at the bottom."""

    def column(self, x: int, y_from: int, y_to: int) -> None:
        self.marks.update((x, y) for y in range(min(y_from, y_to), max(y_from, y_to) + 1))

    def text(self, row: int, *, dots: tuple[int, int]) -> str:
        across, down = dots
        top = self.num_y - 1 - row * down
        cells: list[str] = []
        for left in range(0, self.num_x, across):
            lit = [(x, y) for x in range(across) for y in range(down) if (left + x, top - y) in self.marks]
            if not lit:
                cells.append(" ")
            elif dots == (1, 1):
                cells.append("*")
            else:
                cells.append(chr(_BRAILLE + sum(_DOTS[x][y] for x, y in lit)))
        return "".join(cells)


def _plot(canvas: _Canvas, curve: Curve, *, low: float, high: float) -> None:
    first, last = curve.points[0].step, max(curve.last_step, curve.points[-1].step)

    def x_of(step: int) -> int:
        return (step - first) * (canvas.num_x - 1) // max(1, last - first)

    def y_of(value: float) -> int:
        # Compute with halves, because the difference of two finite numbers may overflow.
        span = high / 2 - low / 2
        return round((value / 2 - low / 2) / span * (canvas.num_y - 1)) if span > 0 else canvas.num_y // 2

    before: tuple[int, int] | None = None
    for point in curve.points:
        if point.low is None or point.high is None or point.mean is None:
            before = None
            continue
        position = (x_of(point.step), y_of(point.mean))
        if before is not None:
            for x, y_from, y_to in _line(before, position):
                canvas.column(x, y_from, y_to)
        canvas.column(position[0], y_of(point.low), y_of(point.high))
        before = position if not point.nonfinite else None


def _line(start: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield (x, y_from, y_to) for each column of a straight line between two dots."""
    (x0, y0), (x1, y1) = start, end
    if x1 == x0:
        yield x0, y0, y1
    for x in range(x0, x1):
        yield x, y0 + (y1 - y0) * (x - x0) // (x1 - x0), y0 + (y1 - y0) * (x + 1 - x0) // (x1 - x0)


def _label(value: float) -> str:
    return f"{value:.4g}"


def _row_label(row: int, height: int, labels: tuple[str, str]) -> str:
    return labels[0] if row == 0 else labels[1] if row == height - 1 else ""


def _steps(curve: Curve, *, columns: int) -> str:
    first, last = f"{curve.points[0].step}", f"{max(curve.last_step, curve.points[-1].step)}"
    if first == last or len(first) + len(last) + 1 > columns:
        return last[:columns]
    return first + last.rjust(columns - len(first))
