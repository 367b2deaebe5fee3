"""Encode the state of any object as JSON and named tensors. Nothing is pickled.

value                                 JSON
None, bool, int, str, list            unchanged
a finite float                        unchanged: the shortest text that reads back as the same bits
nan, inf, -inf                        {"$": "float", "value": "inf"}
a dict with text keys                 unchanged, with the key "$order" unless its keys are sorted: a file sorts them
any other dict                        {"$": "dict", "items": [[key, value], ...]}
tuple, set, deque, bytes, ...         {"$": its type, ...}
torch.Generator, random.Random, ...   {"$": its type, "state": ...}
a tensor, stored outside the JSON     {"$": "reference", "name": its path}
the same tensor object again          {"$": "same", "of": the path of the first}
a tensor that shares its memory       {"$": "alias" or "view", "of": the path of the first}
a small tensor, stored in the JSON    {"$": "tensor", "dtype": "F32", "shape": [...], "items": [...]}
"""

import base64
import io
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from whet.checkpoint.encoding import DTYPES, dtype_name
from whet.distributed.strategies import is_distributed

_TAG, _ORDER = "$", "$order"
_MAX_TENSOR_ITEMS = 64
_MAX_DEPTH = 24
"""Levels of nesting. Each needs up to two in JSON, whose depth is limited."""

_FACTORIES: dict[str, Any] = {"None": None} | {t.__name__: t for t in (list, dict, set, int, float, bool, str, tuple)}
_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


class NotEncodableError(TypeError):
    """A value that has no encoding. `path` names the place in the state."""

    def __init__(self, path: str, value: object, *, why: str = "") -> None:
        super().__init__(f"{path} is a {type(value).__name__}{why}")
        self.path = path


def encode_state(value: Any, *, path: str = "") -> Any:
    """Return a state as JSON, with small tensors in it. Raises NotEncodableError for a value that has no encoding.

    >>> encode_state({"best": float("inf"), "last": 3})
    {'best': {'$': 'float', 'value': 'inf'}, 'last': 3}
    """
    return Encoder(_encode_small_tensor).encode(value, path)


def decode_state(value: Any) -> Any:
    """Return the state that `encode_state` encoded. Raises KeyError, TypeError or ValueError for anything else."""
    return StateDecoder({}).decode(value)


# --- encoding --------------------------------------------------------------------------------------------------------


