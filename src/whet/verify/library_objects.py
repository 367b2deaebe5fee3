"""Read the state of objects from the standard library and other packages, which is often not in attributes."""

import array
import contextlib
import contextvars
import ctypes
import functools
import io
import itertools
import mmap
import os
import queue
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, Protocol

import torch
from torch import UntypedStorage
from torch.utils.data import DataLoader

from whet.verify.code_references import is_installed, package_kind
from whet.verify.torch_internals import is_compiler_mark, is_torch_internal, operator_parts

_MAX_MAPPED_BYTES = 1_048_576
"""Number of bytes of a memory-mapped file that are compared."""
_CData: Any = ctypes.Structure.__base__
_POSITIONS = frozenset({"tell", "seek", "lseek", "stat", "fstat", "getsize", "st_size"})
"""Names that code uses to read the size of a file or the position in it."""
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_UNREAD_MODULES = (
    "_abc", "_ctypes", "_struct", "_thread", "_weakref", "concurrent.futures.process", "concurrent.futures.thread",
    "ctypes", "re", "subprocess", "types",
)  # fmt: skip
"""Modules of Python whose objects do not change, or describe this process only."""
_ELSEWHERE = (
    "dbm", "multiprocessing.connection", "multiprocessing.managers", "multiprocessing.pool", "multiprocessing.queues",
    "shelve",
)  # fmt: skip
"""Modules of Python whose objects have their state in files or in other processes."""
_UNREAD_CLASSES = frozenset({("functools", "_lru_list_elem"), ("_csv", "writer"), ("_csv", "Dialect")})
"""More such classes, by module and name."""
_UNREAD_TYPES = (threading.Thread, weakref.finalize, contextvars.Token)
_CACHES = frozenset({("Logger", "_cache"), ("Logger", "manager"), ("RootLogger", "_cache"), ("RootLogger", "manager")})
"""Attributes that Python fills when an object is used, by the name of the class."""


class StateRecorder(Protocol):
    """The part of a StateWalk that this module uses."""

    @property
    def partial(self) -> dict[str, None]:
        """Names of values that could not be read."""

    def record(self, name: str, data: bytes) -> None:
        """Record the value of `name`."""

    def defer(self, name: str, read: Callable[[], Any], names: frozenset[str]) -> None:
        """Walk what `read` returns, if any code that is visited uses one of these names."""


def library_parts(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]] | None:
    """Record an object whose state is outside its attributes, and yield what it refers to. None for other objects."""
    kind: Any = type(value)
    if is_torch_internal(kind):
        return operator_parts(value, name)
    package = package_kind(kind.__module__)
    for kinds, read in _READERS:
        if isinstance(value, kinds):
            return chain(read(value, name, walk), () if package else object_parts(value, name))
    if package in ("python", "") and hasattr(kind, "__next__") and has_hidden_state(kind):
        return _iterator_parts(value, name, walk)
    if package == "python" and (
        kind.__module__ in _UNREAD_MODULES or (kind.__module__, kind.__name__) in _UNREAD_CLASSES
    ):
        return iter(())
    if kind.__module__.startswith(_ELSEWHERE) and package == "python":
        walk.partial[name] = None
        return iter(())
    if package == "python" and has_hidden_state(kind):
        return chain(_python_parts(value, name, walk), object_parts(value, name))
    if package == "unreadable" or (package == "" and not callable(kind) and has_hidden_state(kind)):
        # A callable is usually a function, for example one that Cython or Numba has compiled.
        walk.partial[name] = None
    if package == "named":
        _defer_attributes(value, name, walk)
        return iter(())
    return None


def object_parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object, without those that Python fills when the object is used."""
    yield from ((f"{name}.{key}", item) for key, item in attributes_of(value))


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the attributes of an object, from its __dict__ and its slots."""
    with contextlib.suppress(AttributeError):
        # Do not use getattr, which could call the user's code.
        attributes = object.__getattribute__(value, "__dict__")
        yield from (
            item
            for item in attributes.items()
            if (type(value).__name__, item[0]) not in _CACHES and not is_compiler_mark(item[0])
        )
    for owner in type(value).__mro__:
        for slot in _slots_of(owner):
            with contextlib.suppress(AttributeError):
                yield slot.__name__, slot.__get__(value)


