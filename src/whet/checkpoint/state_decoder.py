"""Decode a state from JSON and named tensors."""

import base64
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from whet.checkpoint.encoding import DTYPES
from whet.checkpoint.state_format import BIT_GENERATORS, FACTORIES, ID, ORDER, TAG, find_class

_MAX_SEED_POOL = 4_096


class StateDecoder:
    """Decodes states that were encoded by `StateEncoder`.

    `tensors` are the saved tensors by name. `live` are the tensors of the model, to which states may refer. Tensors
    from the run's device are created on `device`; tensors from the host stay on the host.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        live: Mapping[str, Tensor] | None = None,
        device: torch.device | None = None,
        was_on_host: bool = True,
    ) -> None:
        """Initialize the decoder.

        Pass `was_on_host=True` if the run's device was the CPU: all tensors then move to `device`.
        """
        self._tensors = tensors
        self._decoded: dict[str, Tensor] = dict(live or {})
        self._objects: dict[str, Any] = {}
        """Objects that appear more than once, by their ids in the JSON."""
        self._device = device or torch.device("cpu")
        self._was_on_host = was_on_host

    def decode(self, value: Any) -> Any:
        """Return the decoded state. Raise KeyError, TypeError or ValueError for a value that no encoder returns."""
        if isinstance(value, list):
            return self._list(value)
        if not isinstance(value, dict):
            return value
        made = self._dict(value)
        if ID in value:
            self._objects[value[ID]] = made
        return made

    def _list(self, value: list[Any]) -> list[Any]:
        first = value[0] if value else None
        if not isinstance(first, dict) or first.get(TAG) != "id":
            return [self.decode(item) for item in value]
        made = self._objects[first["value"]] = [self.decode(item) for item in value[1:]]
        return made

    def _dict(self, value: dict[str, Any]) -> Any:
        kind = value.get(TAG)
        if kind is None:
            keys = value.get(ORDER)
            if keys is None:
                return {key: self.decode(item) for key, item in value.items() if key != ID}
            if sorted(keys) != sorted(key for key in value if key not in (ORDER, ID)):
                raise ValueError("the order of a dict has other keys")
            return {key: self.decode(value[key]) for key in keys}
        decode = _DECODERS.get(kind)
        if decode is None:
            raise ValueError(f"unknown kind {kind!r}")
        return decode(self, value)

    def again(self, value: dict[str, Any]) -> Any:
        """Return the object to which a repeated reference points."""
        return self._objects[value["of"]]

    def items(self, value: dict[str, Any]) -> list[Any]:
        """Return the decoded items of a container."""
        return [self.decode(item) for item in value["items"]]

    def mapping(self, value: dict[str, Any]) -> dict[Any, Any]:
        """Return a decoded dict."""
        return {self.decode(key): self.decode(item) for key, item in value["items"]}

    # --- tensors -----------------------------------------------------------------------------------------------------

    def device_for(self, value: dict[str, Any]) -> torch.device:
        """Return the device on which to create an encoded tensor."""
        is_host = value.get("device") == "cpu" and not self._was_on_host
        return torch.device("cpu") if is_host else self._device

    def set_tensor(self, name: str, tensor: Tensor) -> None:
        """Use this tensor for all references to a saved tensor name."""
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
        """Return the tensor that an encoding refers to by name: one of the model, or a saved one."""
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
        """Store a decoded view or alias under its path, because later entries may refer to the same object."""
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
        resolved: Any = find_class(value["class"], Tensor)
        if not hasattr(resolved, "__tensor_unflatten__"):
            raise ValueError(f"{value['class']} is no class of tensors here")
        shape, stride = torch.Size(value["shape"]), tuple(value["stride"])
        made = resolved.__tensor_unflatten__(self.decode(value["parts"]), self.decode(value["metadata"]), shape, stride)
        assert isinstance(made, Tensor)
        return made


def _decode_named_tuple(decoder: StateDecoder, value: dict[str, Any]) -> Any:
    resolved = find_class(value["class"], tuple)
    if resolved is None or getattr(resolved, "_fields", None) != tuple(value["fields"]):
        # A class defined inside a function cannot be found, but its fields can be restored.
        module, _, name = value["class"].partition(":")
        make: Callable[..., Any] = namedtuple
        resolved = make(name.rpartition(".")[2], value["fields"], module=module)
        resolved.__qualname__ = name
    return resolved._make(decoder.items(value))


def _decode_enum(decoder: StateDecoder, value: dict[str, Any]) -> Any:  # noqa: ARG001
    resolved = find_class(value["class"], Enum)
    if resolved is None:
        raise ValueError(f"{value['class']} is no class of constants here")
    return resolved[value["value"]]


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
    kind = getattr(np.random, _one_of(state["bit_generator"], BIT_GENERATORS))
    bits = kind(_decode_seed(decoder.decode(value["seed"]))) if "seed" in value else kind()
    bits.state = state
    return np.random.Generator(bits)


def _decode_seed(state: dict[str, Any]) -> np.random.SeedSequence:
    # Mixing takes time quadratic in the pool size. NumPy's own pools have 4 words.
    if state["pool_size"] > _MAX_SEED_POOL:
        raise ValueError(f"a seed with a pool of {state['pool_size']} words")
    return np.random.SeedSequence(**state)


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
    "defaultdict": lambda d, v: defaultdict(FACTORIES[v["factory"]], d.mapping(v)),
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
    "again": StateDecoder.again,
    "same": StateDecoder.referenced,
    "alias": _decode_alias,
    "view": StateDecoder.view,
    "sparse": StateDecoder.sparse,
    "subclass": StateDecoder.subclass,
}


def _known_dtype(name: str) -> torch.dtype:
    resolved = getattr(torch, name, None)
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return resolved
