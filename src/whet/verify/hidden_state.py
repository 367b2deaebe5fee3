"""Fingerprints of the state that user code refers to: closures, globals, attributes, generators and modules.

Hidden state is state that changes during training and that no checkpoint holds. The walk is bounded, copies no whole
tensor from the device, and calls no user code.
"""

import argparse
import array
import collections
import contextvars
import datetime as dt
import functools
import hashlib
import inspect
import io
import itertools
import marshal
import queue
import random
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.checkpoint.attributes import module_machinery
from whet.distributed.strategies import local_tensor

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 12
_MAX_ITEMS = 4_096
"""Items of a container that are entered. A larger container of plain values is hashed as a whole."""
_SAMPLE_ITEMS = 128
"""Items of a container of which only a sample is compared, at its beginning and at its end together."""
_MAX_ELEMENTS = 65_536
"""Elements of a tensor whose bytes are hashed, evenly spread. Larger tensors have checksums of all elements too."""

_WORDS_PER_ROW = 1_024

_SCALARS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, Enum, np.generic, Fraction, Decimal,
    dt.date, dt.time, dt.timedelta, PurePath, uuid.UUID,
)  # fmt: skip
"""Values whose text tells them apart."""
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Their state is saved with the run, does not affect training, or cannot be read.
_SKIPPED_TYPES = (Optimizer, DataLoader, types.CodeType, types.BuiltinFunctionType, types.FrameType, torch.dtype)
_SKIPPED_PACKAGES = frozenset(
    {
        *sys.stdlib_module_names, "whet", "tqdm", "wandb", "tensorboard", "tensorboardX", "mlflow", "rich",
        "matplotlib", "PIL", "IPython", "ipykernel", "h5py", "pandas", "pyarrow", "datasets", "tokenizers",
        "transformers", "pytest", "_pytest", "pydantic", "jaxtyping", "einops",
    }
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class StateWalk:
    """A walk over the objects that are reachable from some roots. `digests` maps names of values to their hashes."""

    known: Mapping[int, Any] = field(default_factory=dict)
    """Objects that checkpoints save anyway, by id. They are not entered."""
    follows_code: bool = True
    """Whether functions and classes are entered, for what their code refers to."""
    is_sample: bool = False
    """Whether samples of containers and tensors are enough, as for the data, which is large and seldom changes."""
    partial: dict[str, None] = field(default_factory=dict)
    """The names of what was compared in part, because it is too large."""
    digests: dict[str, bytes] = field(default_factory=dict)
    visited: dict[int, Any] = field(default_factory=dict)
    """Every object that was entered, by id. It is kept alive, so that its id is not reused during the walk."""

    def walk(self, value: Any, name: str, depth: int = 0) -> None:
        """Record a value and everything that it reaches. `name` is an expression in the user's terms."""
        if depth > _MAX_DEPTH or len(self.visited) + len(self.digests) > _MAX_OBJECTS:
            self.partial[_outermost(name)] = None
            return
        try:
            if type(value) in weakref.ProxyTypes:
                # The object itself, which may be a known one. This raises if it is gone.
                value = value.__init__.__self__
            if id(value) in self.known or id(value) in self.visited:
                return
            if isinstance(value, _SCALARS):
                self._record(name, _scalar_bytes(value))
                return
            if _is_skipped(value):
                return
            self.visited[id(value)] = value
            parts = list(self._parts(value, name))
        except Exception:
            # A proxy of an object that is gone, a container that reads a closed file: what cannot be read is left out.
            return
        for part, of_part in parts:
            self.walk(of_part, part, depth + 1)

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Record the value itself, and yield what it refers to with a name for each."""
        if isinstance(value, Tensor):
            self._record(name, _tensor_bytes(value, is_sample=self.is_sample))
        elif isinstance(value, np.ndarray):
            self._record(name, _array_bytes(value, is_sample=self.is_sample))
        elif isinstance(value, _GENERATORS):
            self._record(name, repr(_generator_state(value)).encode())
        elif isinstance(value, weakref.ReferenceType):
            yield f"{name}()", value()
        elif isinstance(value, _FUNCTIONS):
            yield from function_references(value, name) if self.follows_code else ()
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            self._record(name, b"finished" if frame is None else str(frame.f_lasti).encode())
            yield from () if frame is None else ((f"{name}.{local}", v) for local, v in frame.f_locals.items())
        elif isinstance(value, set | frozenset):
            # Sorted, because the order of a set differs between processes.
            self._record(name, b"".join(sorted(map(_scalar_bytes, value))))
            self._record(f"len({name})", str(len(value)).encode())
        elif isinstance(value, dict | types.MappingProxyType):
            # Other mappings are objects: reading an item may call code of the user, read a file or count a use.
            get: Any = dict.__getitem__ if isinstance(value, dict) else types.MappingProxyType.__getitem__
            self._record(f"len({name})", str(len(value)).encode())
            keys = self._inspected(value, list(value), name)
            yield from ((f"{name}[{_key_text(key, index)}]", get(value, key)) for index, key in enumerate(keys))
        elif isinstance(value, list | tuple | collections.deque):
            self._record(f"len({name})", str(len(value)).encode())
            indices = self._inspected(value, range(len(value)), name)
            yield from ((f"{name}[{index}]", value[index]) for index in indices)
        elif isinstance(value, type):
            # The functions of a class are yielded by `class_references`, from an instance of it.
            yield from ((f"{name}.{key}", item) for key, item in vars(value).items() if not _is_machinery(key, item))
        elif isinstance(value, nn.Module):
            yield from self._module_parts(value, name)
        elif isinstance(value, _ITERATORS):
            self._record_iterator(value, name)
        else:
            yield from self._library_parts(value, name)

    def _inspected(self, value: Any, items: Sequence[Any], name: str) -> Sequence[Any]:
        """Return the items of a container to enter. A large one is hashed as a whole, if its values are plain."""
        if len(items) <= (_SAMPLE_ITEMS if self.is_sample else _MAX_ITEMS):
            return items
        if not self.is_sample:
            try:
                # Version 2 writes equal values as equal bytes: it has no references to values that appear again.
                plain = list(value) if isinstance(value, collections.deque) else value
                self._record(name, marshal.dumps(plain, 2))
            except ValueError:
                self.partial[name] = None
        half = _SAMPLE_ITEMS // 2
        return [*items[:half], *items[-half:]]

    def _record_iterator(self, value: Any, name: str) -> None:
        """Record how far an iterator is. Most of itertools does not tell."""
        hint: Callable[[], int] | None = getattr(value, "__length_hint__", None)
        if isinstance(value, itertools.count):
            self._record(name, repr(value).encode())
        elif hint is not None:
            self._record(name, str(hint()).encode())
        else:
            self.partial[name] = None

    def _library_parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the parts of an object of the standard library whose state is not in attributes, or of any other."""
        if isinstance(value, array.array):
            self._record(name, value.tobytes())
        elif isinstance(value, io.StringIO | io.BytesIO):
            self._record(name, repr((value.getvalue(), value.tell())).encode())
        elif isinstance(value, contextvars.ContextVar):
            yield f"{name}.get()", value.get(None)
        elif isinstance(value, queue.SimpleQueue):
            self._record(name, str(value.qsize()).encode())
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            yield name, dict(value.items())
        elif isinstance(value, weakref.WeakSet):
            yield name, list(value)
        elif isinstance(value, _CachedFunction):
            # The cache of a function that draws random numbers is state. That of others can be computed again.
            if _draws(value.__wrapped__):
                self._record(name, str(value.cache_info().currsize).encode())
            yield name, value.__wrapped__
        else:
            yield from self._object_parts(value, name)

    def _module_parts(self, module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
        for part in (module._parameters, module._buffers, module._modules):
            yield from ((f"{name}.{key}", item) for key, item in part.items() if item is not None)
        yield from ((f"{name}.{key}", item) for key, item in module_attributes(module))
        yield from class_references(type(module)) if self.follows_code else ()

    def _object_parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield from ((f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items())
        for owner in type(value).__mro__:
            slots = owner.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                if isinstance(vars(owner).get(slot), types.MemberDescriptorType):
                    yield f"{name}.{slot}", getattr(value, slot, None)
        yield from class_references(type(value)) if self.follows_code else ()

    def _record(self, name: str, data: bytes) -> None:
        self.digests[name] = hashlib.blake2b(data, digest_size=8).digest()


def changed_names(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """Return the names of values that differ, in the order of `now`. Parts of a changed container are left out.

    >>> changed_names({"len(seen)": b"0", "n": b"1"}, {"len(seen)": b"1", "seen[0]": b"5", "n": b"1"})
    ['seen']
    """
    changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    names = dict.fromkeys(name[4:-1] if name.startswith("len(") else name for name in changed)
    return [name for name in names if not any(prefix in names for prefix in _prefixes(name))]


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of what a value is part of: "a" and "a.b" for "a.b[0]"."""
    yield from (name[:index] for index, character in enumerate(name) if character in ".[" and index)


def function_references(function: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what a function refers to: closure cells, globals that its code names, defaults, its object and attributes.

    The names are those of the variables. `name` is the name of the function, for what has none.
    """
    if isinstance(function, functools.partial):
        yield from ((f"{name}.{key}", value) for key, value in function.keywords.items())
        yield from ((f"{name}.args[{index}]", value) for index, value in enumerate(function.args))
        yield name, function.func
        return
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        function = function.__func__
        if not isinstance(function, types.FunctionType):
            return
    if _is_skipped_package(function.__module__):
        return
    code = function.__code__
    for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield variable, cell.cell_contents
        except ValueError:
            # The name is not bound yet.
            continue
    defaults = function.__defaults__ or ()
    arguments = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
    yield from ((f"{name}({argument}=)", value) for argument, value in zip(arguments, defaults, strict=True))
    yield from ((f"{name}({argument}=)", value) for argument, value in (function.__kwdefaults__ or {}).items())
    yield from ((f"{name}.{key}", value) for key, value in vars(function).items() if key != "__wrapped__")
    names, space = {*_code_names(code)}, function.__globals__
    for variable in sorted(names & space.keys()):
        value = space[variable]
        if isinstance(value, types.ModuleType):
            # A module of the user may hold variables too: those that the code names.
            if not _is_skipped_package(value.__name__) and not is_installed(value):
                inside = vars(value)
                yield from ((f"{variable}.{key}", inside[key]) for key in sorted(names & inside.keys()))
        else:
            yield variable, value


def frame_variables(frame: types.FrameType | None) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Yield the variables of the user's functions that are running, by function, from the innermost one outward."""
    while frame is not None:
        code, name = frame.f_code, frame.f_globals.get("__name__")
        if not _is_skipped_package(name) and not is_installed(sys.modules.get(name or "")):
            # The variables of a module are those that its own code names; all others belong to its functions.
            is_module = code.co_name == "<module>"
            names = {*_code_names(code)}
            local = {} if is_module else frame.f_locals
            shared = {key: value for key, value in frame.f_globals.items() if key in names and not key.startswith("__")}
            variables = {k: v for k, v in {**shared, **local}.items() if not isinstance(v, types.ModuleType)}
            yield str(name) if is_module else f"{code.co_name}()", list(variables.items())
        frame = frame.f_back


def module_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module: no parameters, buffers, submodules, hooks or flags of torch."""
    machinery = module_machinery()
    yield from ((key, value) for key, value in vars(module).items() if key not in machinery)


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def class_references(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the class attributes of the user's classes, and what their methods refer to."""
    for owner in kind.__mro__:
        if not _is_skipped_package(owner.__module__) and not is_installed(sys.modules.get(owner.__module__)):
            yield owner.__name__, owner
            for key, item in vars(owner).items():
                function = inspect.unwrap(item) if isinstance(item, types.FunctionType) else None
                if function is not None:
                    yield f"{owner.__name__}.{key}", function


def _is_machinery(key: str, item: Any) -> bool:
    return key.startswith("__") or callable(item) or isinstance(item, classmethod | staticmethod | property)


def _is_skipped(value: Any) -> bool:
    if isinstance(value, _FUNCTIONS):
        return False
    if isinstance(value, _SKIPPED_TYPES) or any(value is own for own in _global_generators()):
        return True
    kind = value if isinstance(value, type) else type(value)
    if isinstance(value, type):
        return _is_skipped_package(kind.__module__) or is_installed(sys.modules.get(kind.__module__))
    return not isinstance(value, _ENTERED) and _is_skipped_package(kind.__module__)


def _global_generators() -> tuple[Any, ...]:
    """Return the global generators, which every checkpoint saves."""
    return torch.default_generator, random._inst, np.random.mtrand._rand


def _is_skipped_package(module: str | None) -> bool:
    name = (module or "").partition(".")[0]
    # The user's own script is `__main__`, which the standard library lists too.
    return name in _SKIPPED_PACKAGES and name != "__main__"


def is_installed(module: types.ModuleType | None) -> bool:
    """Return whether a module belongs to an installed package, not to the user's own code."""
    path = getattr(module, "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


def _key_text(key: Any, index: int) -> str:
    """Return a key for a name. The repr of other objects is code of the user, or an address."""
    if isinstance(key, (*_SCALARS, tuple)):
        return f"{key!r:.40}"
    return f"{type(key).__name__} {index}"


def _outermost(name: str) -> str:
    return next(_prefixes(name), name)


_ITERATORS: tuple[type, ...] = (
    enumerate, zip, map, filter, type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(iter("")), type(reversed([])),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)  # fmt: skip
_CachedFunction = type(functools.lru_cache(len))

_ENTERED = (
    list, tuple, set, frozenset, dict, collections.deque, types.GeneratorType, weakref.ReferenceType, *_GENERATORS,
    *_ITERATORS, _CachedFunction, types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList,
    collections.ChainMap, array.array, queue.Queue, queue.SimpleQueue, contextvars.ContextVar, threading.local,
    io.StringIO, io.BytesIO, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
)  # fmt: skip
"""Types of the standard library that may hold the user's state."""

_DRAWING_NAMES = frozenset(
    {
        "random", "normal", "normal_", "uniform", "uniform_", "bernoulli", "bernoulli_", "multinomial", "exponential_",
        "shuffle", "choice", "choices", "sample", "gauss", "integers", "next", "time", "perf_counter",
    }
)  # fmt: skip


def _draws(function: Any) -> bool:
    """Return whether the code of a function names something that returns another value each time."""
    code = getattr(function, "__code__", None)
    return code is None or any(name in _DRAWING_NAMES or "rand" in name for name in _code_names(code))


# --- values as bytes -------------------------------------------------------------------------------------------------


def _scalar_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    # Objects without a stable representation are equal: their repr is an address.
    text = repr(value) if isinstance(value, _SCALARS) else type(value).__qualname__
    return f"{type(value).__name__} {text}".encode(errors="replace")


def _tensor_bytes(tensor: Tensor, *, is_sample: bool) -> bytes:
    about = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    try:
        # The rows of this rank: reading a sharded tensor would wait for the other ranks, which may not look.
        flat = local_tensor(tensor.detach())
        if flat.layout is torch.strided and flat.numel() and not flat.untyped_storage().nbytes():
            # FSDP frees the memory of gathered parameters between steps. Reading it would end the process.
            return about
        if flat.layout is not torch.strided:
            flat = flat.coalesce().values() if flat.layout is torch.sparse_coo else flat.values()
        if flat.numel() > _MAX_ELEMENTS:
            about += b"" if is_sample else _checksums(flat)
            if not flat.is_contiguous():
                flat = flat.flatten(0, -2)[:: max(1, flat.numel() // flat.shape[-1] // 64)]
            flat = flat.reshape(-1)[:: max(1, flat.numel() // _MAX_ELEMENTS)]
        # A copy: a storage that is exported to NumPy can no longer be resized.
        flat = flat.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1)
        return about + flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError):
        # A meta or fake tensor has no values.
        return about


def _checksums(tensor: Tensor) -> bytes:
    """Return sums of all elements as integers: those of the rows and those of the columns of their words.

    They take the time of reading the memory, which is a fraction of that of a hash.
    """
    data = tensor.contiguous().reshape(-1)
    if data.storage_offset():
        # Memory can be read as words from a multiple of eight bytes only.
        data = data.clone()
    data = data.view(torch.uint8)
    size = len(data) // (8 * _WORDS_PER_ROW) * 8 * _WORDS_PER_ROW
    rows = data[:size].view(torch.int64).reshape(-1, _WORDS_PER_ROW)
    sums = torch.cat([rows.sum(0), rows.sum(1)]).cpu()
    return sums.numpy().tobytes() + data[size:].to("cpu", copy=True).numpy().tobytes()


def _array_bytes(array: "np.ndarray[Any, Any]", *, is_sample: bool) -> bytes:
    about = f"{array.dtype} {array.shape}".encode()
    if array.dtype.hasobject:
        return about
    if array.size > _MAX_ELEMENTS and not is_sample:
        # A copy, because torch cannot read an array that is not writeable.
        about += _checksums(torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8))
    step = max(1, array.size // _MAX_ELEMENTS)
    sample = array.reshape(-1)[::step] if array.flags.c_contiguous else array[(slice(None, None, step), ...)]
    return about + np.ascontiguousarray(sample).tobytes()


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return _with_lists(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _with_lists(generator.get_state(legacy=False))
    return generator.getstate()


def _with_lists(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _with_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state


def reachable(objects: Iterable[Any]) -> dict[int, Any]:
    """Return everything that is part of some objects, by id."""
    walk = StateWalk(follows_code=False)
    for index, obj in enumerate(objects):
        walk.walk(obj, str(index))
    return walk.visited
