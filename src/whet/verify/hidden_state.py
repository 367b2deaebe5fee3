"""Fingerprints of the state that user code references: closures, globals, attributes, generators and modules.

Hidden state changes during training but is not part of any checkpoint. The walk is bounded, does not copy large tensors
from the device as a whole, and does not call user code.
"""

import collections
import functools
import gc
import hashlib
import marshal
import random
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.checkpoint.attributes import module_machinery
from whet.verify.code_references import (
    FUNCTIONS,
    HAVE_NAMES,
    CachedFunction,
    added_attributes,
    class_attributes,
    class_references,
    function_references,
    has_own_name,
    identity_bytes,
    is_library_class,
    is_method,
    is_users_function,
    names_in,
    package_kind,
)
from whet.verify.drawing_functions import draws
from whet.verify.library_objects import library_parts, object_parts
from whet.verify.value_bytes import GENERATORS, SCALARS, array_bytes, generator_bytes, scalar_bytes, tensor_bytes

_MAX_OBJECTS = 20_000
_MAX_DEPTH = 12
_MAX_ITEMS = 4_096
"""Maximum items of a container that are all visited. A larger container of plain values is hashed as a whole."""
_SAMPLE_ITEMS = 128
"""Number of items visited in a container that is only sampled: half from its start, half from its end."""
# Types whose state is saved with the run, does not affect training, or cannot be read.
_SKIPPED_TYPES = (Optimizer, types.CodeType, types.FrameType, types.TracebackType, super)
_CONTAINERS = (set, frozenset, dict, list, tuple, collections.deque)
_CACHED = "(...)"
"""Part of the names of what a cached function returned. It did not exist before the first call, which is no change."""
_STORAGE_READERS = frozenset({"untyped_storage", "storage", "as_strided", "_base"})
"""Names by which code reaches memory of a tensor that is not part of its view."""
_CLASS_READERS = frozenset({"type", "__class__", "__mro__", "__bases__"})
"""Names by which code reaches the class of an object."""
_UNREADABLE = frozenset(
    {
        "__subclasses__", "_current_frames", "_getframe", "_version", "currentframe", "get_objects", "get_referents",
        "get_referrers", "getrefcount", "umask",
    }
)  # fmt: skip
"""Names of functions that read the interpreter. What they return cannot be compared."""


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
    _deferred: list[tuple[str, Callable[[], Any], frozenset[str], int]] = field(default_factory=list)
    """Values to walk only if visited code uses one of some names: (name, how to read it, the names, depth)."""
    _used: set[str] = field(default_factory=set)
    """The names that visited code uses."""
    _depth: int = 0

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
                self.record(name, scalar_bytes(value))
                if not type(value).__dictoffset__:
                    return
            if self.follows_code:
                self._record_identity(value, name)
            if id(value) in self.known or id(value) in self.visited or _is_skipped(value):
                return
            self._names[id(value)] = name
            self.visited[id(value)] = value
            self._depth = depth
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
        self.record(name, other.encode(errors="replace") + identity_bytes(value))

    def defer(self, name: str, read: Callable[[], Any], names: frozenset[str]) -> None:
        """Walk what `read` returns, if any code that is visited uses one of these names."""
        self._deferred.append((name, read, names, self._depth + 1))

    def finish(self) -> dict[str, bytes]:
        """Walk the deferred values that code uses, and return all hashes."""
        self._walk_deferred()
        if self.follows_code and not self._used.isdisjoint(_CLASS_READERS):
            kinds = {type(value) for values in (self.known, self.visited) for value in values.values()}
            saved = [kind for kind in kinds if issubclass(kind, (nn.Module, Optimizer, Tensor))]
            for name, value in added_attributes(saved, self._used):
                self.walk(value, name, 1)
            self._walk_deferred()
        return self.digests

    def _walk_deferred(self) -> None:
        is_used = True
        while is_used:
            is_used = False
            waiting, self._deferred = self._deferred, []
            for name, read, names, depth in waiting:
                if self._used.isdisjoint(names):
                    self._deferred.append((name, read, names, depth))
                    continue
                is_used = True
                try:
                    value = read()
                except Exception:
                    self.partial[name] = None
                    continue
                self.walk(value, name, depth)

    def _parts(self, value: Any, name: str) -> Iterator[tuple[str, Any]]:
        """Record a value, and yield the objects that it refers to with their names."""
        if isinstance(value, Tensor):
            self.record(name, tensor_bytes(value, is_sample=self.is_sample))
            self.defer(f"{name}.untyped_storage()", value.untyped_storage, _STORAGE_READERS)
            if value.is_leaf and value.grad is not None:
                yield f"{name}.grad", value.grad
        elif isinstance(value, np.ndarray):
            self.record(name, array_bytes(value, is_sample=self.is_sample))
            if value.base is not None:
                self.defer(f"{name}.base", lambda: value.base, frozenset(["base"]))
            if value.dtype.hasobject:
                yield name, value.tolist()
        elif isinstance(value, GENERATORS):
            self.record(name, generator_bytes(value))
        elif isinstance(value, Enum):
            names = (key for key in vars(value) if not key.startswith("_"))
            yield from ((f"{name}.{key}", vars(value)[key]) for key in names)
        elif isinstance(value, SCALARS):
            yield from object_parts(value, name)
        elif isinstance(value, FUNCTIONS):
            yield from self._function_parts(value, name) if self.follows_code else ()
        elif isinstance(value, set | frozenset):
            # Sorted, because the order of a set differs between processes.
            self.record(name, b"".join(sorted(map(scalar_bytes, value))))
            self.record(f"len({name})", str(len(value)).encode())
            items = sorted((item for item in value if not isinstance(item, SCALARS)), key=scalar_bytes)
            yield from ((f"list({name})[{index}]", item) for index, item in enumerate(items[:_MAX_ITEMS]))
        elif isinstance(value, dict | types.MappingProxyType):
            # Treat other mappings as objects: reading an item may call user code, read a file or update a cache.
            get: Any = dict.__getitem__ if isinstance(value, dict) else types.MappingProxyType.__getitem__
            keys = self._inspected(value, list(value), name)
            texts = [_key_text(key, index) for index, key in enumerate(keys)]
            # Include the order of the keys: a cache that evicts its oldest entry depends on it.
            self.record(f"len({name})", f"{len(value)} {texts}".encode(errors="replace"))
            yield from ((f"{name}[{text}]", get(value, key)) for text, key in zip(texts, keys, strict=True))
            objects = ((index, key) for index, key in enumerate(keys) if not isinstance(key, SCALARS))
            yield from ((f"list({name})[{index}]", key) for index, key in objects)
        elif isinstance(value, list | tuple | collections.deque):
            self.record(f"len({name})", str(len(value)).encode())
            indices = self._inspected(value, range(len(value)), name)
            yield from ((f"{name}[{index}]", value[index]) for index in indices)
        elif isinstance(value, type):
            yield from self._class_parts(value, name)
        elif isinstance(value, nn.Module):
            yield from self._module_parts(value, name)
        elif isinstance(value, CachedFunction):
            # The cache of a function that draws random numbers, or reads weights or an object, is state. Others can be
            # recomputed.
            if draws(value.__wrapped__) or is_method(value.__wrapped__) or self._reads_tensors(value.__wrapped__):
                self.record(name, str(value.cache_info().currsize).encode())
            yield name, value.__wrapped__
            if value.cache_info().currsize == 1:
                # A cached object, often the only one of its kind, may be changed later.
                parts = (part for part in gc.get_referents(value) if not isinstance(part, (*FUNCTIONS, type)))
                yield from ((f"{name}{_CACHED}", part) for part in parts if part is not vars(value))
        else:
            of_library = library_parts(value, name, self)
            yield from self._object_parts(value, name) if of_library is None else of_library

    def _function_parts(self, function: Any, name: str) -> Iterator[tuple[str, Any]]:
        yield from function_references(function, name)
        used = names_in(function)
        self._used.update(used)
        self.partial.update(dict.fromkeys(sorted(_UNREADABLE.intersection(used))))
        if isinstance(function, types.FunctionType) and is_users_function(function):
            for key in ("__annotations__", "__doc__"):
                self.defer(f"{name}.{key}", functools.partial(getattr, function, key), _readers_of(key))

    def _class_parts(self, kind: type, name: str) -> Iterator[tuple[str, Any]]:
        attributes = class_attributes(kind, name)
        yield from (part for part in attributes if self.follows_code or not isinstance(part[1], FUNCTIONS))
        yield from class_references(type(kind))
        for key, item in vars(kind).items():
            if key.startswith("__") and not isinstance(item, _DESCRIPTORS):
                self.defer(f"{name}.{key}", functools.partial(vars(kind).get, key), _readers_of(key))

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
                self.record(name, marshal.dumps(plain, 2))
            except ValueError:
                self.partial[name] = None
        half = _SAMPLE_ITEMS // 2
        return [*items[:half], *items[-half:]]

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
        yield from object_parts(value, name)
        yield from class_references(type(value)) if self.follows_code else ()

    def record(self, name: str, data: bytes) -> None:
        """Record the value of `name`."""
        # Two functions may have variables of the same name, so their digests are combined.
        before = self.digests.get(name, b"")
        self.digests[name] = hashlib.blake2b(before + data, digest_size=8).digest()


