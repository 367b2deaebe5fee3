"""What does a label cell say: one class, or several? Lists say several; signs between names do when it is clear."""

import ast
import json
from collections.abc import Iterable
from typing import Any

from whet.base.errors import UsageError

AUTO = "auto"
SEPARATORS = ("|", ";", ",")
_LONGEST_LIST = 10_000


def as_list(cell: Any) -> list[str] | None:
    """The labels of a cell that is a list, or a text that spells one; None for any other.

    >>> as_list(["a", "b"]), as_list('["a", "b"]'), as_list("['a', 'b']"), as_list("a|b")
    (['a', 'b'], ['a', 'b'], ['a', 'b'], None)
    """
    if isinstance(cell, str):
        text = cell.strip()
        if not (text.startswith("[") and text.endswith("]")) or len(text) > _LONGEST_LIST:
            return None
        try:
            cell = json.loads(text)
        except (ValueError, RecursionError):
            try:
                # Python's spelling, as programs write it; names, numbers and brackets only.
                cell = ast.literal_eval(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return None
    return [written(each) for each in cell] if isinstance(cell, list | tuple) else None


def written(value: Any) -> str:
    """A value as a label is written; 1.0 is what a table makes of 1.

    >>> written(" a "), written(1.0), written(None), written(3)
    ('a', '1', '', '3')
    """
    if value is None:
        return ""
    if isinstance(value, float):
        return "" if value != value else f"{value:g}"
    return str(value).strip()


def split_label(label: str, separator: str) -> list[str]:
    """The names in a label.

    >>> split_label("a | b|", "|")
    ['a', 'b']
    """
    return [name for piece in label.split(separator) if (name := piece.strip())]


def clear_separator(labels: Iterable[str]) -> str | None:
    """The sign that joins names in these labels, where that is clear: the names are fewer than what they form.

    >>> clear_separator(["toxic|insult", "toxic", "insult", "threat", "toxic|threat"])
    '|'
    >>> clear_separator(["History, ancient", "History, modern", "Art"]) is None
    True
    """
    whole = set(labels)
    for separator in SEPARATORS:
        if not any(separator in label for label in whole):
            continue
        pieces = {piece for label in whole for piece in split_label(label, separator)}
        alone = sum(piece in whole for piece in pieces)
        # "Smith, John" and "Smith, Jane" share pieces too: with commas most names must also stand alone.
        if len(pieces) < len(whole) and (separator != "," or 2 * alone >= len(pieces)):
            return separator
    return None


def checked_separator(wish: str | None) -> str | None:
    """`label_separator` as it was given; an empty one would cut letters."""
    if wish == "":
        raise UsageError("label_separator is empty", got="''", try_="label_separator='|', or null for none")
    return wish
