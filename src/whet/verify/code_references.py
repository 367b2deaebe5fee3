"""Find the values that user code references: closures, globals, module and class attributes, and default arguments.

These functions never call user code.
"""

import builtins
import contextlib
import functools
import hashlib
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Set
from typing import Any

import numpy as np
from torch import Tensor

from whet.base.origin import is_installed_file
from whet.verify.torch_internals import is_compiler_mark, is_torch_function, is_torch_internal, named_operators
from whet.verify.value_bytes import GENERATORS, SCALARS

FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
CachedFunction = type(functools.lru_cache(len))
HAVE_NAMES = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, np.ufunc)
"""Types whose instances have a qualified name."""

_PACKAGES = {
    **dict.fromkeys(sys.stdlib_module_names, "python"),
    **dict.fromkeys(("whet", "pytest", "_pytest"), "skipped"),
    **dict.fromkeys(("pandas", "PIL", "h5py"), "unreadable"),
    **dict.fromkeys(
        (
            "tqdm", "wandb", "tensorboard", "tensorboardX", "mlflow", "rich", "matplotlib", "IPython", "ipykernel",
            "pyarrow", "datasets", "tokenizers", "transformers", "pydantic", "jaxtyping", "einops",
        ),
        "named",
    ),
}  # fmt: skip
"""How to treat objects of a package. Of those that log or hold settings ("named"), only attributes that the user's code
names are compared, because they change at every use."""
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_MAX_DOTS = 3
"""Maximum depth to which an attribute chain such as `torch.nn.Linear.count` is followed into libraries."""
_ACCESSED_BY_TEXT = frozenset({"globals", "vars", "__dict__", "getattr", "setattr", "exec", "eval"})
"""Names of functions and attributes that access a variable whose name is a string."""
_MAX_TEXT = 2_000
"""Number of characters of a string constant that are searched for names."""