def changed_names(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """Return the names of values that differ, in the order of `now`. Parts of a changed container are omitted.

    New values come last, because they are often parts of a new object that another name refers to.

    >>> changed_names({"len(seen)": b"0", "n": b"1"}, {"len(seen)": b"1", "seen[0]": b"5", "n": b"1"})
    ['seen']
    """
    changed = [
        name
        for name in {**now, **before}
        if before.get(name) != now.get(name) and (name in before or _CACHED not in name)
    ]
    names = dict.fromkeys(name[4:-1] if name.startswith("len(") else name for name in changed)
    outer = [name for name in names if not any(prefix in names for prefix in _prefixes(name))]
    return sorted(outer, key=lambda name: name not in before and f"len({name})" not in before)


def new_cached(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the hashes of objects that a cached function has returned since `before`."""
    return {name: digest for name, digest in now.items() if _CACHED in name and name not in before}


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
    return package_kind(type(value).__module__) == "skipped" and not isinstance(value, (*_CONTAINERS, nn.Module))


def _global_generators() -> tuple[Any, ...]:
    """Return the global generators, which every checkpoint saves."""
    return torch.default_generator, random._inst, np.random.mtrand._rand


def item_names(value: Any, keys: Iterable[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each item of a container, with its key or index."""
    if isinstance(value, dict):
        yield from ((f"{name}[{_key_text(key, index)}]", key) for index, key in enumerate(keys))
    else:
        yield from ((f"{name}[{index}]", index) for index in keys)


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


_DESCRIPTORS = (
    types.FunctionType, types.BuiltinFunctionType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.WrapperDescriptorType, types.MethodDescriptorType, classmethod, staticmethod, property,
)  # fmt: skip


def _readers_of(attribute: str) -> frozenset[str]:
    """Return the names of functions that read an attribute of functions and classes, and its own name."""
    readers = {
        "__annotations__": ("get_type_hints", "get_annotations", "signature"),
        "__dataclass_fields__": ("fields",),
        "__doc__": ("getdoc",),
    }
    return frozenset((attribute, *readers.get(attribute, ())))


def reachable(objects: Iterable[Any]) -> dict[int, Any]:
    """Return all objects reachable from `objects`, by id, without following code."""
    walk = StateWalk(follows_code=False)
    for index, obj in enumerate(objects):
        walk.walk(obj, str(index))
    return walk.visited
