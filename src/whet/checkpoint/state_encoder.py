"""Encode a state as JSON and named tensors."""

import base64
import contextlib
import io
import math
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whet.checkpoint.encoding import DTYPES
from whet.checkpoint.shared_memory import KeptTensor, encode_group, memory_key, tensor_flags
from whet.checkpoint.state_format import (
    BIT_GENERATORS,
    CHANGEABLE,
    FACTORIES,
    ID,
    ORDER,
    TAG,
    class_name,
    find_class,
    join_path,
    seed_of_spawner,
)
from whet.distributed.strategies import is_distributed

_MAX_DEPTH = 24
"""Maximum nesting of containers. Each level takes up to three levels in JSON, whose depth is limited."""


class NotEncodableError(TypeError):
    """Raised for a value that has no encoding. `path` is its location in the state."""

    def __init__(self, path: str, value: object, *, why: str = "") -> None:
        super().__init__(f"{path} is a {type(value).__name__}{why}")
        self.path = path
        self.kind = type(value).__name__


class _Encoded(NamedTuple):
    """An object that has been encoded, and may occur a second time in the same state."""

    value: Any
    """The object itself, kept alive so that its id stays unique."""
    encoded: Any
    path: str


class ValueEncoder:
    """Encodes structured values as JSON. `encode_tensor` encodes the tensors in them."""

    def __init__(self, encode_tensor: Callable[[Tensor, str], Any]) -> None:
        self._tensor = encode_tensor
        self._objects: dict[int, _Encoded] = {}
        self._ids: dict[str, Any] = {}
        """The objects that appear more than once, by their ids in the JSON."""
        self._memory: dict[int, str] = {}
        """Path of the first array in each block of memory, by address."""
        self._is_one_state = False

    @contextlib.contextmanager
    def one_state(self) -> Iterator[None]:
        """Encode several values as parts of one state, in which an object that appears twice is encoded once.

        The values must be decoded in the same order.
        """
        self._forget()
        self._is_one_state = True
        try:
            yield
        finally:
            self._is_one_state = False

    def _forget(self) -> None:
        self._objects.clear()
        self._memory.clear()

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Return a value as JSON. `depth` is the number of containers around it."""
        if type(value) in weakref.ProxyTypes:
            # The referenced object may be gone, in which case isinstance raises.
            raise NotEncodableError(path, value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.generic):
            # Must precede the check for numbers, because NumPy's float64 is a subclass of float.
            return {TAG: "numpy", "dtype": _numpy_dtype(value.dtype, path, value), "data": _to_text(value.tobytes())}
        if isinstance(value, Enum):
            # Must precede the checks for strings and numbers, which enum members may be. Code compares members by
            # identity.
            if find_class(class_name(type(value)), Enum) is not type(value) or value.name is None:
                raise NotEncodableError(path, value, why=", whose class is not found by its name")
            return {TAG: "enum", "class": class_name(type(value)), "value": value.name}
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {TAG: "float", "value": repr(float(value))}
        if depth > _MAX_DEPTH:
            raise NotEncodableError(path, value, why=", nested too deeply or inside itself")
        if depth == 0 and not self._is_one_state:
            self._forget()
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path, depth)
        if not isinstance(value, CHANGEABLE):
            return self._encode_other(value, path, depth)
        if id(value) in self._objects:
            return {TAG: "again", "of": self._id_of(self._objects[id(value)])}
        num_known = len(self._objects)
        try:
            encoded = self._encode_changeable(value, path, depth)
        except NotEncodableError:
            # Encoding has failed, so forget the objects of the incomplete state.
            while len(self._objects) > num_known:
                self._objects.popitem()
            raise
        self._objects[id(value)] = _Encoded(value, encoded, path)
        return encoded

    def _id_of(self, known: _Encoded) -> str:
        """Return the id of an object, and add it to its encoding when the object appears for the second time."""
        name, number = known.path, 2
        while self._ids.setdefault(name, known.value) is not known.value:
            name, number = f"{known.path}~{number}", number + 1
        if isinstance(known.encoded, dict):
            known.encoded[ID] = name
        elif not _has_id(known.encoded):
            known.encoded.insert(0, {TAG: "id", "value": name})
        return name

    def _encode_changeable(self, value: Any, path: str, depth: int) -> Any:
        if type(value) is list:
            return self._items(value, path, depth)
        if type(value) in (dict, OrderedDict, defaultdict, Counter):
            return self._encode_mapping(value, path, depth)
        return self._encode_other(value, path, depth)

    def _items(self, values: Collection[Any], path: str, depth: int) -> list[Any]:
        if _are_plain(values):
            return list(values)
        return [self.encode(item, join_path(path, index), depth + 1) for index, item in enumerate(values)]

    def _encode_mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Any:
        is_plain = type(value) is dict and all(type(key) is str for key in value)
        if is_plain and value.keys().isdisjoint((TAG, ORDER, ID)):
            encoded = dict(value)
            if not _are_plain(value.values()):
                encoded = {key: self.encode(item, join_path(path, key), depth + 1) for key, item in value.items()}
            keys = list(encoded)
            return encoded if keys == sorted(keys) else {**encoded, ORDER: keys}
        items = [
            [self.encode(key, path, depth + 1), self.encode(item, join_path(path, key), depth + 1)]
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {TAG: "Counter", "items": items}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = "None" if factory is None else getattr(factory, "__name__", "")
            if FACTORIES.get(name, "") is not factory:
                raise NotEncodableError(path, value, why=f" of {factory}")
            return {TAG: "defaultdict", "factory": name, "items": items}
        if isinstance(value, OrderedDict):
            # nn.Module.state_dict() stores module versions in this attribute.
            metadata = getattr(value, "_metadata", None)
            more = {} if metadata is None else {"metadata": self.encode(metadata, path, depth + 1)}
            return {TAG: "OrderedDict", "items": items, **more}
        return {TAG: "dict", "items": items}

    def _encode_other(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, torch.Size):
            return {TAG: "Size", "items": list(value)}
        if kind is tuple:
            return {TAG: "tuple", "items": self._items(value, path, depth)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = self._items(value, path, depth)
            return {TAG: "namedtuple", "class": class_name(kind), "fields": list(kind._fields), "items": items}
        if kind in (set, frozenset):
            # Sort the items, because the order of a set differs between processes.
            return {TAG: kind.__name__, "items": sorted(self._items(value, path, depth), key=repr)}
        if kind is deque:
            return {TAG: "deque", "items": self._items(value, path, depth), "maxlen": value.maxlen}
        if kind in (bytes, bytearray):
            return {TAG: kind.__name__, "data": _to_text(value)}
        if kind is io.BytesIO:
            return {TAG: "BytesIO", "data": _to_text(value.getvalue()), "position": value.tell()}
        if kind is complex:
            return {TAG: "complex", "items": self._items((value.real, value.imag), path, depth)}
        if kind in (range, slice):
            return {TAG: kind.__name__, "items": self._items((value.start, value.stop, value.step), path, depth)}
        if kind is torch.dtype:
            return {TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {TAG: "device", "name": str(value)}
        if kind is np.ndarray:
            return self._encode_array(value, path, depth)
        return self._encode_generator(value, path, depth)

    def _encode_array(self, value: np.ndarray, path: str, depth: int) -> Any:
        dtype = _numpy_dtype(value.dtype, path, value)
        order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        # Copy the array, because it may change before the checkpoint is written.
        data = torch.frombuffer(bytearray(value.tobytes(order)), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        encoded = self.encode(data.to(torch.uint8), path, depth + 1)
        facts = {TAG: "ndarray", "dtype": dtype, "shape": list(value.shape), "order": order, "data": encoded}
        return {**facts, **self._sharing(value, path)}

    def _sharing(self, value: np.ndarray, path: str) -> dict[str, str]:  # noqa: ARG002
        """Return the path of an earlier array that shares the memory of this one, as an entry of its encoding.

        Fingerprints omit it.
        """
        return {}

    def _encode_generator(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, torch.Generator):
            state = self.encode(value.get_state(), path, depth + 1)
            return {TAG: "torch.Generator", "device": value.device.type, "state": state}
        if isinstance(value, np.random.Generator):
            state = value.bit_generator.state
            if state["bit_generator"] in BIT_GENERATORS:
                facts = {TAG: "numpy.Generator", "state": self.encode(state, path, depth + 1)}
                seed = seed_of_spawner(value)
                return facts if seed is None else {**facts, "seed": self.encode(seed, path, depth + 1)}
        elif isinstance(value, np.random.RandomState):
            return {TAG: "RandomState", "state": self.encode(value.get_state(legacy=False), path, depth + 1)}
        elif type(value) is random.Random:
            return {TAG: "Random", "state": self.encode(value.getstate(), path, depth + 1)}
        raise NotEncodableError(path, value)

    def _encode_tensor(self, value: Tensor, path: str, depth: int) -> Any:
        kind = type(value)
        if value.dtype is torch.complex128:
            # safetensors does not support complex128.
            real = self.encode(torch.view_as_real(value.detach()), path, depth + 1)
            return {TAG: "complex128", "data": real, **tensor_flags(value)}
        if value.layout is torch.strided and (kind in (Tensor, nn.Parameter, nn.Buffer) or is_distributed(value)):
            return self._tensor(value, path)
        if value.layout is torch.sparse_coo:
            parts = {"indices": value._indices(), "values": value._values()}
            facts = {"shape": list(value.shape), "is_coalesced": value.is_coalesced()}
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = {"indices": value.crow_indices(), "columns": value.col_indices(), "values": value.values()}
            facts = {"shape": list(value.shape), "layout": str(value.layout).removeprefix("torch.")}
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {"indices": value.ccol_indices(), "columns": value.row_indices(), "values": value.values()}
            facts = {"shape": list(value.shape), "layout": str(value.layout).removeprefix("torch.")}
        elif hasattr(value, "__tensor_flatten__"):
            names, metadata = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            facts = {
                "class": f"{kind.__module__}:{kind.__qualname__}",
                "metadata": self.encode(metadata, path, depth + 1),
                "shape": _plain_sizes(value.shape),
                "stride": _plain_sizes(value.stride()),
            }
        else:
            raise NotEncodableError(path, value, why=f" with the layout {value.layout}")
        encoded = {name: self.encode(part, join_path(path, name), depth + 1) for name, part in parts.items()}
        name = "subclass" if "class" in facts else "sparse"
        return {TAG: name, **facts, "parts": encoded, **tensor_flags(value)}


def _plain_sizes(sizes: Sequence[Any]) -> list[int]:
    """Return sizes as integers, with -1 for the ragged size of a nested tensor, which follows from its parts."""
    return [size if type(size) is int else -1 for size in sizes]


def _has_id(encoded: list[Any]) -> bool:
    return bool(encoded) and isinstance(encoded[0], dict) and encoded[0].get(TAG) == "id"


def _are_plain(values: Collection[Any]) -> bool:
    """Return whether JSON represents all values unchanged.

    This check is much faster than encoding each value, for example in a vocabulary.
    """
    kinds = {*map(type, values)}
    return kinds <= {type(None), bool, int, str, float} and (float not in kinds or all(map(_is_plain_number, values)))


def _is_plain_number(value: Any) -> bool:
    return type(value) is not float or math.isfinite(value)


class StateEncoder(ValueEncoder):
    """Encodes states, and stores their tensors outside the JSON. `finish` returns the tensors by name.

    `live` are the tensors of the model by name. They are saved separately, and states may refer to them.
    """

    def __init__(self, live: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(self._keep)
        self._kept = [KeptTensor(tensor, name, None) for name, tensor in (live or {}).items()]
        self._paths = {kept.path for kept in self._kept}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        mark = len(self._kept)
        try:
            return super().encode(value, path, depth)
        except NotEncodableError:
            # Encoding has failed, so forget the tensors of the incomplete state.
            self._paths.difference_update(kept.path for kept in self._kept[mark:])
            del self._kept[mark:]
            raise

    def _sharing(self, value: np.ndarray, path: str) -> dict[str, str]:
        # Arrays are restored separately, so arrays that share memory no longer share it after a resume. This entry
        # allows the comparison of the restored state with the checkpoint to detect that.
        first = self._memory.setdefault(_address(value), path) if value.nbytes else path
        return {} if first == path else {"shares": first}

    def _keep(self, tensor: Tensor, path: str) -> Any:
        if tensor.is_meta:
            raise NotEncodableError(path, tensor, why=" on the meta device, which has no values")
        if tensor.dtype not in DTYPES.values():
            raise NotEncodableError(path, tensor, why=f" of {tensor.dtype}")
        encoded: dict[str, Any] = {}
        # Keys of two dicts may produce the same path.
        name, number = path, 2
        while name in self._paths:
            name, number = f"{path}~{number}", number + 1
        self._paths.add(name)
        self._kept.append(KeptTensor(tensor, name, encoded))
        return encoded

    def finish(self) -> dict[str, Tensor]:
        """Complete all encodings, and return the tensors to save by name."""
        tensors: dict[str, Tensor] = {}
        by_memory: dict[Any, list[KeptTensor]] = {}
        for kept in self._kept:
            by_memory.setdefault(memory_key(kept.tensor), []).append(kept)
        for group in by_memory.values():
            encode_group(group, tensors)
        self._kept = [kept for kept in self._kept if kept.encoded is None]
        return tensors


def _address(array: np.ndarray) -> int:
    """Return the start address of the memory that an array views."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    if isinstance(array.base, Tensor):
        return array.base.untyped_storage().data_ptr()
    return int(array.__array_interface__["data"][0])


def _numpy_dtype(dtype: np.dtype[Any], path: str, value: object) -> str:
    if dtype.hasobject or dtype.fields is not None:
        raise NotEncodableError(path, value, why=f" of {dtype}")
    return dtype.str


def _to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")