def function_references(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the values that a function references: closure cells, globals, default arguments, `self` and attributes.

    Each value comes with the name of its variable, or with a name derived from `name`, the name of the function.
    """
    if isinstance(function, functools.partial):
        yield from ((f"{name}.{key}", value) for key, value in function.keywords.items())
        yield from ((f"{name}.args[{index}]", value) for index, value in enumerate(function.args))
        yield name, function.func
        return
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        function = function.__func__
    if isinstance(registry := getattr(function, "registry", None), types.MappingProxyType):
        # functools.singledispatch
        yield f"{name}.registry", registry
    decorated, function = function, unwrapped(function)
    if not isinstance(function, types.FunctionType):
        if isinstance(function, CachedFunction) or function is not decorated:
            # Also a method, or an object with `__call__`, that torch.compile has wrapped.
            yield name, function
        return
    if is_skipped_package(function.__module__):
        return
    if is_torch_function(function):
        yield from _torch_function_references(function, name)
        return
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:
            # The variable is not assigned yet, so its cell is empty.
            continue
        if isinstance(value, types.ModuleType):
            yield from _named_parts(variable, value, {*names_in_code(code)})
        else:
            yield variable, value
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    yield from ((f"{name}({argument}=)", value) for argument, value in zip(arguments, defaults, strict=True))
    yield from ((f"{name}({argument}=)", value) for argument, value in (function.__kwdefaults__ or {}).items())
    attributes = ((key, value) for key, value in vars(function).items() if not is_compiler_mark(key))
    yield from ((f"{name}.{key}", value) for key, value in attributes if key != "__wrapped__")
    names, space = {*names_in_code(code)}, function.__globals__
    for variable in sorted(names & space.keys()):
        yield from _named_parts(variable, space[variable], names)

    for variable in sorted(names - space.keys()):
        if variable in vars(builtins) and not callable(vars(builtins)[variable]):
            yield variable, vars(builtins)[variable]
        elif (module := sys.modules.get(variable)) is not None:
            # The function may import it itself.
            yield from _named_parts(variable, module, names)


def _torch_function_references(function: types.FunctionType, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function of torch may hold of the user: objects in its closure and in its tables.

    torch's own functions, flags and counters are left out: which of them occur depends only on which function it is.
    """
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            yield variable, cell.cell_contents
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from ((name, value) for value in defaults if not isinstance(value, (*SCALARS, *_CALLED, type)))
    attributes = ((key, value) for key, value in vars(function).items() if not is_compiler_mark(key))
    yield from ((f"{name}.{key}", value) for key, value in attributes if key != "__wrapped__")
    for variable in sorted({*names_in_code(code)} & function.__globals__.keys()):
        # For example the table to which users add functions that collate their own types.
        if type(function.__globals__[variable]) in (list, dict, set):
            yield variable, function.__globals__[variable]


def unwrapped(function: Any) -> Any:
    """Remove library decorators such as torch.no_grad: their variables are not the user's."""
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__") and _is_installed(function):
        function = function.__wrapped__
    return function


def _named_parts(variable: str, value: Any, names: set[str], dots: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a global variable, or for a module or library class the attributes that the code names.

    From libraries, only plain values and containers are yielded.
    """
    is_module = isinstance(value, types.ModuleType)
    if is_module and is_torch_internal(type(value)):
        yield from named_operators(variable, names)
        return
    if not is_module and not (isinstance(value, type) and is_library_class(value)):
        yield variable, value
        return
    is_users = is_module and not is_skipped_package(value.__name__) and not is_installed(value)
    for key in sorted(names & vars(value).keys()):
        item = vars(value)[key]
        if item is sys.modules:
            yield from ((f"sys.modules[{n!r}]", m) for n, m in [*item.items()] if not is_skipped_package(n))
        elif is_users or isinstance(item, (*SCALARS, os._Environ)) or type(item) in (list, dict, set):
            yield f"{variable}.{key}", item
        elif isinstance(item, types.FunctionType) and is_users_function(item):
            # The user's function replaces one of the library.
            yield f"{variable}.{key}", item
        elif isinstance(item, _CALLED):
            if item.__name__ != key:
                yield f"{variable}.{key}", item.__name__
        elif dots < _MAX_DOTS and (isinstance(item, type) or _is_inside(item, value)):
            yield from _named_parts(f"{variable}.{key}", item, names, dots + 1)


def frame_variables(frame: types.FrameType | None) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the variables of the running user functions, grouped by function, from the innermost frame outward."""
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if not is_skipped_package(name) and not is_installed(sys.modules.get(name or "")):
            # For a module, take only the variables that its top-level code names. The others belong to its functions.
            is_module = code.co_name == "<module>"
            names = {*names_in_code(code)}
            local = {} if is_module else frame.f_locals
            shared = {key: value for key, value in frame.f_globals.items() if key in names and not key.startswith("__")}
            variables = {k: v for k, v in {**shared, **local}.items() if not isinstance(v, types.ModuleType)}
            yield str(name) if is_module else f"{code.co_name}()", list(variables.items())
        frame = frame.f_back


def class_references(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield a class and its base classes, except library classes."""
    yield from ((owner.__name__, owner) for owner in kind.__mro__ if not is_library_class(owner))


def class_attributes(kind: type, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class, including the functions behind its methods and properties."""
    for key, item in vars(kind).items():
        if isinstance(item, property):
            functions = (item.fget, item.fset, item.fdel)
            yield from ((f"{name}.{key}", function) for function in functions if function is not None)
        elif isinstance(item, classmethod | staticmethod):
            yield f"{name}.{key}", item.__func__
        elif isinstance(item, functools.cached_property):
            yield f"{name}.{key}", item.func
        elif isinstance(item, types.FunctionType) or not key.startswith("__"):
            yield f"{name}.{key}", item


def is_method(function: Any) -> bool:
    """Return whether the first parameter of a function is named `self`."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_argcount > 0 and code.co_varnames[0] == "self"


def names_in(function: Any) -> tuple[str, ...]:
    """Return the names of attributes and variables that a user's function uses; nothing for library functions."""
    function = unwrapped(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    return () if code is None or is_installed_file(code.co_filename) else names_in_code(code)


def added_attributes(kinds: Iterable[type], names: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the values that code may have added to library classes: attributes that it names, but not torch's methods.

    Code that calls `type(layer)` reaches the class without naming it.
    """
    owners = dict.fromkeys(owner for kind in kinds for owner in kind.__mro__ if is_library_class(owner))
    for owner in owners:
        for key in sorted(names & vars(owner).keys()):
            item = vars(owner)[key]
            is_users = is_users_function(item) if isinstance(item, types.FunctionType) else _is_plain(item)
            if is_users and not key.startswith("__"):
                yield f"{owner.__name__}.{key}", item


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*SCALARS, Tensor, np.ndarray, *GENERATORS)) or type(value) in (list, dict, set)


def is_users_function(function: types.FunctionType) -> bool:
    """Return whether a function is defined in the user's code."""
    return not is_skipped_package(function.__module__) and not _is_installed(function)


def part_name(part: Any) -> str:
    """Return the name of a function or class without that of its module or class; "self" for any other object."""
    name = getattr(part, "__qualname__", None)
    return "self" if name is None else str(name).rpartition(".")[2]


def has_own_name(value: Any, name: str) -> bool:
    """Return whether `name` refers to a class or a method by the name it was defined with."""
    if isinstance(value, types.FunctionType):
        owner, _, own = value.__qualname__.rpartition(".")
        return name.endswith(f".{own}") and owner != "" and not owner.endswith("<locals>")
    return isinstance(value, type) and name in (value.__name__, "__class__")


def identity_bytes(value: Any) -> bytes:
    """Return bytes that identify a function, class or module, or the type of any other object."""
    about = value if isinstance(value, HAVE_NAMES) else type(value)
    text = " ".join(str(getattr(about, key, "")) for key in ("__module__", "__qualname__", "__name__"))
    code = value.__code__ if isinstance(value, types.FunctionType) else None
    return text.encode(errors="replace") + (b"" if code is None else _code_bytes(code))


@functools.lru_cache(4_096)
def _code_bytes(code: types.CodeType) -> bytes:
    return hashlib.blake2b(code.co_code + repr((code.co_names, code.co_firstlineno)).encode(), digest_size=8).digest()


def package_kind(module: str | None) -> str:
    """Return how to treat objects of a module: "python", "skipped", "unreadable", "named", or "" for all others."""
    name = (module or "").partition(".")[0]
    # `__main__` is the user's own script.
    return "" if name == "__main__" else _PACKAGES.get(name, "")


def is_skipped_package(module: str | None) -> bool:
    """Return whether a module belongs to a package whose functions and classes are not followed."""
    return package_kind(module) != ""


def is_installed(module: types.ModuleType | None) -> bool:
    """Return whether a module belongs to an installed package, not to the user's own code."""
    return is_installed_file(getattr(module, "__file__", None) or "")


def is_library_class(kind: type) -> bool:
    """Return whether a class is defined in a library, not in the user's code."""
    return is_skipped_package(kind.__module__) or is_installed(sys.modules.get(kind.__module__))


def _is_inside(item: Any, module: Any) -> bool:
    return isinstance(item, types.ModuleType) and item.__name__.startswith(f"{module.__name__}.")


def _is_installed(function: types.FunctionType) -> bool:
    return is_installed_file(function.__code__.co_filename)


@functools.lru_cache(4_096)
def names_in_code(code: types.CodeType) -> tuple[str, ...]:
    """Return the names used by a code object and by the code objects nested in it."""
    names = [*code.co_names]
    # setattr(module, "count", 1), globals()["count"] and exec("count = 1") contain the name only in a string.
    has_texts = not _ACCESSED_BY_TEXT.isdisjoint(names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += names_in_code(constant)
        elif has_texts and isinstance(constant, str):
            names += re.findall(r"[^\W\d]\w*", constant[:_MAX_TEXT])
    return tuple(names)
