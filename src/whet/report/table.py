"""Format tables as plain text, and plain text as Markdown."""

from collections.abc import Sequence

from whet.base.units import one_line, printable_line


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of text. Each column is as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def markdown_page(title: str, text: str) -> str:
    """Return plain text as a Markdown code block under a heading.

    Names and logs may be untrusted. In a code block they cannot embed images, create links or mention users. Backticks
    are replaced, so that they cannot end the block.
    """
    lines = [printable_line(line) for line in text.splitlines()]
    block = "\n".join(lines).replace("`", "'")
    return f"# `{one_line(title).replace('`', chr(39))}`\n\n```text\n{block}\n```\n"
