"""States as plain JSON that includes small tensors, and the differences between two of them."""

from typing import Any

from torch import Tensor

from whet.checkpoint.encoding import dtype_name
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import NotEncodableError, ValueEncoder
from whet.checkpoint.state_format import ID, ORDER, TAG, join_path

_MAX_TENSOR_ITEMS = 64


def encode_state(value: Any, *, path: str = "") -> Any:
    """Return a state as JSON that includes small tensors. Raise NotEncodableError for a value without an encoding.

    >>> encode_state({"best": float("inf"), "last": 3})
    {'best': {'$': 'float', 'value': 'inf'}, 'last': 3}
    """
    return ValueEncoder(_encode_small_tensor).encode(value, path)


def decode_state(value: Any) -> Any:
    """Return the state encoded by `encode_state`. Raise KeyError, TypeError or ValueError for anything else."""
    return StateDecoder({}).decode(value)


def _encode_small_tensor(value: Tensor, path: str) -> Any:
    if value.numel() > _MAX_TENSOR_ITEMS:
        raise NotEncodableError(path, value, why=f" of {value.numel():,} elements, more than {_MAX_TENSOR_ITEMS}")
    flat = value.detach().cpu().reshape(-1).tolist()
    shape, dtype = list(value.shape), dtype_name(value.dtype)
    return {TAG: "tensor", "dtype": dtype, "shape": shape, "items": encode_state(flat, path=path)}


# --- comparing -------------------------------------------------------------------------------------------------------


def state_changes(saved: Any, now: Any, *, path: str = "") -> list[str]:
    """Return the differences between two encoded states, one string each.

    Names that appear in only one of them are ignored, because another version of torch may have added them.

    >>> state_changes({"gamma": 0.5, "milestones": [2, 4]}, {"gamma": 0.1, "milestones": [2, 5]})
    ['gamma 0.5 -> 0.1', 'milestones.1 4 -> 5']
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        names = [name for name in saved if name in now and name not in (ORDER, ID)]
        return [change for n in names for change in state_changes(saved[n], now[n], path=_join_tagged(path, n, saved))]
    if isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        pairs = enumerate(zip(saved, now, strict=True))
        return [c for index, (old, new) in pairs for c in state_changes(old, new, path=join_path(path, index))]
    return [] if saved == now else [f"{path} {plain_value(saved)} -> {plain_value(now)}"]


def _join_tagged(path: str, name: str, value: dict[str, Any]) -> str:
    """Return the path of an entry, without names that belong to the encoding."""
    return path if TAG in value and name in ("items", "value", "data") else join_path(path, name)


def plain_value(value: Any) -> Any:
    """Return an encoded value in the form shown in messages."""
    if isinstance(value, dict) and TAG in value:
        return value.get("items", value.get("value", value[TAG]))
    return value
