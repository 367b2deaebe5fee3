"""Encode the state of an object as JSON, including values that JSON lacks. Nothing is pickled.

value                           JSON
None, bool, int, str, list      unchanged
a finite float                  unchanged: the shortest text that reads back as the same bits
nan, inf, -inf                  {"$": "float", "value": "inf"}
a tuple                         {"$": "tuple", "items": [...]}
a dict with text keys           unchanged
any other dict, a Counter       {"$": "dict" or "Counter", "items": [[key, value], ...]}
a real tensor of up to 64       {"$": "tensor", "dtype": "F32", "shape": [...], "items": [...]}
any tensor, if kept elsewhere   {"$": "reference", "name": "..."}
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from whet.checkpoint.encoding import DTYPES, dtype_name

_TAG = "$"
_MAX_TENSOR_ITEMS = 64


class NotEncodableError(TypeError):
    """A value that JSON cannot represent. `path` names the place in the state."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(f"{path} is a {type(value).__name__}")


def encode_state(value: Any, *, path: str = "", tensors: dict[str, Tensor] | None = None) -> Any:
    """Return a state as JSON. Raises NotEncodableError, which names the first value that has no encoding.

    With `tensors`, tensors are added to it by their path, and the JSON refers to them.

    >>> encode_state({"best": float("inf"), "last": 3})
    {'best': {'$': 'float', 'value': 'inf'}, 'last': 3}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # float() also converts NumPy's float64, which is a subclass.
        number = float(value)
        return number if math.isfinite(number) else {_TAG: "float", "value": repr(number)}
    if isinstance(value, list):
        return [encode_state(item, path=_join(path, index), tensors=tensors) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {_TAG: "tuple", "items": encode_state(list(value), path=path, tensors=tensors)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value
        return {_TAG: "reference", "name": path}
    if isinstance(value, Tensor) and value.numel() <= _MAX_TENSOR_ITEMS and not value.is_complex():
        flat = value.detach().cpu().reshape(-1).tolist()
        items = encode_state(flat, path=path)
        return {_TAG: "tensor", "dtype": dtype_name(value.dtype), "shape": list(value.shape), "items": items}
    raise NotEncodableError(path, value)


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor] | None) -> Any:
    kind = "Counter" if isinstance(value, Counter) else "dict"
    if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
        return {key: encode_state(item, path=_join(path, key), tensors=tensors) for key, item in value.items()}
    items = [
        [encode_state(key, path=path), encode_state(item, path=_join(path, key), tensors=tensors)]
        for key, item in value.items()
    ]
    return {_TAG: kind, "items": items}


def decode_state(value: Any, *, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the state that `encode_state` encoded. Raises KeyError, TypeError or ValueError for anything else."""
    if isinstance(value, list):
        return [decode_state(item, tensors=tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: decode_state(item, tensors=tensors) for key, item in value.items()}
    if kind == "float":
        return float(value["value"])
    if kind == "reference":
        return (tensors or {})[value["name"]]
    items = decode_state(value["items"], tensors=tensors)
    if kind == "tuple":
        return tuple(items)
    if kind == "tensor":
        return torch.tensor(items, dtype=DTYPES[value["dtype"]]).reshape(value["shape"])
    if kind in ("dict", "Counter"):
        pairs = dict(items)
        return Counter(pairs) if kind == "Counter" else pairs
    raise ValueError(f"unknown kind {kind!r}")


def state_changes(saved: Any, now: Any, *, path: str = "") -> list[str]:
    """Return the differences of two encoded states by name.

    Names that only one side has are not compared: another version of torch may have added them.

    >>> state_changes({"gamma": 0.5, "milestones": [2, 4]}, {"gamma": 0.1, "milestones": [2, 5]})
    ['gamma 0.5 -> 0.1', 'milestones.1 4 -> 5']
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        names = [name for name in saved if name in now]
        return [change for n in names for change in state_changes(saved[n], now[n], path=_join(path, n))]
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        pairs = enumerate(zip(saved, now, strict=True))
        return [c for index, (old, new) in pairs for c in state_changes(old, new, path=_join(path, index))]
    return [] if saved == now else [f"{path} {_plain(saved)} -> {_plain(now)}"]


def _plain(value: Any) -> Any:
    return value.get("items", value.get("value")) if isinstance(value, dict) and _TAG in value else value


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