def _defer_attributes(value: Any, name: str, walk: StateRecorder) -> None:
    """Compare the attributes that the user's code names, directly or by the name of a property that reads them."""
    kind: Any = type(value)
    readers = _readers(kind)
    for key, _ in attributes_of(value):
        walk.defer(f"{name}.{key}", functools.partial(getattr, value, key, None), readers.get(key, frozenset()) | {key})


@functools.lru_cache(1_024)
def _readers(kind: Any) -> dict[str, frozenset[str]]:
    """Return the names of the properties of a class by the names that their code uses."""
    readers: dict[str, frozenset[str]] = {}
    for owner in kind.__mro__:
        for key, item in vars(owner).items():
            if isinstance(item, property) and (code := getattr(item.fget, "__code__", None)) is not None:
                readers |= {used: readers.get(used, frozenset()) | {key} for used in code.co_names}
    return readers


@functools.lru_cache(4_096)
def has_hidden_state(kind: Any) -> bool:
    """Return whether instances have memory that belongs to no attribute, as those of C extensions do."""
    # pickle uses the same test for objects that it cannot copy.
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return False
    slots = {id(item) for owner in kind.__mro__ for item in _slots_of(owner)}
    size = object.__basicsize__ + 8 * (len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))
    return kind.__basicsize__ > size


def _slots_of(kind: type) -> Iterator[Any]:
    slots = vars(kind).get("__slots__", ())
    private = f"_{kind.__name__.lstrip('_')}"
    for slot in (slots,) if isinstance(slots, str) else slots:
        item = vars(kind).get(slot, vars(kind).get(f"{private}{slot}"))
        if isinstance(item, types.MemberDescriptorType):
            yield item


# --- readers ---------------------------------------------------------------------------------------------------------
# Each reader records the state that it can read, and yields the objects that its object refers to, with their names.


