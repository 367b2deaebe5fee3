"""Batches of any structure: nested dicts, tuples and lists with tensors, strings and other objects.

`flatten` separates the tensors of a batch from its structure, so that they can be moved and copied by name.
`select_rows` selects samples of a collated batch if that is unambiguous.
"""

import copy
import dataclasses
import itertools
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from whet.data.batch import Packed, Padded

Rows = slice | np.ndarray
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
"""Types of values that belong to the batch as a whole and are kept in every part of it."""
_TENSORS = (Tensor, Padded, Packed)


def rebuild(value: Any, function: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return a copy of a nested structure with `function(name, tensor)` in place of every tensor.

    >>> rebuild({"x": torch.zeros(2), "name": ["a", "b"]}, lambda name, tensor: name)
    {'x': 'x', 'name': ['a', 'b']}
    """
    if isinstance(value, _TENSORS):
        return function(name or "x", value)
    if isinstance(value, PackedSequence):
        return _rebuild_packed_sequence(value, function, name)
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        items = {key: rebuild(item, function, f"{prefix}{key}") for key, item in value.items()}
        return _with_items(value, items)
    if isinstance(value, tuple | list):
        parts = [rebuild(part, function, f"{prefix}{index}") for index, part in enumerate(value)]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            part = rebuild(getattr(value, field.name), function, f"{prefix}{field.name}")
            # A frozen dataclass rejects assignment, but nothing else refers to this copy yet.
            object.__setattr__(made, field.name, part)
        return made
    return value


def _with_items(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not isinstance(value, MutableMapping):
        return items
    # A copy keeps the type and its attributes: DictBatch, OrderedDict, BatchEncoding of transformers.
    made = copy.copy(value)
    if isinstance(made, dict):
        dict.update(made, items)
    else:
        # A shallow copy of a UserDict shares its dict.
        if isinstance(made, UserDict):
            made.data = dict(made.data)
        made.update(items)
    return made


def _rebuild_packed_sequence(value: PackedSequence, function: Callable[[str, Any], Any], name: str) -> PackedSequence:
    data = function(f"{name or 'x'}.data", value.data)
    # batch_sizes stays on the CPU, where cuDNN reads it.
    indices = [
        None if index is None else function(f"{name or 'x'}.{what}", index)
        for what, index in (("sorted", value.sorted_indices), ("unsorted", value.unsorted_indices))
    ]
    return PackedSequence(data, value.batch_sizes, *indices)


def flatten(value: Any) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """Return the tensors of a batch by name, and a function that rebuilds the batch from them.

    >>> tensors, make = flatten((torch.zeros(2), {"boxes": torch.ones(2), "name": "a"}))
    >>> list(tensors), make({"0": 1, "1.boxes": 2})
    (['0', '1.boxes'], (1, {'boxes': 2, 'name': 'a'}))
    """
    tensors: dict[str, Any] = {}

    def note(name: str, tensor: Any) -> Any:
        # {"a.b": x, "a": {"b": y}} and {0: x, "0": y} would give two tensors the same name.
        others = (f"{name}#{number}" for number in itertools.count(2))
        name = next(candidate for candidate in itertools.chain([name], others) if candidate not in tensors)
        tensors[name] = tensor
        return tensor

    shape = rebuild(value, note)
    names = tuple(tensors)

    def make(fields: Mapping[str, Any]) -> Any:
        # The tensors come in the order of the first traversal, as the names do.
        remaining = iter(names)
        return rebuild(shape, lambda _name, _tensor: fields[next(remaining)])

    return tensors, make


def batch_length(value: Any) -> int:
    """Return the number of samples of a collated batch: the length of its first tensor, or 1 if it has none."""
    tensors, _ = flatten(value)
    return next((len(tensor) for tensor in tensors.values() if isinstance(tensor, Tensor) and tensor.dim()), 1)


# --- rows of a collated batch ----------------------------------------------------------------------------------------


def row_obstacle(value: Any, num_samples: int, name: str = "") -> str | None:
    """Return why a collated batch cannot be divided into samples along dimension 0, or None if it can be.

    Every tensor and list must be as long as the batch. Strings and numbers are kept in every part.

    >>> row_obstacle((torch.zeros(4, 2), ["a", "b", "c", "d"]), 4)
    >>> row_obstacle((torch.zeros(7, 4), torch.zeros(4)), 4)
    '0 has shape (7, 4)'
    """
    kind, obstacle = _how_to_divide(value, num_samples, name)
    if obstacle is None and kind != "rows":
        return "it contains no tensor"
    return obstacle


def _how_to_divide(value: Any, num_samples: int, name: str) -> tuple[str, str | None]:
    """Return ("rows" or "shared", None), or ("", obstacle) if the value cannot be divided."""
    what = name or "the batch"
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] == num_samples:
            return "rows", None
        return "", f"{what} has shape {tuple(value.shape)}"
    if isinstance(value, _PLAIN):
        return "shared", None
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return _divide_parts({f"{prefix}{key}": item for key, item in value.items()}, num_samples)
    if isinstance(value, tuple | list) and hasattr(value, "_fields"):
        return _divide_parts({f"{prefix}{index}": part for index, part in enumerate(value)}, num_samples)
    if isinstance(value, tuple | list):
        kind, obstacle = _divide_parts({f"{prefix}{index}": part for index, part in enumerate(value)}, num_samples)
        is_list_of_samples = len(value) == num_samples and _is_uniform(value)
        if kind == "rows" and len(value) == num_samples:
            # A list of 3 images with 3 channels could have one entry per sample, or be 3 tensors with one row per
            # sample.
            return "", f"{what} may be a list of {num_samples} samples or of {num_samples} fields"
        if kind == "rows" or is_list_of_samples:
            return "rows", None
        return "", obstacle or f"{what} is a {type(value).__name__} of {len(value)}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f"{prefix}{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
        return _divide_parts(parts, num_samples)
    return "", f"{what} is a {type(value).__name__}"


def _is_uniform(parts: tuple[Any, ...] | list[Any]) -> bool:
    """Return whether these items may be samples: all have one type, with the same fields or the same kind of tensor."""

    def kind(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.dtype, part.dim()
        if isinstance(part, Mapping):
            return tuple(part)
        return len(part) if isinstance(part, tuple) else None

    if all(isinstance(part, _PLAIN) for part in parts):
        return True
    return len({type(part) for part in parts}) <= 1 and len({kind(part) for part in parts}) <= 1


def _divide_parts(parts: Mapping[str, Any], num_samples: int) -> tuple[str, str | None]:
    kinds = {"shared"}
    for name, part in parts.items():
        kind, obstacle = _how_to_divide(part, num_samples, name)
        if obstacle is not None:
            return "", obstacle
        kinds.add(kind)
    return ("rows" if "rows" in kinds else "shared"), None


def select_rows(value: Any, rows: Rows, num_samples: int) -> Any:
    """Return the selected samples of a collated batch. `row_obstacle` must have returned None for it."""
    if isinstance(value, Tensor):
        return value[rows] if isinstance(rows, slice) else value[torch.from_numpy(rows)]
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return _with_items(value, {key: select_rows(item, rows, num_samples) for key, item in value.items()})
    if isinstance(value, tuple | list):
        if not hasattr(value, "_fields") and len(value) == num_samples:
            indices = range(num_samples)[rows] if isinstance(rows, slice) else rows
            return type(value)(value[int(index)] for index in indices)
        parts = [select_rows(part, rows, num_samples) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    made = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(made, field.name, select_rows(getattr(value, field.name), rows, num_samples))
    return made
