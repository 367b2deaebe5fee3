"""JSON for files that may have been made by anybody: one way to write a value, and limits on what is read."""

import json
from typing import Any, NoReturn

MOST_BYTES = 64 * 1024**2
MOST_DEPTH = 64


def dump(value: Any) -> bytes:
    """The one text of a value; ValueError for NaN, TypeError for what is not JSON."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def load(data: bytes | bytearray) -> dict[str, Any]:
    """The object in a text that `dump` wrote; ValueError for any other text, however close."""
    value = load_any_order(data)
    if dump(value) != data:
        raise ValueError("not written the way whet writes JSON")
    return value


def load_any_order(data: bytes | bytearray) -> dict[str, Any]:
    """The object in any strict JSON text within the limits, names in their order; else ValueError."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data):,} bytes of JSON; {MOST_BYTES:,} are the most")
    try:
        value = json.loads(data, parse_constant=_refuse, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _refuse_depth(value, left=MOST_DEPTH)
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that comes twice means one thing to us and another to the next reader."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refuse_depth(value: Any, *, left: int) -> None:
    if left == 0:
        raise ValueError("nested too deeply")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        if isinstance(item, dict | list):
            _refuse_depth(item, left=left - 1)
