"""Tables as plain text and as Markdown.

Names and logs come from anywhere, so all Markdown syntax in them is escaped: no image is fetched, no link is made and
nobody is mentioned.
"""

import re
from collections.abc import Iterable, Sequence

_SYNTAX = re.compile(r"([\\`*\[\]<>|~&#])")
_MAX_TEXT = 400


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; empty without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines])


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line.

    >>> escape_markdown("![x](http://y) a|b @you")
    '!\\\\[x\\\\](http:\\u200b//y) a\\\\|b @\\u200byou'
    """
    line = one_line(text[:_MAX_TEXT])
    return re.sub(r"@(?=\w)", "@\u200b", _SYNTAX.sub(r"\\\1", line)).replace("://", ":\u200b//") if line else ""


def code_span(text: str) -> str:
    """A code span; backticks, which would end it, are replaced."""
    line = one_line(text).replace("`", "'")
    return f"`{line.replace('|', chr(92) + '|')}`" if line else ""


def one_line(text: str) -> str:
    """The text on one line, without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
