"""What a config file says: TOML or YAML, read without running anything in it."""

import tomllib
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError

_MOST_BYTES = 100_000
_MOST_DEPTH = 20


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's content as nested mappings."""
    suffix = path.suffix.lower()
    if suffix not in (".toml", ".yaml", ".yml"):
        raise UsageError(
            "a config file is TOML or YAML", got=str(path), try_="a file that ends in .toml, .yaml or .yml"
        )
    text = _read(path)
    content = _parse_toml(text, path) if suffix == ".toml" else _parse_yaml(text, path)
    if content is None:
        return {}
    if _depth(content) > _MOST_DEPTH:
        raise _too_deep(path)
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UsageError(f"{path} does not hold keys and values", got=type(content).__name__, try_="lr: 1e-4")
    return content


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise UsageError("the config file cannot be read", got=f"{path}: not a file", try_="check the path")
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            "the config file cannot be read", got=f"{path}: {error.strerror}", try_="check the path"
        ) from None
    if len(data) > _MOST_BYTES:
        raise UsageError(
            "the config file is too large", got=f"{path}: over {_MOST_BYTES:,} bytes", try_="the right file"
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
        raise _too_deep(path) from None
    except ValueError as error:
        # A number of thousands of digits.
        raise UsageError(f"{path} is not valid TOML", got=str(error), try_="lr = 1e-4") from None


def _parse_yaml(text: str, path: Path) -> Any:
    import yaml

    try:
        depth = 0
        # Before it is built: deep nesting takes minutes, and aliases can blow a small file up.
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise UsageError(f"{path} uses YAML aliases", got=f"*{event.anchor}", try_="write the value out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MOST_DEPTH:
                raise _too_deep(path)
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UsageError(f"{path} is not valid YAML", got=f"{place}{problem}", try_="lr: 1e-4") from None
    except ValueError as error:
        # A value that looks like a date and is none.
        raise UsageError(f"{path} is not valid YAML", got=str(error), try_="quote the value") from None


def _depth(content: Any) -> int:
    """How deeply groups are nested, counted without recursion."""
    level, depth = [content], 0
    while level and depth <= _MOST_DEPTH + 1:
        level, depth = [v for c in level if isinstance(c, dict) for v in c.values()], depth + 1
    return depth - 1


def _too_deep(path: Path) -> UsageError:
    return UsageError(f"{path} is nested too deeply", got=f"over {_MOST_DEPTH} levels", try_="keys and groups of keys")
