"""What `key=value` words mean: `lr=1e-4 arch.hidden_size=768 data_paths=[a,b] ema=true dropout=null ~warmup_steps`."""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from whet.base.errors import UsageError

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_MOST_DIGITS = 300
_MOST_DEPTH = 20
_CONSTANTS = {"null": None, "none": None, "true": True, "false": False}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Words(NamedTuple):
    """What words say: values by dotted key, and keys that get their default back."""

    values: dict[str, Any]
    dropped: tuple[str, ...]


def read_words(words: Iterable[str]) -> Words:
    """Words as values by dotted key; a later word wins.

    `+key=value` and `++key=value` set a key too; `~key` gives it its default back.

    >>> read_words(["lr=1e-4", "arch.layers=4", "data_paths=[a,b]", "ema=True", "seed=7", "~seed"])
    Words(values={'lr': 0.0001, 'arch.layers': 4, 'data_paths': ['a', 'b'], 'ema': True}, dropped=('seed',))
    """
    values: dict[str, Any] = {}
    dropped: dict[str, None] = {}
    for word in words:
        if word.startswith("~"):
            key = _key(word[1:], word)
            values.pop(key, None)
            dropped[key] = None
            continue
        name, equals, text = word.lstrip("+").partition("=")
        if not equals:
            meant = f"data={word}" if _is_file(word) else f"{word}=VALUE"
            raise UsageError("a setting is written key=value", got=repr(word), try_=meant)
        values[_key(name, word)] = read_value(text, word)
    return Words(values=values, dropped=tuple(dropped))


def _is_file(word: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return Path(word).exists()
    return False


def read_value(text: str, word: str, *, depth: int = 0) -> Any:
    """The value a text stands for: null, a truth value, a number, a list, or else the text itself.

    >>> read_value("1e-4", ""), read_value("null", ""), read_value("[1,[a,'b,c']]", ""), read_value("3.0", "")
    (0.0001, None, [1, ['a', 'b,c']], 3.0)
    """
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("["):
        if not text.endswith("]"):
            raise UsageError("a list is not closed", got=repr(word), try_="key=[a,b]")
        if depth >= _MOST_DEPTH:
            raise UsageError("a list is nested too deeply", got=f"over {_MOST_DEPTH} levels", try_="key=[a,b]")
        return [read_value(item, word, depth=depth + 1) for item in _split(text[1:-1], word)]
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _INTEGER.fullmatch(text) and len(text) <= _MOST_DIGITS:
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested mappings.

    >>> nest({"lr": 1, "arch.layers": 4})
    {'lr': 1, 'arch': {'layers': 4}}
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        place = tree
        for parent in parents:
            below = place.setdefault(parent, {})
            if not isinstance(below, dict):
                raise UsageError("a key is both a value and a group", got=f"{parent} and {key}", try_="one of them")
            place = below
        if isinstance(place.get(leaf), dict) and not isinstance(value, dict):
            raise UsageError("a key is both a value and a group", got=key, try_=f"{key}.NAME=VALUE")
        place[leaf] = value
    return tree


def flatten(tree: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys: the inverse of `nest`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _key(name: str, word: str) -> str:
    if not _KEY.fullmatch(name):
        raise UsageError("a key is made of letters, digits, _ and dots", got=repr(word), try_="arch.hidden_size=768")
    return name


def _split(text: str, word: str) -> list[str]:
    """Items between commas that are inside no bracket and no quotes."""
    items, item, waiting, quote = [], "", [], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSING:
            waiting.append(_CLOSING[letter])
        elif waiting and letter == waiting[-1]:
            waiting.pop()
        elif letter == "," and not waiting:
            items.append(item)
            item = ""
            continue
        item += letter
    if quote or waiting:
        raise UsageError("a quote or bracket is not closed", got=repr(word), try_="key=[a,'b,c']")
    return [*items, item] if item.strip() or items else []
