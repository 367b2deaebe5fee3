"""Fingerprints of the state that user code references: closures, globals, attributes, generators and modules.

Hidden state changes during training but is not part of any checkpoint. The walk is bounded, does not copy large tensors
from the device as a whole, and does not call user code.
"""

import argparse
import array
import collections
import contextvars
import ctypes
import hashlib
import io
import itertools
import marshal
import mmap
import os
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from whet.checkpoint.attributes import module_machinery
from whet.verify.code_references import (
    FUNCTIONS,
    HAVE_NAMES,
    CachedFunction,
    class_attributes,
    class_references,
    draws,
    function_references,
    has_own_name,
    identity_bytes,
    is_library_class,
    is_method,
    is_skipped_package,
    refers_to,
)
from whet.verify.value_bytes import GENERATORS, SCALARS, array_bytes, generator_bytes, scalar_bytes, tensor_bytes

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 12
_MAX_ITEMS = 4_096
"""Maximum items of a container that are all visited. A larger container of plain values is hashed as a whole."""
_MAX_MAPPED_BYTES = 1_048_576
"""Number of bytes of a memory-mapped file that are compared."""
_SAMPLE_ITEMS = 128
"""Number of items visited in a container that is only sampled: half from its start, half from its end."""
# Types whose state is saved with the run, does not affect training, or cannot be read.
_SKIPPED_TYPES = (Optimizer, types.CodeType, types.BuiltinFunctionType, types.FrameType)
_CData: Any = ctypes.Structure.__base__
_POSITION_NAMES = frozenset({"tell", "seek"})
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_CONTAINERS = (set, frozenset, dict, list, tuple, collections.deque)


