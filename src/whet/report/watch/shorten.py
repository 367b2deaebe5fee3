"""How long may a text of a run be on a page? Nobody reads more than this, and a log may hold lines of 16 MB."""

from typing import Any

LONGEST_TEXT = 4000
_MOST_ITEMS = 20_000
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def shorten(value: Any, *, most: int = LONGEST_TEXT) -> Any:
    """The same JSON with long texts and endless lists cut; half of a character pair, which is no text, replaced."""
    if isinstance(value, str):
        return _text(value, most)
    if isinstance(value, dict):
        items = list(value.items())[:_MOST_ITEMS]
        return {_text(name, most): shorten(item, most=most) for name, item in items}
    if isinstance(value, list):
        return [shorten(item, most=most) for item in value[:_MOST_ITEMS]]
    return value


def _text(text: str, most: int) -> str:
    clean = text if text.isascii() else text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= most else clean[: most - 1] + _ELLIPSIS
