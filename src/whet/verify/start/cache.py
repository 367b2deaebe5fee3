"""Cache of start checks that passed, keyed by everything that can change their result."""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from whet.base import env
from whet.base.errors import WhetError
from whet.run import durable

_FORMAT = 2
_LONGEST = 10_000
_DEEPEST, _MOST = 4, 1_000
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARIES = {"site-packages", "dist-packages"}
_STDLIB = Path(sysconfig.get_paths()["stdlib"])
_SCALARS = (bool, int, float, str, type(None))


def cache_key(
    facts: Mapping[str, Any], model: nn.Module, functions: tuple[Callable[..., Any] | None, ...]
) -> str | None:
    """What stands for this model with these functions under these facts; None where not all of it can be known."""
    mine = {*_your_modules()}
    try:
        files = {*_sources(model, functions), *(Path(str(module.__file__)) for module in mine)}
        digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)]
    except (OSError, TypeError):
        return None
    carried = [(_which(function), _captured(function)) for function in functions]
    said = sorted((module.__name__, _globals(module)) for module in mine)
    parts = [_FORMAT, facts, _structure(model), digests, carried, said]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def load_verified(key: str) -> str | None:
    """What was found when it was verified, in words; None where it was not, or the file is damaged."""
    try:
        path = _path(key)
        kept = json.loads(path.read_bytes()) if path.stat().st_size <= _LONGEST else {}
        found = kept["found"]
        return found if kept["key"] == key and isinstance(found, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_verified(key: str, found: str) -> None:
    """Keeps what was found; a home that cannot be written costs a second at the next start, not the run."""
    with contextlib.suppress(WhetError):
        durable.make_directory(_path(key).parent)
        durable.write_file(_path(key), data=json.dumps({"key": key, "found": found}).encode())


def _path(key: str) -> Path:
    return env.home() / "verified" / f"{key}.json"


def _structure(model: nn.Module) -> list[Any]:
    """Classes, options, and the names, shapes, types and layouts of all tensors."""
    modules = [(name, _class(module), _options(module)) for name, module in model.named_modules()]
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.is_contiguous())
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return [modules, tensors]


def _class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _options(module: nn.Module) -> dict[str, Any]:
    """What a module keeps as plain values: heads, windows, flags, and lists or tables of them."""
    return {name: _plain(value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def _plain(value: Any, depth: int = 0) -> Any:
    """A value as far as it can be written down; of anything else its kind."""
    if isinstance(value, _SCALARS):
        return value
    if dataclasses.is_dataclass(value):
        return repr(value)
    if inspect.isroutine(value):
        return _which(value)
    if isinstance(value, SimpleNamespace | Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and depth < _DEEPEST and len(value) <= _MOST:
        return [(str(key), _plain(inner, depth + 1)) for key, inner in value.items()]
    if isinstance(value, list | tuple) and depth < _DEEPEST and len(value) <= _MOST:
        return [_plain(inner, depth + 1) for inner in value]
    return type(value).__qualname__


def _sources(model: nn.Module, functions: tuple[Callable[..., Any] | None, ...]) -> Iterator[Path]:
    """The files that say what is computed; torch's own are known by its version."""
    kinds = {type(module) for module in model.modules()}
    for thing in (*kinds, *filter(None, map(_unwrapped, functions))):
        if not str(getattr(thing, "__module__", "")).startswith("torch."):
            yield Path(inspect.getsourcefile(thing) or "")


def _your_modules() -> Iterator[ModuleType]:
    """What is loaded and no library: a mask may be made in a helper's file, by a switch that stands there."""
    for name, module in list(sys.modules.items()):
        path = Path(str(getattr(module, "__file__", None) or ""))
        is_library = name.partition(".")[0] == "whet" or not {*path.parts}.isdisjoint(_LIBRARIES)
        # Some of torch's modules name files that are not there.
        is_file = isinstance(module, ModuleType) and path.suffix == ".py" and path.is_file()
        if is_file and not is_library and _STDLIB not in path.parents:
            yield module


def _globals(module: ModuleType) -> list[tuple[str, Any]]:
    known = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return sorted((name, value) for name, value in known.items() if isinstance(value, _SCALARS))


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isfunction(function) or inspect.ismethod(function) or function is None:
        return function
    return type(function)


def _which(function: Any) -> list[Any]:
    """Which function of its file it is: two of them may stand in one line."""
    function = _unwrapped(function)
    code = getattr(function, "__code__", None)
    where = [] if code is None else [code.co_firstlineno, code.co_code.hex(), code.co_names]
    return [getattr(function, "__module__", ""), getattr(function, "__qualname__", ""), *where]


def _captured(function: Any) -> list[Any]:
    """The plain values that a function carries along: arguments of a partial, variables around it."""
    carried: list[Any] = []
    while isinstance(function, functools.partial):
        carried += [*function.args, *function.keywords.items()]
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            carried.append(cell.cell_contents)
    code = getattr(function, "__code__", None)
    carried += code.co_consts if code is not None else ()
    return [_plain(value) for value in carried]
