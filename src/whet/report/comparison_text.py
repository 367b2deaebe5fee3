"""How do runs side by side read as plain text? Figures first, then only what differs."""

from collections.abc import Sequence

from whet.base.units import printable
from whet.report.comparing import CompareView, Row
from whet.report.figures import figures

_LONGEST = 40


def render_comparison(comparison: CompareView) -> str:
    """Tables of what each run reached and of what is different between them."""
    each = [figures(view) for view in comparison.runs]
    names = dict.fromkeys(name for one in each for name in one)
    sections = [_table("", comparison.labels, [(name, [one.get(name, "-") for one in each]) for name in names])]
    for title, rows in parts(comparison):
        different = [row for row in rows if row.differs]
        if different:
            sections.append(
                _table(title, comparison.labels, [(r.name, [v or "-" for v in r.values]) for r in different])
            )
        else:
            sections.append(f"{title}: nothing differs")
    return "\n\n".join(sections)


def parts(comparison: CompareView) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """What may differ between runs, by name."""
    return (
        ("settings of the plan", comparison.settings),
        ("configuration", comparison.config),
        ("environment", comparison.environment),
    )


def _table(title: str, labels: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [(title, *labels), *((name, *values) for name, values in rows)]
    shown = [[_cell(cell) for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in shown) for column in range(len(shown[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in shown)


def _cell(text: str) -> str:
    clean = printable(text).replace("\n", " ")
    return clean if len(clean) <= _LONGEST else clean[: _LONGEST - 3] + "..."
