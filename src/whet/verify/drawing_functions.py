"""Decide whether a function may return another value at each call: random numbers, iterators and clocks.

Only the names in its code are read, and those in the user's functions that it calls. No user code is called.
"""

import functools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn
from torch.nn import functional

from whet.verify.code_references import (
    CachedFunction,
    function_references,
    is_library_class,
    is_users_function,
    names_in_code,
    unwrapped,
)
from whet.verify.value_bytes import GENERATORS

_MAX_CALLS = 3
"""Maximum depth to which the user's functions that a function calls are read."""
_ONLY_DIRECTLY = frozenset(
    {
        "next", "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time",
        "now", "today", "uuid1", "uuid4", "token_bytes", "token_hex",
    }
)  # fmt: skip
"""Iterators and clocks. Deeper functions often use them for something else: a log, or the device of a model."""
_TENSOR_METHODS = frozenset(
    {
        "bernoulli", "bernoulli_", "binomial", "cauchy", "cauchy_", "exponential", "exponential_", "geometric",
        "geometric_", "log_normal", "log_normal_", "multinomial", "native_dropout", "normal", "normal_",
        "normal_functional", "poisson", "random", "random_", "rsample", "sample", "uniform", "uniform_",
    }
)  # fmt: skip
"""Functions and methods of torch that draw, and the methods of torch.distributions."""
_CONSTANT_INITS = frozenset({"constant_", "dirac_", "eye_", "ones_", "zeros_"})
_NOT_DRAWS = frozenset(
    {"beta", "bit_generator", "bytes", "f", "gamma", "get_state", "getstate", "power", "seed", "set_state", "setstate"}
)
"""Methods of generators that do not draw, or whose names usually mean something else. `np.random.beta` is found by its
module, and `rng.beta` by its generator."""
_CALLED_IMPLICITLY = ("__init__", "__new__", "__call__", "__getitem__", "__post_init__", "forward")


@functools.cache
def drawing_names() -> frozenset[str]:
    """Return the names of functions of Python, NumPy and torch that draw random numbers."""
    owners = (random.Random, np.random.Generator, np.random.RandomState)
    names = {name for owner in owners for name in dir(owner) if not name.startswith("_")} - _NOT_DRAWS
    names |= _TENSOR_METHODS
    names |= {n for n in dir(functional) if "dropout" in n or n.startswith(("rrelu", "gumbel", "fractional_max"))}
    # The in-place forms of these, and dropout of the module `torch`.
    names |= {"alpha_dropout_", "dropout_", "feature_alpha_dropout_", "feature_dropout", "feature_dropout_"}
    names |= {"rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"}
    names |= {name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")} - _CONSTANT_INITS
    kinds = ((name, kind) for name, kind in vars(nn).items() if isinstance(kind, type))
    # All modules but normalization layers draw their initial weights.
    names |= {n for n, kind in kinds if "Dropout" in n or (hasattr(kind, "reset_parameters") and "Norm" not in n)}
    return frozenset(names)


def draws(function: Any) -> bool:
    """Return whether a function may draw random numbers or read a clock, judging by the names in its code.

    A callable without Python code is assumed to do so.
    """
    code = getattr(_plain(function), "__code__", None)
    return code is None or not _ONLY_DIRECTLY.isdisjoint(names_in_code(code)) or _draws(function, _MAX_CALLS, set())


def _draws(function: Any, levels: int, seen: set[types.CodeType]) -> bool:
    if isinstance(getattr(function, "__self__", None), GENERATORS):
        # A bound method, such as that of `from random import gauss`.
        return True
    function = _plain(function)
    if _is_drawing_name(getattr(function, "__name__", "")) and not _is_users(function):
        return True
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return False
    seen.add(code)
    names = names_in_code(code)
    if any(map(_is_drawing_name, names)):
        return True
    if levels == 0 or not _is_users(function):
        return False
    called = (part for _, value in function_references(function, "") for part in _called_parts(value, {*names}))
    return any(_draws(part, levels - 1, seen) for part in called)


def _called_parts(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield a function, or the methods of a user's class or object that the code of a caller may call."""
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)):
        yield value
    elif isinstance(value, CachedFunction):
        yield value.__wrapped__
    else:
        kind = value if isinstance(value, type) else type(value)
        owners = [owner for owner in kind.__mro__ if not is_library_class(owner)]
        methods = (item for owner in owners for key, item in vars(owner).items() if _is_called(key, names))
        yield from (item.fget if isinstance(item, property) else item for item in methods)


def _is_called(method: str, names: set[str]) -> bool:
    return method in names or method in _CALLED_IMPLICITLY


def _is_drawing_name(name: str) -> bool:
    return name in drawing_names() or name.startswith("rand") or "_rand" in name or "random" in name


def _is_users(function: Any) -> bool:
    return isinstance(function, types.FunctionType) and is_users_function(function)


def _plain(function: Any) -> Any:
    """Return the function inside partials, methods, caches and decorators of libraries."""
    inner = function
    while True:
        if isinstance(function, functools.partial):
            inner = function.func
        elif isinstance(function, (types.MethodType, classmethod, staticmethod)):
            inner = function.__func__
        elif isinstance(function, CachedFunction):
            inner = function.__wrapped__
        else:
            inner = unwrapped(function)
        if inner is function:
            return function
        function = inner