@dataclass(kw_only=True, slots=True)
class StateWalk:
    """A walk over all objects reachable from some roots. `digests` maps the names of values to their hashes."""

    known: Mapping[int, Any] = field(default_factory=dict)
    """Objects that checkpoints already save, by id. The walk does not enter them."""
    follows_code: bool = True
    """Whether to follow functions and classes to the values that their code refers to."""
    is_sample: bool = False
    """Whether to compare only samples of containers and tensors. Used for data, which is large and rarely changes."""
    partial: dict[str, None] = field(default_factory=dict)
    """Names of values that were too large to compare in full or that could not be read."""
    digests: dict[str, bytes] = field(default_factory=dict)
    visited: dict[int, Any] = field(default_factory=dict)
    """Every visited object, by id. The objects are kept alive so that their ids are not reused during the walk."""
    labels: Mapping[int, str] = field(default_factory=dict)
    """Names of known objects, by id. A variable that now refers to a different known object has changed."""
    _names: dict[int, str] = field(default_factory=dict)
    """The name under which each object was first visited, by id."""
    _referred: set[tuple[str, int]] = field(default_factory=set)
    """Recorded references, as pairs of a name and the id of its object."""
    _written: dict[str, Any] = field(default_factory=dict)
    """Write-only files by name, usually logs."""
    _uses_positions: bool = False
    """Whether any visited function uses `tell` or `seek`."""

    def walk(self, value: Any, name: str, depth: int = 0) -> None:
        """Record a value and all objects reachable from it.

        `name` is a Python expression that the user would recognize.
        """
        if depth > _MAX_DEPTH or len(self.visited) + len(self.digests) > _MAX_OBJECTS:
            self.partial[_outermost(name)] = None
            return
        try:
            if type(value) in weakref.ProxyTypes:
                # Get the object behind the proxy: it may be a known one. Raises ReferenceError if it no longer exists.
                value = value.__init__.__self__
            if isinstance(value, SCALARS):
                self._record(name, scalar_bytes(value))
                return
            if self.follows_code:
                self._record_identity(value, name)
            if id(value) in self.known or id(value) in self.visited or _is_skipped(value):
                return
            self._names[id(value)] = name
            self.visited[id(value)] = value
            parts = list(self._parts(value, name))
            if isinstance(value, (*_CONTAINERS, Tensor, np.ndarray, *GENERATORS)):
                # An instance of a subclass may also have attributes.
                parts += self._object_parts(value, name)
        except ReferenceError:
            # This is a weak proxy, and the object behind it no longer exists.
            return
        except Exception:
            # For example a container that reads a closed file, or an attribute that raises.
            self.partial[name] = None
            return
        for part, of_part in parts:
            self.walk(of_part, part, depth + 1)

    def _record_identity(self, value: Any, name: str) -> None:
        """Record which function, class or object a name refers to, because the name may be rebound."""
        if has_own_name(value, name) or (name, id(value)) in self._referred:
            # A class or method appears under its own name only through another object, which is recorded itself.
            return
        self._referred.add((name, id(value)))
        other = ""
        if not isinstance(value, HAVE_NAMES):
            other = (self.labels if id(value) in self.known else self._names).get(id(value), "")
        self._record(name, other.encode(errors="replace") + identity_bytes(value))

    def finish(self) -> dict[str, bytes]:
        """Record the positions of write-only files if any code uses positions, and return all hashes."""
        for name, file in self._written.items() if self._uses_positions else ():
            try:
                self._record(name, str(file.tell()).encode())
            except (OSError, ValueError):
                # For example, the disk is full: `tell` flushes buffered text first.
                self.partial[name] = None
        return self.digests

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Record a value, and yield the objects that it refers to with their names."""
        if isinstance(value, Tensor):
            self._record(name, tensor_bytes(value, is_sample=self.is_sample))
            if value.is_leaf and value.grad is not None:
                yield f"{name}.grad", value.grad
        elif isinstance(value, np.ndarray):
            self._record(name, array_bytes(value, is_sample=self.is_sample))
            if value.dtype.hasobject:
                yield name, value.tolist()
        elif isinstance(value, GENERATORS):
            self._record(name, generator_bytes(value))
        elif isinstance(value, weakref.ReferenceType):
            yield f"{name}()", value()
        elif isinstance(value, FUNCTIONS):
            self._uses_positions = self._uses_positions or refers_to(value, _POSITION_NAMES)
            yield from function_references(value, name) if self.follows_code else ()
        elif isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            self._record(name, b"finished" if frame is None else str(frame.f_lasti).encode())
            if value.gi_yieldfrom is not None:
                yield f"{name}.gi_yieldfrom", value.gi_yieldfrom
            yield from () if frame is None else ((f"{name}.{local}", v) for local, v in frame.f_locals.items())
        elif isinstance(value, set | frozenset):
            # Sorted, because the order of a set differs between processes.
            self._record(name, b"".join(sorted(map(scalar_bytes, value))))
            self._record(f"len({name})", str(len(value)).encode())
        elif isinstance(value, dict | types.MappingProxyType):
            # Treat other mappings as objects: reading an item may call user code, read a file or update a cache.
            get: Any = dict.__getitem__ if isinstance(value, dict) else types.MappingProxyType.__getitem__
            keys = self._inspected(value, list(value), name)
            texts = [_key_text(key, index) for index, key in enumerate(keys)]
            # Include the order of the keys: a cache that evicts its oldest entry depends on it.
            self._record(f"len({name})", f"{len(value)} {texts}".encode(errors="replace"))
            yield from ((f"{name}[{text}]", get(value, key)) for text, key in zip(texts, keys, strict=True))
        elif isinstance(value, list | tuple | collections.deque):
            self._record(f"len({name})", str(len(value)).encode())
            indices = self._inspected(value, range(len(value)), name)
            yield from ((f"{name}[{index}]", value[index]) for index in indices)
        elif isinstance(value, type):
            attributes = class_attributes(value, name)
            yield from (part for part in attributes if self.follows_code or not isinstance(part[1], FUNCTIONS))
            yield from class_references(type(value))
        elif isinstance(value, nn.Module):
            yield from self._module_parts(value, name)
        elif isinstance(value, _ITERATORS):
            self._record_iterator(value, name)
        else:
            yield from self._library_parts(value, name)

    def _inspected(self, value: Any, items: Sequence[Any], name: str) -> Sequence[Any]:
        """Return the items of a container to visit: all items, or some from both ends of a large container.

        A large container of plain values is also hashed as a whole, unless samples are enough.
        """
        if len(items) <= (_SAMPLE_ITEMS if self.is_sample else _MAX_ITEMS):
            return items
        if not self.is_sample:
            try:
                # marshal version 2 writes equal values as equal bytes. Later versions write references to repeated
                # objects.
                plain = list(value) if isinstance(value, collections.deque) else value
                self._record(name, marshal.dumps(plain, 2))
            except ValueError:
                self.partial[name] = None
        half = _SAMPLE_ITEMS // 2
        return [*items[:half], *items[-half:]]

    def _record_iterator(self, value: Any, name: str) -> None:
        """Record the position of an iterator, if it exposes one. Most iterators of itertools do not."""
        hint: Callable[[], int] | None = getattr(value, "__length_hint__", None)
        if isinstance(value, itertools.count):
            self._record(name, repr(value).encode())
        elif hint is not None:
            self._record(name, str(hint()).encode())
        else:
            self.partial[name] = None

    def _library_parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the parts of an object. Some standard library classes keep their state outside attributes."""
        if isinstance(value, array.array | memoryview | _CData):
            self._record(name, bytes(value))
        elif isinstance(value, mmap.mmap):
            with memoryview(value) as view:
                self._record(name, str(value.tell()).encode() + bytes(view[:_MAX_MAPPED_BYTES]))
                if len(view) > _MAX_MAPPED_BYTES and not view.readonly:
                    self.partial[name] = None
        elif type(value).__module__ == "sqlite3":
            self._record(name, str(getattr(value, "total_changes", "")).encode())
        elif type(value).__module__ == "operator":
            # The `__reduce__` of an itemgetter, for example, returns its class and arguments.
            yield name, value.__reduce__()
        elif isinstance(value, SynchronizedBase):
            # multiprocessing.Value and Array: commonly used to pass the epoch to data workers.
            yield name, value.get_obj()
        elif isinstance(value, os._Environ):
            yield name, dict(value)
        elif isinstance(value, _FILES):
            # `tell` fails while a text file is iterated over, so use the underlying binary file.
            file = value.buffer if isinstance(value, io.TextIOWrapper) else value
            if file.closed or not file.seekable():
                self._record(name, b"")
            elif file.readable():
                self._record(name, str(file.tell()).encode())
            else:
                self._written[name] = value
        elif isinstance(value, DataLoader):
            yield from ((f"{name}.{key}", getattr(value, key)) for key in ("generator", "sampler", "collate_fn"))
        elif isinstance(value, io.StringIO | io.BytesIO):
            self._record(name, repr((value.getvalue(), value.tell())).encode())
        elif isinstance(value, contextvars.ContextVar):
            yield f"{name}.get()", value.get(None)
        elif isinstance(value, queue.SimpleQueue):
            self._record(name, str(value.qsize()).encode())
            if not value.empty():
                # Items cannot be read without removing them.
                self.partial[name] = None
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            yield name, dict(value.items())
        elif isinstance(value, weakref.WeakSet):
            yield name, list(value)
        elif isinstance(value, CachedFunction):
            # The cache of a function that draws random numbers, or reads weights or an object, is state. Others can be
            # recomputed.
            if draws(value.__wrapped__) or is_method(value.__wrapped__) or self._reads_tensors(value.__wrapped__):
                self._record(name, str(value.cache_info().currsize).encode())
            yield name, value.__wrapped__
        else:
            yield from self._object_parts(value, name)

    def _reads_tensors(self, function: Any) -> bool:
        values = (value for _, value in function_references(function, ""))
        return any(isinstance(value, Tensor | np.ndarray | nn.Module) for value in values)

    def _module_parts(self, module: nn.Module, name: str) -> Iterator[tuple[str, Any]]:
        for part in (module._parameters, module._buffers, module._modules):
            yield from ((f"{name}.{key}", item) for key, item in part.items() if item is not None)
        attributes = (*module_attributes(module), *scripted_attributes(module))
        yield from ((f"{name}.{key}", item) for key, item in attributes)
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
        # Two functions may have variables of the same name, so their digests are combined.
        before = self.digests.get(name, b"")
        self.digests[name] = hashlib.blake2b(before + data, digest_size=8).digest()


