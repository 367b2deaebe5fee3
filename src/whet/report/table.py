"""Tables as plain text and as Markdown.

Names and logs may be untrusted, so all Markdown syntax in them is escaped. They cannot embed images, create links or
mention users.
"""

import re
from collections.abc import Iterable, Sequence

_SYNTAX = re.compile(r"([\\`*\[\]<>|~&#])")
_MAX_TEXT = 400


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines, with each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, or an empty text if there are no rows. The cells must already be Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(header)} |", "|" + " --- |" * len(header), *lines])


def escape_markdown(text: str) -> str:
    """Escape text, so that Markdown shows it unchanged on one line.

    >>> escape_markdown("![x](http://y) a|b @you")
    '!\\\\[x\\\\](http:\\u200b//y) a\\\\|b @\\u200byou'
    """
    line = one_line(text[:_MAX_TEXT])
    return re.sub(r"@(?=\w)", "@\u200b", _SYNTAX.sub(r"\\\1", line)).replace("://", ":\u200b//") if line else ""


def code_span(text: str) -> str:
    """Return a code span. Backticks in the text, which would end the span, are replaced."""
    line = one_line(text).replace("`", "'")
    return f"`{line.replace('|', chr(92) + '|')}`" if line else ""


def one_line(text: str) -> str:
    """Return the text on one line, without control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
