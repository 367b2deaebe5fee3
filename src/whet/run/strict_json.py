"""JSON with NaN and infinity that every program can read.

JSON has no NaN and no infinity. Such a number is written as `null` and listed in a map in the same object:

    {"kind": "step", "loss": null, "nonfinite": {"loss": "nan"}}

The keys of the map are paths into the object: names joined by "/", with "~" and "/" in names written as "~0" and "~1",
as in RFC 6901. The values are "nan", "inf" or "-inf". Reading restores the numbers.
"""

import contextlib
import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsFloat, SupportsIndex

from pydantic_core import from_json, to_json

from whet.base.model import FrozenModel

NONFINITE_KEY = "nonfinite"

# Encode plain values as JSON on one line. Raise ValueError for NaN and TypeError for values that are not JSON.
encode_compact = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_pretty = json.JSONEncoder(allow_nan=False, indent=2).encode
_PLAIN = frozenset((bool, int, float, str))
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode_fast(record: dict[str, Any]) -> bytes:
    """Encode a map of Python numbers and ASCII text, six times as fast as `encode`.

    Raise ValueError for anything else.
    """
    line = to_json(record)
    if b"NaN" in line or b"Infinity" in line or not line.isascii():
        raise ValueError("NaN, infinity, or text that must be escaped")
    return line


class StrictModel(FrozenModel):
    """A frozen model that encodes NaN and infinite numbers as strict JSON."""

    def as_json(self) -> dict[str, Any]:
        """Return the model as JSON types, with NaN and infinity in the strict form."""
        return to_strict(super().as_json())

    @classmethod
    def from_json(cls, data: object, *, where: str | Path) -> Self:
        """Create the model from JSON types, with NaN and infinity restored."""
        return super().from_json(decode(encode(data)) if isinstance(data, dict) else data, where=where)


def encode(record: Mapping[str, Any], *, pretty: bool = False) -> str:
    """Return the object as strict JSON text.

    >>> encode({"loss": math.nan, "step": 3})
    '{"loss":null,"step":3,"nonfinite":{"loss":"nan"}}'
    """
    write = _pretty if pretty else encode_compact
    try:
        return write(record)
    except (ValueError, TypeError):
        return write(to_strict(record))


def to_strict(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the object to plain JSON types: without NaN, and with numbers from other libraries as Python numbers."""
    marks: dict[str, str] = {}
    result: dict[str, Any] = _clean(to_plain(record), path=None, marks=marks)
    if marks:
        result[NONFINITE_KEY] = marks
    return result


def to_plain(value: Any) -> Any:
    """Convert the value to Python types, keeping NaN. Raise TypeError for types that JSON does not have."""
    # Check for Python numbers first: a page has 100,000 of them, and a protocol check takes a microsecond.
    if value is None or type(value) in _PLAIN or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {_name(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, SupportsIndex):
        # Arrays and tensors with one element have __index__ for any dtype, but it raises unless the dtype is an
        # integer.
        with contextlib.suppress(TypeError):
            return operator.index(value)
    if isinstance(value, SupportsFloat):
        return float(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def decode(text: str | bytes) -> dict[str, Any]:
    """Decode a JSON object. Raise ValueError for anything else.

    >>> decode('{"loss":null,"nonfinite":{"loss":"nan"}}')
    {'loss': nan}
    """
    try:
        # This parser is four times as fast as the one in the standard library, and stricter.
        value = from_json(text, allow_inf_nan=False)
    except ValueError:
        value = _decode_slowly(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    if NONFINITE_KEY in value:
        _restore(value, marks=value.pop(NONFINITE_KEY))
    return value


def _decode_slowly(text: str | bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _reject_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _name(key: Any) -> str:
    if not isinstance(key, str | int):
        raise TypeError(f"a {type(key).__name__} cannot be a name in JSON")
    return str(key)


def _clean(value: Any, *, path: str | None, marks: dict[str, str]) -> Any:
    if path is not None and isinstance(value, float) and not math.isfinite(value):
        marks[path] = str(value)
        return None
    if isinstance(value, dict):
        return {k: _clean(v, path=_join(path, k), marks=marks) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean(v, path=_join(path, str(i)), marks=marks) for i, v in enumerate(value)]
    return value


def _join(path: str | None, name: str) -> str:
    name = name.replace("~", "~0").replace("/", "~1")
    return name if path is None else f"{path}/{name}"


def _restore(record: dict[str, Any], *, marks: object) -> None:
    if not isinstance(marks, dict):
        return
    for path, word in marks.items():
        *above, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/"))
        place: Any = record
        for part in above:
            place = _step_into(place, part)
        if word in _NUMBERS and _step_into(place, last, missing=0) is None:
            place[int(last) if isinstance(place, list) else last] = _NUMBERS[word]


def _step_into(place: Any, name: str, *, missing: Any = None) -> Any:
    if isinstance(place, dict):
        return place.get(name, missing)
    if isinstance(place, list) and name.isascii() and name.isdigit() and int(name) < len(place):
        return place[int(name)]
    return missing
