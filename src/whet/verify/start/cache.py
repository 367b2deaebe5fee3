"""A cache of passed start checks, keyed by everything that can change their result.

The cache is in whet's home folder. A model whose source code cannot be read has no key, and is checked at every start.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
from torch import nn

from whet.base import env
from whet.base.errors import WhetError
from whet.base.origin import code_origin
from whet.run import durable

_FORMAT = 5
_MAX_FILE_BYTES = 10_000
_MAX_DEPTH, _MAX_ITEMS = 4, 1_000
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_SCALARS = (bool, int, float, str, type(None))
# Parts of texts that differ in every process: random identifiers, names of temporary files, dates with a time.
_OF_ONE_PROCESS = re.compile(
    r"(?<![0-9a-z])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-z])"
    r"|(?<![0-9a-z])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{16,}(?![0-9a-z])"
    r"|(?<=/)tmp[a-z0-9_]{8}(?![a-z0-9_])"
    r"|(?<!\d)20\d\d([-/.:]?)[01]\d\1[0-3]\d[T _-]*[0-2]\d[-:.h]?[0-5]\d(?:[-:.m]?[0-5]\d(?:\.\d+)?)?(?!\d)"
)
_REPLACED = "<differs in every process>"


def cache_key(
    facts: Mapping[str, Any], model: nn.Module, functions: tuple[Callable[..., Any] | None, ...]
) -> str | None:
    """Return a hash of the facts, the model and the functions, with their code, or None if the code cannot be read."""
    modules = {*_user_modules()}
    try:
        sources = dict(_sources(model, functions))
        sources |= {str(module.__file__): Path(str(module.__file__)).read_bytes() for module in modules}
    except (OSError, TypeError):
        return None
    digests = [hashlib.sha256(source).hexdigest() for _, source in sorted(sources.items())]
    captured = [(_identity(function), _captured_values(function)) for function in functions]
    module_globals = sorted((module.__name__, _scalar_globals(module)) for module in modules)
    parts = [_FORMAT, facts, _structure(model), digests, captured, module_globals]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def load_verified(key: str) -> str | None:
    """Return the summary of an earlier check, or None if there is none or its file is damaged."""
    try:
        path = _path(key)
        entry = json.loads(path.read_bytes()) if path.stat().st_size <= _MAX_FILE_BYTES else {}
        summary = entry["summary"]
        return summary if entry["key"] == key and isinstance(summary, str) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def store_verified(key: str, summary: str) -> None:
    """Store the summary of a passed check.

    Write errors are ignored, because repeating the check at the next start takes only a second.
    """
    with contextlib.suppress(WhetError):
        durable.make_directory(_path(key).parent)
        durable.write_file(_path(key), data=json.dumps({"key": key, "summary": summary}).encode())


def _path(key: str) -> Path:
    return env.home() / "verified" / f"{key}.json"


def _structure(model: nn.Module) -> list[Any]:
    """Return the classes and options of all modules, and the names, shapes, dtypes and layouts of all tensors."""
    modules = [(name, _class_name(module), _options(module)) for name, module in model.named_modules()]
    tensors = [
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.is_contiguous(), tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]
    return [modules, tensors]


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _options(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module adds to those of nn.Module, such as numbers of heads and flags."""
    return {name: _serializable(value) for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}