class Encoder:
    """Encodes structures. `encode_tensor` encodes the tensors in them."""

    def __init__(self, encode_tensor: Callable[[Tensor, str], Any]) -> None:
        self._tensor = encode_tensor

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, np.generic):
            # Before numbers: NumPy's float64 is a subclass of float.
            return {_TAG: "numpy", "dtype": _numpy_dtype(value.dtype, path, value), "data": _to_text(value.tobytes())}
        if isinstance(value, Enum):
            # Before texts and numbers: a member may be one, and code compares members by identity.
            if _find_class(_class_name(type(value)), Enum) is not type(value) or value.name is None:
                raise NotEncodableError(path, value, why=", whose class is not found by its name")
            return {_TAG: "enum", "class": _class_name(type(value)), "value": value.name}
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
        if depth > _MAX_DEPTH:
            raise NotEncodableError(path, value, why=", nested too deeply or inside of itself")
        if isinstance(value, Tensor):
            return self._encode_tensor(value, path, depth)
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
        if is_plain and _TAG not in value and _ORDER not in value:
            encoded = dict(value)
            if not _are_plain(value.values()):
                encoded = {key: self.encode(item, join_path(path, key), depth + 1) for key, item in value.items()}
            keys = list(encoded)
            return encoded if keys == sorted(keys) else {**encoded, _ORDER: keys}
        items = [
            [self.encode(key, path, depth + 1), self.encode(item, join_path(path, key), depth + 1)]
            for key, item in value.items()
        ]
        if isinstance(value, Counter):
            return {_TAG: "Counter", "items": items}
        if isinstance(value, defaultdict):
            factory = value.default_factory
            name = "None" if factory is None else getattr(factory, "__name__", "")
            if _FACTORIES.get(name, "") is not factory:
                raise NotEncodableError(path, value, why=f" of {factory}")
            return {_TAG: "defaultdict", "factory": name, "items": items}
        if isinstance(value, OrderedDict):
            # nn.Module.state_dict() keeps the versions of its modules in this attribute.
            metadata = getattr(value, "_metadata", None)
            more = {} if metadata is None else {"metadata": self.encode(metadata, path, depth + 1)}
            return {_TAG: "OrderedDict", "items": items, **more}
        return {_TAG: "dict", "items": items}

    def _encode_other(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if isinstance(value, torch.Size):
            return {_TAG: "Size", "items": list(value)}
        if kind is tuple:
            return {_TAG: "tuple", "items": self._items(value, path, depth)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            items = self._items(value, path, depth)
            return {_TAG: "namedtuple", "class": _class_name(kind), "fields": list(kind._fields), "items": items}
        if kind in (set, frozenset):
            # Sorted, because the order of a set differs between processes.
            return {_TAG: kind.__name__, "items": sorted(self._items(value, path, depth), key=repr)}
        if kind is deque:
            return {_TAG: "deque", "items": self._items(value, path, depth), "maxlen": value.maxlen}
        if kind in (bytes, bytearray):
            return {_TAG: kind.__name__, "data": _to_text(value)}
        if kind is io.BytesIO:
            return {_TAG: "BytesIO", "data": _to_text(value.getvalue()), "position": value.tell()}
        if kind is complex:
            return {_TAG: "complex", "items": self._items((value.real, value.imag), path, depth)}
        if kind in (range, slice):
            return {_TAG: kind.__name__, "items": self._items((value.start, value.stop, value.step), path, depth)}
        if kind is torch.dtype:
            return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {_TAG: "device", "name": str(value)}
        if kind is np.ndarray:
            return self._encode_array(value, path, depth)
        return self._encode_generator(value, path, depth)

    def _encode_array(self, value: np.ndarray, path: str, depth: int) -> Any:
        dtype = _numpy_dtype(value.dtype, path, value)
        order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        # A copy, because the array may change before the checkpoint is written.
        data = torch.frombuffer(bytearray(value.tobytes(order)), dtype=torch.uint8) if value.nbytes else torch.empty(0)
        encoded = self.encode(data.to(torch.uint8), path, depth + 1)
        return {_TAG: "ndarray", "dtype": dtype, "shape": list(value.shape), "order": order, "data": encoded}

    def _encode_generator(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, torch.Generator):
            state = self.encode(value.get_state(), path, depth + 1)
            return {_TAG: "torch.Generator", "device": value.device.type, "state": state}
        if isinstance(value, np.random.Generator):
            state = value.bit_generator.state
            if state["bit_generator"] in _BIT_GENERATORS:
                return {_TAG: "numpy.Generator", "state": self.encode(state, path, depth + 1)}
        elif isinstance(value, np.random.RandomState):
            return {_TAG: "RandomState", "state": self.encode(value.get_state(legacy=False), path, depth + 1)}
        elif type(value) is random.Random:
            return {_TAG: "Random", "state": self.encode(value.getstate(), path, depth + 1)}
        raise NotEncodableError(path, value)

    def _encode_tensor(self, value: Tensor, path: str, depth: int) -> Any:
        kind = type(value)
        if value.dtype is torch.complex128:
            # safetensors has no such dtype.
            real = self.encode(torch.view_as_real(value.detach()), path, depth + 1)
            return {_TAG: "complex128", "data": real, **_tensor_flags(value)}
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
                "shape": list(value.shape),
                "stride": list(value.stride()),
            }
        else:
            raise NotEncodableError(path, value, why=f" with the layout {value.layout}")
        encoded = {name: self.encode(part, join_path(path, name), depth + 1) for name, part in parts.items()}
        name = "subclass" if "class" in facts else "sparse"
        return {_TAG: name, **facts, "parts": encoded, **_tensor_flags(value)}


def _are_plain(values: Collection[Any]) -> bool:
    """Return whether values are the same in JSON. It is much faster than to encode each: think of a vocabulary."""
    kinds = {*map(type, values)}
    return kinds <= {type(None), bool, int, str, float} and (float not in kinds or all(map(_is_plain_number, values)))


def _is_plain_number(value: Any) -> bool:
    return type(value) is not float or math.isfinite(value)


class _Kept(NamedTuple):
    """A tensor that the JSON refers to."""

    tensor: Tensor
    path: str
    encoded: dict[str, Any] | None
    """The encoding, which `StateEncoder.finish` fills in; None for a tensor of the model."""


class StateEncoder(Encoder):
    """Encodes states and stores their tensors outside the JSON. `finish` returns the tensors by name.

    `live` are the tensors of the model by name. They are saved separately, and states may refer to them.
    """

    def __init__(self, live: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(self._keep)
        self._kept = [_Kept(tensor, name, None) for name, tensor in (live or {}).items()]
        self._paths = {kept.path for kept in self._kept}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        mark = len(self._kept)
        try:
            return super().encode(value, path, depth)
        except NotEncodableError:
            # Forget the tensors of an incomplete state.
            self._paths.difference_update(kept.path for kept in self._kept[mark:])
            del self._kept[mark:]
            raise

    def _keep(self, tensor: Tensor, path: str) -> Any:
        if tensor.is_meta:
            raise NotEncodableError(path, tensor, why=" on the meta device, which has no values")
        if tensor.dtype not in DTYPES.values():
            raise NotEncodableError(path, tensor, why=f" of {tensor.dtype}")
        encoded: dict[str, Any] = {}
        # Keys of two dicts may give the same path.
        name, number = path, 2
        while name in self._paths:
            name, number = f"{path}~{number}", number + 1
        self._paths.add(name)
        self._kept.append(_Kept(tensor, name, encoded))
        return encoded

    def finish(self) -> dict[str, Tensor]:
        """Complete all encodings, and return the tensors to save by name."""
        tensors: dict[str, Tensor] = {}
        by_memory: dict[Any, list[_Kept]] = {}
        for kept in self._kept:
            by_memory.setdefault(memory_key(kept.tensor), []).append(kept)
        for group in by_memory.values():
            _encode_group(group, tensors)
        self._kept = [kept for kept in self._kept if kept.encoded is None]
        return tensors


def _encode_group(group: list[_Kept], tensors: dict[str, Tensor]) -> None:
    """Encode tensors that share memory."""
    distinct: dict[int, _Kept] = {}
    for kept in group:
        distinct.setdefault(id(kept.tensor), kept)
    live = [kept for kept in distinct.values() if kept.encoded is None]
    first = next(iter(distinct.values()))
    # Tensors of different extents in memory that the model does not own: keep the memory itself.
    is_whole = not live and any(not _is_same_view(kept.tensor, first.tensor) for kept in distinct.values())
    if not live and not is_distributed(first.tensor):
        is_whole = is_whole or overlaps_itself(first.tensor)
    if is_whole:
        tensors[first.path] = _whole_memory(first.tensor)
    for kept in group:
        if kept.encoded is None:
            continue
        original = distinct[id(kept.tensor)]
        if original is not kept:
            kept.encoded.update({_TAG: "same", "of": original.path})
        elif is_whole:
            place = {"path": kept.path, "is_memory": True, **_geometry(kept.tensor, 0)}
            kept.encoded.update({_TAG: "view", "of": first.path, **place})
        elif (base := next((b for b in live or [first] if _is_same_view(kept.tensor, b.tensor)), None)) is not None:
            if base is kept:
                tensors[kept.path] = kept.tensor
                stride = {} if kept.tensor.is_contiguous() else {"stride": list(kept.tensor.stride())}
                kept.encoded.update({_TAG: "reference", "name": kept.path, **stride, **_tensor_flags(kept.tensor)})
            else:
                flags = _tensor_flags(kept.tensor)
                kept.encoded.update({_TAG: "alias", "of": base.path, "path": kept.path, **flags})
        elif (base := next((b for b in live if _is_inside(kept.tensor, b.tensor)), None)) is not None:
            offset = int(base.tensor.storage_offset())
            facts = {
                "path": kept.path,
                "base_stride": list(base.tensor.stride()),
                **_geometry(kept.tensor, offset),
            }
            kept.encoded.update({_TAG: "view", "of": base.path, **facts})
        else:
            # Memory that tensors of the model share in part, such as one buffer of which all weights are views.
            tensors[kept.path] = kept.tensor
            facts = {
                "path": kept.path,
                "name": kept.path,
                "size": live[0].tensor.untyped_storage().nbytes(),
            }
            kept.encoded.update(
                {_TAG: "view", "of": live[0].path, "is_absolute": True, **facts, **_geometry(kept.tensor, 0)}
            )


def memory_key(tensor: Tensor) -> Any:
    """Return a value that is equal for tensors that share memory."""
    if is_distributed(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()
    return (storage._cdata,) if storage.nbytes() else id(tensor)


def _is_same_view(ours: Tensor, theirs: Tensor) -> bool:
    if ours is theirs:
        return True
    places = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (ours, theirs)]
    return places[0] == places[1]


def _is_inside(part: Tensor, whole: Tensor) -> bool:
    if part.dtype != whole.dtype or not _is_dense(whole) or not part.numel():
        return False
    first = part.storage_offset() - whole.storage_offset()
    last = first + sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    return first >= 0 and last < whole.numel()


def _is_dense(tensor: Tensor) -> bool:
    sizes = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements share memory, as those of an expanded tensor do."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _whole_memory(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return whole.set_(tensor.untyped_storage())


def _geometry(tensor: Tensor, base_offset: int) -> dict[str, Any]:
    facts = {
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset() - base_offset,
    }
    return {**facts, **_tensor_flags(tensor)}


def _tensor_flags(tensor: Tensor) -> dict[str, Any]:
    flags: dict[str, Any] = {"device": tensor.device.type}
    if isinstance(tensor, nn.Parameter):
        flags["is_parameter"] = True
    if tensor.requires_grad:
        flags["requires_grad"] = True
    return flags


def _encode_small_tensor(value: Tensor, path: str) -> Any:
    if value.numel() > _MAX_TENSOR_ITEMS:
        raise NotEncodableError(path, value, why=f" of {value.numel():,} elements, more than {_MAX_TENSOR_ITEMS}")
    flat = value.detach().cpu().reshape(-1).tolist()
    shape, dtype = list(value.shape), dtype_name(value.dtype)
    return {_TAG: "tensor", "dtype": dtype, "shape": shape, "items": encode_state(flat, path=path)}


def _numpy_dtype(dtype: np.dtype[Any], path: str, value: object) -> str:
    if dtype.hasobject or dtype.fields is not None:
        raise NotEncodableError(path, value, why=f" of {dtype}")
    return dtype.str


def _to_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def join_path(path: str, name: object) -> str:
    """Return the path of an entry. A path that ends with "/" gets no other separator."""
    return f"{path}.{name}" if path and not path.endswith("/") else f"{path}{name}"


# --- decoding --------------------------------------------------------------------------------------------------------


class StateDecoder:
    """Decodes states.

    `tensors` are the saved tensors by name. `live` are the tensors of the model, to which states may refer. Tensors
    that were on the run's device are created on `device`; those that were on the host stay there.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        live: Mapping[str, Tensor] | None = None,
        device: torch.device | None = None,
        was_on_host: bool = True,
    ) -> None:
        """Decode with saved tensors. With `was_on_host`, the run's device was the CPU, so all tensors follow it."""
        self._tensors = tensors
        self._decoded: dict[str, Tensor] = dict(live or {})
        self._device = device or torch.device("cpu")
        self._was_on_host = was_on_host

    def decode(self, value: Any) -> Any:
        """Return the state. Raises KeyError, TypeError or ValueError for anything that no encoder returned."""
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        kind = value.get(_TAG)
        if kind is None:
            keys = value.get(_ORDER)
            if keys is None:
                return {key: self.decode(item) for key, item in value.items()}
            if sorted(keys) != sorted(key for key in value if key != _ORDER):
                raise ValueError("the order of a dict has other keys")
            return {key: self.decode(value[key]) for key in keys}
        decode = _DECODERS.get(kind)
        if decode is None:
            raise ValueError(f"unknown kind {kind!r}")
        return decode(self, value)

    def items(self, value: dict[str, Any]) -> list[Any]:
        """Return the decoded items of a container."""
        return [self.decode(item) for item in value["items"]]

    def mapping(self, value: dict[str, Any]) -> dict[Any, Any]:
        """Return the decoded items of a dict."""
        return {self.decode(key): self.decode(item) for key, item in value["items"]}

    # --- tensors -----------------------------------------------------------------------------------------------------

    def device_for(self, value: dict[str, Any]) -> torch.device:
        """Return the device on which to create a tensor."""
        is_host = value.get("device") == "cpu" and not self._was_on_host
        return torch.device("cpu") if is_host else self._device

    def set_tensor(self, name: str, tensor: Tensor) -> None:
        """Decode references to a saved name as this tensor."""
        self._decoded[name] = tensor

    @torch.no_grad()
    def reference(self, value: dict[str, Any]) -> Tensor:
        name = value["name"]
        if name not in self._decoded:
            saved = self._tensors[name]
            if "stride" in value:
                made = torch.empty_strided(
                    saved.shape, value["stride"], dtype=saved.dtype, device=self.device_for(value)
                )
                made.copy_(saved)
            else:
                made = saved.to(self.device_for(value), copy=True)
            self._decoded[name] = _with_flags(made, value)
        return self._decoded[name]

    def referenced(self, value: dict[str, Any]) -> Tensor:
        """Return the tensor that an encoding refers to."""
        name = value["of"]
        return self._decoded[name] if name in self._decoded else self.reference({"name": name})

    @torch.no_grad()
    def view(self, value: dict[str, Any]) -> Tensor:
        name, shape, stride, offset = value["of"], value["shape"], value["stride"], value["offset"]
        dtype = DTYPES[value["dtype"]]
        if value.get("is_memory"):
            memory = f"{name} (memory)"
            if memory not in self._decoded:
                self._decoded[memory] = self._tensors[name].to(self.device_for(value), copy=True)
            base = self._decoded[memory]
        else:
            base = self._decoded[name].detach()
        storage = base.untyped_storage()
        if not value.get("is_memory") and not value.get("is_absolute"):
            if list(base.stride()) != value["base_stride"]:
                raise ValueError(f"{name} has another memory layout")
            offset += base.storage_offset()
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if offset < 0 or min([*shape, *stride], default=0) < 0 or (last + 1) * dtype.itemsize > storage.nbytes():
            raise ValueError(f"a view beyond the memory of {name}")
        if value.get("is_absolute") and storage.nbytes() != value["size"]:
            raise ValueError(f"{name} has other memory")
        made = torch.empty(0, dtype=dtype, device=base.device).set_(storage, offset, shape, stride)
        if value.get("is_absolute"):
            made.copy_(self._tensors[value["name"]])
        return self.remember(_with_flags(made, value), value)

    def remember(self, tensor: Tensor, value: dict[str, Any]) -> Tensor:
        """Store a view or an alias under its path, because the state may contain the same object again."""
        self._decoded[value["path"]] = tensor
        return tensor

    def sparse(self, value: dict[str, Any]) -> Tensor:
        parts, shape = self.decode(value["parts"]), value["shape"]
        if "layout" in value:
            layout = getattr(torch, _one_of(value["layout"], ("sparse_csr", "sparse_bsr", "sparse_csc", "sparse_bsc")))
            indices = (parts["indices"], parts["columns"], parts["values"])
            made = torch.sparse_compressed_tensor(*indices, shape, layout=layout, check_invariants=True)
        else:
            flag = value["is_coalesced"]
            made = torch.sparse_coo_tensor(
                parts["indices"], parts["values"], shape, is_coalesced=flag, check_invariants=True
            )
        return _with_flags(made, value)

    def subclass(self, value: dict[str, Any]) -> Tensor:
        found: Any = _find_class(value["class"], Tensor)
        if not hasattr(found, "__tensor_unflatten__"):
            raise ValueError(f"{value['class']} is no class of tensors here")
        shape, stride = torch.Size(value["shape"]), tuple(value["stride"])
        made = found.__tensor_unflatten__(self.decode(value["parts"]), self.decode(value["metadata"]), shape, stride)
        assert isinstance(made, Tensor)
        return made


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_class(name: str, base: type) -> Any:
    """Return a class that the program has imported itself, or None: reading a checkpoint imports nothing."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, base) else None


def _decode_named_tuple(decoder: StateDecoder, value: dict[str, Any]) -> Any:
    found = _find_class(value["class"], tuple)
    if found is None or getattr(found, "_fields", None) != tuple(value["fields"]):
        # A class inside of a function is not found. Its fields are.
        module, _, name = value["class"].partition(":")
        make: Callable[..., Any] = namedtuple
        found = make(name.rpartition(".")[2], value["fields"], module=module)
        found.__qualname__ = name
    return found._make(decoder.items(value))


def _decode_enum(decoder: StateDecoder, value: dict[str, Any]) -> Any:  # noqa: ARG001
    found = _find_class(value["class"], Enum)
    if found is None:
        raise ValueError(f"{value['class']} is no class of constants here")
    return found[value["value"]]


def _with_flags(tensor: Tensor, value: dict[str, Any]) -> Tensor:
    requires_grad = bool(value.get("requires_grad"))
    if value.get("is_parameter"):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _one_of(name: Any, names: Iterable[str]) -> str:
    if name not in names:
        raise ValueError(f"unknown name {name!r}")
    return str(name)


def _decode_tensor(decoder: StateDecoder, value: dict[str, Any]) -> Tensor:
    return torch.tensor(decoder.items(value), dtype=DTYPES[value["dtype"]]).reshape(value["shape"])


def _decode_alias(decoder: StateDecoder, value: dict[str, Any]) -> Tensor:
    return decoder.remember(_with_flags(decoder.referenced(value).detach(), value), value)


def _decode_array(decoder: StateDecoder, value: dict[str, Any]) -> np.ndarray:
    data = bytearray(decoder.decode(value["data"]).cpu().numpy().tobytes())
    return np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"], order=value["order"])


def _decode_scalar(decoder: StateDecoder, value: dict[str, Any]) -> Any:  # noqa: ARG001
    return np.frombuffer(base64.b64decode(value["data"]), dtype=np.dtype(value["dtype"]))[0]


def _decode_ordered(decoder: StateDecoder, value: dict[str, Any]) -> OrderedDict[Any, Any]:
    made = OrderedDict(decoder.mapping(value))
    if "metadata" in value:
        made._metadata = decoder.decode(value["metadata"])  # type: ignore[attr-defined]
    return made


def _decode_buffer(decoder: StateDecoder, value: dict[str, Any]) -> io.BytesIO:  # noqa: ARG001
    made = io.BytesIO(base64.b64decode(value["data"]))
    made.seek(value["position"])
    return made


def _decode_torch_generator(decoder: StateDecoder, value: dict[str, Any]) -> torch.Generator:
    made = torch.Generator("cpu" if value["device"] == "cpu" else decoder.device_for(value))
    made.set_state(decoder.decode(value["state"]).cpu())
    return made


def _decode_numpy_generator(decoder: StateDecoder, value: dict[str, Any]) -> np.random.Generator:
    state = decoder.decode(value["state"])
    bits = getattr(np.random, _one_of(state["bit_generator"], _BIT_GENERATORS))()
    bits.state = state
    return np.random.Generator(bits)


def _decode_random_state(decoder: StateDecoder, value: dict[str, Any]) -> np.random.RandomState:
    made = np.random.RandomState()
    made.set_state(decoder.decode(value["state"]))
    return made


def _decode_random(decoder: StateDecoder, value: dict[str, Any]) -> random.Random:
    made = random.Random()
    made.setstate(decoder.decode(value["state"]))
    return made


_DECODERS: dict[str, Callable[[StateDecoder, dict[str, Any]], Any]] = {
    "float": lambda _, value: float(value["value"]),
    "complex": lambda decoder, value: complex(*decoder.items(value)),
    "tuple": lambda decoder, value: tuple(decoder.items(value)),
    "enum": _decode_enum,
    "namedtuple": _decode_named_tuple,
    "set": lambda decoder, value: set(decoder.items(value)),
    "frozenset": lambda decoder, value: frozenset(decoder.items(value)),
    "deque": lambda decoder, value: deque(decoder.items(value), maxlen=value["maxlen"]),
    "range": lambda decoder, value: range(*decoder.items(value)),
    "slice": lambda decoder, value: slice(*decoder.items(value)),
    "dict": lambda decoder, value: decoder.mapping(value),
    "Counter": lambda decoder, value: Counter(decoder.mapping(value)),
    "defaultdict": lambda d, v: defaultdict(_FACTORIES[v["factory"]], d.mapping(v)),
    "OrderedDict": _decode_ordered,
    "bytes": lambda _, value: base64.b64decode(value["data"]),
    "bytearray": lambda _, value: bytearray(base64.b64decode(value["data"])),
    "BytesIO": _decode_buffer,
    "Size": lambda _, value: torch.Size(value["items"]),
    "dtype": lambda _, value: _known_dtype(value["name"]),
    "device": lambda _, value: torch.device(value["name"]),
    "numpy": _decode_scalar,
    "ndarray": _decode_array,
    "torch.Generator": _decode_torch_generator,
    "numpy.Generator": _decode_numpy_generator,
    "RandomState": _decode_random_state,
    "Random": _decode_random,
    "tensor": _decode_tensor,
    "complex128": lambda d, value: _with_flags(torch.view_as_complex(d.decode(value["data"])), value),
    "reference": StateDecoder.reference,
    "same": StateDecoder.referenced,
    "alias": _decode_alias,
    "view": StateDecoder.view,
    "sparse": StateDecoder.sparse,
    "subclass": StateDecoder.subclass,
}


def _known_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return found


# --- comparing -------------------------------------------------------------------------------------------------------


def state_changes(saved: Any, now: Any, *, path: str = "") -> list[str]:
    """Return the differences of two encoded states by name.

    Names that only one side has are not compared: another version of torch may have added them.

    >>> state_changes({"gamma": 0.5, "milestones": [2, 4]}, {"gamma": 0.1, "milestones": [2, 5]})
    ['gamma 0.5 -> 0.1', 'milestones.1 4 -> 5']
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        names = [name for name in saved if name in now and name != _ORDER]
        return [change for n in names for change in state_changes(saved[n], now[n], path=_join_tagged(path, n, saved))]
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        pairs = enumerate(zip(saved, now, strict=True))
        return [c for index, (old, new) in pairs for c in state_changes(old, new, path=join_path(path, index))]
    return [] if saved == now else [f"{path} {plain_value(saved)} -> {plain_value(now)}"]


def _join_tagged(path: str, name: str, value: dict[str, Any]) -> str:
    """Return the path of an entry, without the names that an encoding adds."""
    return path if _TAG in value and name in ("items", "value", "data") else join_path(path, name)


def plain_value(value: Any) -> Any:
    """Return an encoded value for a message."""
    if isinstance(value, dict) and _TAG in value:
        return value.get("items", value.get("value", value[_TAG]))
    return value
