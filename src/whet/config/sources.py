"""Read options from key=value arguments and from TOML or YAML files."""

import contextlib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.base.errors import UsageError, first_line

if TYPE_CHECKING:
    import yaml

# Limits that reject files that are not configs. A config has a few kilobytes, and two or three levels.
_MAX_FILE_BYTES = 100_000
_MAX_FILE_DEPTH = 20


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a config file as nested mappings. YAML tags that would run code are rejected."""
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            "a config file is TOML or YAML", got=str(path), try_="a file that ends in .toml, .yaml or .yml"
        )
    text = _read_text(path)
    content = _parse_toml(text, path) if suffix == ".toml" else _parse_yaml(text, path)
    if content is None:
        return {}
    if _nesting_depth(content) > _MAX_FILE_DEPTH:
        raise _too_deep_error(path)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path} does not contain keys and values", got=type(content).__name__, try_="lr: 1e-4")
    return content


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise UsageError("the config file cannot be read", got=f"{path}: not a file", try_="check the path")
    try:
        with path.open("rb") as file:
            # Read one byte more than allowed, to detect a larger file without reading all of it.
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            "the config file cannot be read", got=f"{path}: {error.strerror}", try_="check the path"
        ) from None
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(
            "the config file is too large", got=f"{path}: over {_MAX_FILE_BYTES:,} bytes", try_="the right file"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            "the config file is not UTF-8 text", got=f"{path}: byte {error.start}", try_="save it as UTF-8"
        ) from None


def _parse_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML", got=str(error), try_='lr = 1e-4 or name = "text"') from None
    except RecursionError:
        raise _too_deep_error(path) from None
    except ValueError as error:
        # tomllib raises ValueError for a number with thousands of digits.
        raise UsageError(f"{path} is not valid TOML", got=str(error), try_="lr = 1e-4") from None


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        depth = 0
        # Check the event stream before building values, because deep nesting takes minutes, and aliases can expand a
        # small file to gigabytes.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{path} uses YAML aliases", got=f"*{event.anchor}", try_="write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_FILE_DEPTH:
                raise _too_deep_error(path)
        loader = _unique_key_loader()(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise UsageError(f"{path} is not valid YAML", got=f"{place}{problem}", try_="lr: 1e-4") from None
    except ValueError as error:
        # PyYAML raises ValueError for an invalid value that looks like a date, such as 2024-13-01.
        raise UsageError(f"{path} is not valid YAML", got=str(error), try_="quote the value") from None


@cache
def _unique_key_loader() -> type["yaml.SafeLoader"]:
    """Return a subclass of PyYAML's SafeLoader that rejects repeated keys instead of taking the last value."""
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {str(key)[:100]!r} occurs twice", key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep=deep)

    return UniqueKeyLoader


def _nesting_depth(content: Any) -> int:
    """Return the number of levels of nested mappings."""
    level, depth = [content], 0
    while level and depth <= _MAX_FILE_DEPTH + 1:
        # Do not recurse, because a file that is nested 100,000 levels deep would overflow the stack.
        level, depth = [v for c in level if isinstance(c, dict) for v in c.values()], depth + 1
    return depth - 1


def _too_deep_error(path: Path) -> UsageError:
    return UsageError(
        f"{path} is nested too deeply", got=f"over {_MAX_FILE_DEPTH} levels", try_="keys and groups of keys"
    )


_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
# int() is slow for long numbers and rejects those with over 4,300 digits.
_MAX_DIGITS = 300
_MAX_LIST_DEPTH = 20
_CONSTANTS = {"null": None, "none": None, "true": True, "false": False}
_CLOSING_BRACKETS = {"[": "]", "(": ")", "{": "}"}


class ParsedArgs(NamedTuple):
    """Values by dotted key, and the keys to reset to their defaults."""

    values: dict[str, Any]
    dropped: tuple[str, ...]


def parse_args(args: Iterable[str]) -> ParsedArgs:
    """Parse key=value arguments. The last value of a key wins.

    As in Hydra, `+key=value` and `++key=value` set a key too, and `~key` resets it to its default.

    >>> parse_args(["lr=1e-4", "arch.layers=4", "data_paths=[a,b]", "ema=True", "seed=7", "~seed"])
    ParsedArgs(values={'lr': 0.0001, 'arch.layers': 4, 'data_paths': ['a', 'b'], 'ema': True}, dropped=('seed',))
    """
    values: dict[str, Any] = {}
    dropped: dict[str, None] = {}
    for word in args:
        if word.startswith("~"):
            key = _check_key(word[1:], word)
            values.pop(key, None)
            dropped[key] = None
            continue
        # In Hydra, + and ++ add a key. Here every key is declared, so they mean the same as no prefix.
        name, equals, text = word.lstrip("+").partition("=")
        if not equals:
            meant = f"data={word}" if _is_file(word) else f"{word}=VALUE"
            raise UsageError("a setting is written key=value", got=repr(word), try_=meant)
        values[_check_key(name, word)] = parse_value(text, word)
    return ParsedArgs(values=values, dropped=tuple(dropped))


def _is_file(word: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return Path(word).exists()
    return False


def parse_value(text: str, word: str, *, depth: int = 0) -> Any:
    """Parse null, true, false, a number or a list. Return any other text unchanged.

    >>> parse_value("1e-4", ""), parse_value("null", ""), parse_value("[1,[a,'b,c']]", ""), parse_value("3.0", "")
    (0.0001, None, [1, ['a', 'b,c']], 3.0)
    """
    text = text.strip()
    # A quoted value is text, as in name="42".
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.startswith("["):
        if not text.endswith("]"):
            raise UsageError("a list is not closed", got=repr(word), try_="key=[a,b]")
        if depth >= _MAX_LIST_DEPTH:
            raise UsageError("a list is nested too deeply", got=f"over {_MAX_LIST_DEPTH} levels", try_="key=[a,b]")
        return [parse_value(item, word, depth=depth + 1) for item in _split_items(text[1:-1], word)]
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    # A longer integer becomes a float below, which validation rejects.
    if _INTEGER.fullmatch(text) and len(text) <= _MAX_DIGITS:
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def as_argument(key: str, value: Any) -> str:
    """Return a setting as a command-line argument."""
    return f"{key}={as_text(value)}"


def as_text(value: Any) -> str:
    """Return a value as text that `parse_value` reads back.

    >>> as_text(0.0001), as_text(True), as_text(None), as_text(["a", "b,c"]), as_text("7"), as_text(64)
    ('0.0001', 'true', 'null', "[a,'b,c']", "'7'", '64')
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(as_text(item) for item in value)}]"
    if isinstance(value, str):
        is_plain = parse_value(value, value) == value and not set(value) & set("[](){},'\"")
        return value if is_plain else f'"{value}"' if "'" in value else f"'{value}'"
    return repr(value)


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted keys to nested mappings.

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
    """Convert nested mappings to dotted keys. This is the inverse of `nest`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _check_key(name: str, word: str) -> str:
    if not _KEY.fullmatch(name):
        raise UsageError("a key is made of letters, digits, _ and dots", got=repr(word), try_="arch.hidden_size=768")
    return name


def _split_items(text: str, word: str) -> list[str]:
    """Split text at commas that are outside brackets and quotes."""
    items, item, waiting, quote = [], "", [], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in _CLOSING_BRACKETS:
            waiting.append(_CLOSING_BRACKETS[letter])
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