def changed_names(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """Return the names of values that differ, in the order of `now`. Parts of a changed container are omitted.

    New values come last, because they are often parts of a new object that another name refers to.

    >>> changed_names({"len(seen)": b"0", "n": b"1"}, {"len(seen)": b"1", "seen[0]": b"5", "n": b"1"})
    ['seen']
    """
    changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    names = dict.fromkeys(name[4:-1] if name.startswith("len(") else name for name in changed)
    outer = [name for name in names if not any(prefix in names for prefix in _prefixes(name))]
    return sorted(outer, key=lambda name: name not in before and f"len({name})" not in before)


def _prefixes(name: str) -> Iterator[str]:
    """Yield the names of the objects that contain a value: "a" and "a.b" for "a.b[0]"."""
    yield from (name[:index] for index, character in enumerate(name) if character in ".[" and index)


def module_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the plain attributes of a module, without parameters, buffers, submodules, hooks and torch's own flags."""
    machinery = module_machinery()
    yield from ((key, value) for key, value in vars(module).items() if key not in machinery)


def scripted_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that TorchScript keeps outside __dict__."""
    if isinstance(module, torch.jit.ScriptModule):
        kind: Any = getattr(module, "_concrete_type", None)
        names = (key for key in ({} if kind is None else kind.get_attributes()) if key != "training")
        yield from ((key, getattr(module, key)) for key in names)


def _is_skipped(value: Any) -> bool:
    if isinstance(value, FUNCTIONS):
        return False
    if isinstance(value, _SKIPPED_TYPES) or any(value is own for own in _global_generators()):
        return True
    if isinstance(value, type):
        return is_library_class(value)
    module = type(value).__module__
    return not isinstance(value, _ENTERED) and module not in _ENTERED_MODULES and is_skipped_package(module)


def _global_generators() -> tuple[Any, ...]:
    """Return the global generators, which every checkpoint saves."""
    return torch.default_generator, random._inst, np.random.mtrand._rand


def _key_text(key: Any, index: int) -> str:
    """Return the text of a dict key, for use in a name.

    Keys that are not scalars or tuples get their type and index, because their repr may call user code or contain an
    address.
    """
    if isinstance(key, (*SCALARS, tuple)):
        return f"{key!r:.40}"
    return f"{type(key).__name__} {index}"


def _outermost(name: str) -> str:
    return next(_prefixes(name), name)


_ITERATORS: tuple[type, ...] = (
    enumerate, zip, map, filter, type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(iter("")), type(reversed([])),
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)  # fmt: skip

_ENTERED = (
    *_CONTAINERS, types.GeneratorType, weakref.ReferenceType, *GENERATORS,
    *_ITERATORS, CachedFunction, types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList,
    collections.ChainMap, array.array, queue.Queue, queue.SimpleQueue, contextvars.ContextVar, threading.local,
    io.StringIO, io.BytesIO, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
    memoryview, mmap.mmap, _CData, SynchronizedBase, os._Environ, *_FILES,
)  # fmt: skip
"""Standard library types that may hold user state."""
_ENTERED_MODULES = ("sqlite3", "multiprocessing.shared_memory", "statistics", "operator")
"""Standard library modules with more such types, matched by name so that they need not be imported."""


def reachable(objects: Iterable[Any]) -> dict[int, Any]:
    """Return all objects reachable from `objects`, by id, without following code."""
    walk = StateWalk(follows_code=False)
    for index, obj in enumerate(objects):
        walk.walk(obj, str(index))
    return walk.visited