def _nothing(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del value, name, walk
    return iter(())


def _bytes(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    walk.record(name, bytes(value))
    yield from ()


def _mapped_file(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    with memoryview(value) as view:
        walk.record(name, str(value.tell()).encode() + bytes(view[:_MAX_MAPPED_BYTES]))
        if len(view) > _MAX_MAPPED_BYTES and not view.readonly:
            walk.partial[name] = None
    yield from ()


def _file(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    # `tell` fails while a text file is iterated over, so use the underlying binary file.
    file = value.buffer if isinstance(value, io.TextIOWrapper) else value
    if file.closed or not file.seekable():
        walk.record(name, b"")
    elif file.readable():
        walk.record(name, str(file.tell()).encode())
    else:
        # Usually a log. `tell` flushes buffered text first, and fails if the disk is full.
        walk.defer(name, value.tell, _POSITIONS)
    yield from ()


def _text_buffer(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    walk.record(name, repr((value.getvalue(), value.tell())).encode())
    yield from ()


def _simple_queue(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    walk.record(name, str(value.qsize()).encode())
    if not value.empty():
        # Items cannot be read without removing them.
        walk.partial[name] = None
    yield from ()


def _lock(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    walk.record(name, str(value.locked()).encode())
    yield from ()


def _coroutine(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    prefix = {types.GeneratorType: "gi", types.CoroutineType: "cr", types.AsyncGeneratorType: "ag"}[type(value)]
    frame = getattr(value, f"{prefix}_frame")
    walk.record(name, b"finished" if frame is None else str(frame.f_lasti).encode())
    inner = f"{prefix}_{'yieldfrom' if prefix == 'gi' else 'await'}"
    if getattr(value, inner) is not None:
        yield f"{name}.{inner}", getattr(value, inner)
    yield from () if frame is None else ((f"{name}.{local}", v) for local, v in frame.f_locals.items())


def _iterator_parts(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """Record the position of an iterator, if it exposes one. Most iterators of itertools do not."""
    hint = getattr(value, "__length_hint__", None)
    if isinstance(value, itertools.count):
        walk.record(name, repr(value).encode())
    elif hint is not None and isinstance(length := hint(), int):
        walk.record(name, str(length).encode())
    elif type(value).__module__ == "builtins" and type(value).__name__ in ("iterator", "callable_iterator"):
        # An iterator over __getitem__ has a position; one that calls a function has its state in the function.
        yield name, value.__reduce__()[1:]
    else:
        walk.partial[name] = None


def _exception(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield f"{name}.args", value.args
    if package_kind(type(value).__module__):
        yield from object_parts(value, name)


def _bound(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """A method of a built-in object, such as `seen.append`."""
    del walk
    if not isinstance(value.__self__, types.ModuleType | type | None):
        yield name, value.__self__


def _cached_value(attribute: str, suffix: str) -> Any:
    def read(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
        del walk
        yield f"{name}{suffix}", getattr(value, attribute)

    return read


def _property(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield from ((name, function) for function in (value.fget, value.fset, value.fdel) if function is not None)


def _cell(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    with contextlib.suppress(ValueError):
        # The variable may not be assigned yet.
        yield name, value.cell_contents


def _foreign_library(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """The variables of a library in C, such as the generator behind `rand`, cannot be seen."""
    del value
    walk.partial[name] = None
    yield from ()


def _storage(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield name, torch.empty(0, dtype=torch.uint8, device=value.device).set_(value)


def _module(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """Compare the variables of a user's module that code names."""
    if not is_installed(value) and package_kind(value.__name__) == "":
        for key in vars(value):
            if not key.startswith("__"):
                walk.defer(f"{name}.{key}", functools.partial(getattr, value, key), frozenset([key]))
    yield from ()


def _loader(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield from ((f"{name}.{key}", getattr(value, key)) for key in ("generator", "sampler", "collate_fn"))


def _context_variable(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield f"{name}.get()", value.get(None)


def _reference(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield f"{name}()", value()


def _weak_mapping(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield name, dict(value.items())


def _weak_set(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield name, list(value)


def _synchronized(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """multiprocessing.Value and Array: commonly used to pass the epoch to data workers."""
    del walk
    yield name, value.get_obj()


def _environment(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    yield name, dict(value)


def _attributes(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    del walk
    return object_parts(value, name)


def _thread_attributes(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """Each thread has other attributes, which only the class of the object can find."""
    del walk
    yield from ((f"{name}.{key}", item) for key, item in vars(value).items())


def _python_parts(value: Any, name: str, walk: StateRecorder) -> Iterator[tuple[str, Any]]:
    """Read an object that Python implements in C through the state that it gives to `pickle`."""
    kind = type(value)
    if kind.__module__ == "tempfile":
        yield name, value.file
    elif kind.__module__ == "sqlite3":
        walk.record(name, str(getattr(value, "total_changes", "")).encode())
    elif kind.__module__ in ("_hashlib", "_md5", "_sha1", "_sha256", "_sha512", "_blake2") and value.digest_size:
        walk.record(name, value.digest())
    elif kind.__name__ == "SemLock":
        walk.record(name, str(value._get_value()).encode())
    else:
        try:
            has_own = "__getstate__" in vars(kind)
            yield name, value.__getstate__() if has_own else value.__reduce_ex__(2)
        except TypeError:
            walk.partial[name] = None


class _Indexed:
    def __getitem__(self, index: int) -> int:
        return index


_ITERATORS: tuple[type, ...] = (
    enumerate, zip, map, filter, type(iter([])), type(iter(())), type(iter(range(0))), type(iter({})),
    type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(iter("")), type(iter(b"")),
    type(iter(bytearray())), type(reversed([])), type(reversed({})), type(iter(int, 1)),
    type(iter(_Indexed())), *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)  # fmt: skip
_READERS: tuple[tuple[Any, Any], ...] = (
    ((types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType), _coroutine),
    ((array.array, memoryview, _CData), _bytes),
    (mmap.mmap, _mapped_file),
    (_FILES, _file),
    ((io.StringIO, io.BytesIO), _text_buffer),
    (queue.SimpleQueue, _simple_queue),
    (SynchronizedBase, _synchronized),
    (os._Environ, _environment),
    (DataLoader, _loader),
    (contextvars.ContextVar, _context_variable),
    (contextvars.Context, _weak_mapping),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), _weak_mapping),
    (weakref.WeakSet, _weak_set),
    (weakref.ReferenceType, _reference),
    (type(threading.Lock()), _lock),
    (threading.local, _thread_attributes),
    (BaseException, _exception),
    (_VIEWS, _cached_value("mapping", "")),
    ((classmethod, staticmethod), _cached_value("__func__", "")),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _bound),
    (types.SimpleNamespace, _attributes),
    (property, _property),
    (types.CellType, _cell),
    (ctypes.CDLL, _foreign_library),
    (UntypedStorage, _storage),
    (types.ModuleType, _module),
    (_ITERATORS, _iterator_parts),
    (_UNREAD_TYPES, _nothing),
)
"""How to read instances of some types. The first that fits is used."""