def _serializable(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON types. Keep scalars and small containers. Replace other objects by their type names."""
    if isinstance(value, _SCALARS):
        return _without_process_values(value)
    if dataclasses.is_dataclass(value):
        return _without_process_values(repr(value))
    if inspect.isroutine(value):
        return _identity(value)
    if isinstance(value, SimpleNamespace | Namespace):
        value = vars(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH and len(value) <= _MAX_ITEMS:
        return [(str(key), _serializable(inner, depth + 1)) for key, inner in value.items()]
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH and len(value) <= _MAX_ITEMS:
        return [_serializable(inner, depth + 1) for inner in value]
    return type(value).__qualname__


def _without_process_values(value: Any) -> Any:
    """Return a scalar without what differs in every process, such as a start time or a random identifier.

    With it, the key of a script that notes when it started would never occur again. Constants that only look like one
    are in the source files, which the key contains.
    """
    if isinstance(value, str):
        return _OF_ONE_PROCESS.sub(_REPLACED, value)
    if isinstance(value, int | float) and any(start <= value <= now for start, now in _clock_ranges(value)):
        return _REPLACED
    return value


def _clock_ranges(value: float) -> Iterator[tuple[float, float]]:
    """Yield the ranges of numbers that this process may have read from a clock."""
    now, age = time.time(), time.time() - _process_start()
    for scale in (1, 1_000, 1_000_000_000):
        yield (now - age) * scale, now * scale
    # A clock that starts with the machine may show less than the age of the process, if the machine slept. The range
    # would then contain any small number, such as a learning rate.
    if isinstance(value, float) and round(value, 3) != value and time.perf_counter() > age:
        yield time.perf_counter() - age, time.perf_counter()


@functools.cache
def _process_start() -> float:
    """Return the time at which this process started, rounded down."""
    return psutil.Process().create_time() - 1.0


def _sources(model: nn.Module, functions: tuple[Callable[..., Any] | None, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of the source files of the model's classes and of the functions.

    torch's files are omitted, because its version identifies them.
    """
    classes = {type(module) for module in model.modules()}
    for thing in (*classes, *filter(None, map(_unwrap, functions))):
        if not str(getattr(thing, "__module__", "")).startswith("torch."):
            yield _source(thing)


def _source(thing: Any) -> tuple[str, bytes]:
    """Return the source file of a class or function. If it cannot be read, return the compiled file of its module."""
    path = Path(inspect.getsourcefile(thing) or "")
    try:
        return str(path), path.read_bytes()
    except OSError:
        spec = getattr(sys.modules.get(thing.__module__), "__spec__", None)
        if spec is None or spec.origin is None or not hasattr(spec.loader, "get_data"):
            raise
        # The module has no source file, or is in an archive, or its code has a relative path.
        return spec.origin, spec.loader.get_data(spec.origin)


def _user_modules() -> Iterator[ModuleType]:
    """Yield loaded modules outside libraries, because any of them may affect the model, for example by a flag."""
    for module in list(sys.modules.values()):
        path = Path(str(getattr(module, "__file__", None) or ""))
        # Some modules of torch have a `__file__` that does not exist.
        is_file = isinstance(module, ModuleType) and path.suffix == ".py" and path.is_file()
        if is_file and code_origin(str(path)) == "you":
            yield module


def _scalar_globals(module: ModuleType) -> list[tuple[str, Any]]:
    named = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    return sorted(
        (name, _without_process_values(value)) for name, value in named.items() if isinstance(value, _SCALARS)
    )


def _unwrap(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isfunction(function) or inspect.ismethod(function) or function is None:
        return function
    return type(function)


def _identity(function: Any) -> list[Any]:
    """Return the module, name, line and bytecode of a function. Two lambdas in a line differ only in their bytecode."""
    function = _unwrap(function)
    code = getattr(function, "__code__", None)
    details = [] if code is None else [code.co_firstlineno, code.co_code.hex(), code.co_names]
    return [getattr(function, "__module__", ""), getattr(function, "__qualname__", ""), *details]


def _captured_values(function: Any) -> list[Any]:
    """Return the arguments of a partial, the variables of a closure, and the constants of a function, as JSON types."""
    captured: list[Any] = []
    while isinstance(function, functools.partial):
        captured += [*function.args, *function.keywords.items()]
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            captured.append(cell.cell_contents)
    code = getattr(function, "__code__", None)
    captured += code.co_consts if code is not None else ()
    return [_serializable(value) for value in captured]
