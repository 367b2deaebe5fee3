"""Plain attributes of modules and optimizers: numbers, texts, containers, tensors that are no buffers, generators.

Training may change them: a dropout rate, a counter, a generator. A checkpoint keeps their values, and those with which
the session began. A resume sets what training has changed. What the user has changed since stays, and is reported.
"""

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.checkpoint.encoding import as_bytes
from whet.checkpoint.state_json import (
    Encoder,
    NotEncodableError,
    StateDecoder,
    StateEncoder,
    join_path,
    memory_key,
    plain_value,
)

MIN_TENSOR_BYTES = 64 * 1024**2
MAX_SHARE = 0.25
"""Tensors in attributes are saved up to this share of the model, or up to `MIN_TENSOR_BYTES`."""

MAX_ITEMS = 100_000
"""Attributes with more items, such as a large vocabulary, are not saved. They are named if training changes them."""

Encoded = dict[str, dict[str, Any]]
"""Encoded attributes by owner and name."""

_ABSENT: dict[str, Any] = {"$": "absent"}
_OPAQUE: dict[str, Any] = {"$": "opaque"}
"""An attribute that has no encoding, although it had one when the session began."""


def attribute_owners(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield the modules by their names, and the optimizers by "@" and their names."""
    yield from model.named_modules()
    for name, optimizer in optimizers.items():
        yield f"@{name}", optimizer


def _plain_names(owner: Any) -> list[str]:
    """Return the names of the attributes that belong to the user's class."""
    if isinstance(owner, nn.Module):
        return [name for name in vars(owner) if name not in module_machinery() and not _is_computed(owner, name)]
    is_torchs = type(owner).__module__.startswith("torch.optim")
    return [n for n in vars(owner) if n not in _optimizer_names() and not (is_torchs and n.startswith("_"))]


def _is_computed(module: nn.Module, name: str) -> bool:
    """Return whether pruning, weight_norm or spectral_norm computes an attribute, such as `weight`, in each forward."""
    parameters, buffers = module._parameters, module._buffers
    if f"{name}_orig" in parameters:
        return f"{name}_mask" in buffers or f"{name}_u" in buffers
    return f"{name}_g" in parameters and f"{name}_v" in parameters


@cache
def module_machinery() -> frozenset[str]:
    """Return the attributes of every nn.Module that torch itself manages, and a flag of transformers.

    The flag says that hooks exist. A new process installs them in its first forward pass, unless the flag is set.
    """
    return frozenset({*vars(nn.Module()), "_compiled_call_impl", "_output_capturing_hooks_installed"})


@cache
def _optimizer_names() -> frozenset[str]:
    return frozenset({*vars(Optimizer([nn.Parameter(torch.empty(0))], {})), "_opt_called", "_step_count"})


def fingerprint_attributes(model: nn.Module, optimizers: Mapping[str, Optimizer], *, max_bytes: int) -> Encoded:
    """Return the encoded attributes, with hashes in place of tensors."""
    encoder = _Fingerprints(model)
    prints: Encoded = {}
    for owner_name, owner in attribute_owners(model, optimizers):
        for name in _plain_names(owner):
            value = vars(owner)[name]
            try:
                if _num_bytes(value) <= max_bytes:
                    prints.setdefault(owner_name, {})[name] = encoder.encode(value, "")
            except NotEncodableError:
                continue
    return prints


class _Fingerprints(Encoder):
    """Encodes states with hashes in place of tensors, and names in place of tensors of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(self._hash)
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {memory_key(t): name for name, t in named if t.layout is torch.strided}

    def is_part(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with the model."""
        return memory_key(tensor) in self._names

    def _hash(self, tensor: Tensor, path: str) -> Any:
        if tensor.is_meta:
            raise NotEncodableError(path, tensor)
        if (owner := self._names.get(memory_key(tensor))) is not None:
            return {"$": "part", "of": owner, "shape": list(tensor.shape)}
        digest = hashlib.sha256(as_bytes(tensor.detach().contiguous().cpu())).hexdigest()
        return {"$": "hash", "dtype": str(tensor.dtype), "shape": list(tensor.shape), "value": digest[:16]}


def encode_attributes(
    encoder: StateEncoder,
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    initial: Encoded,
    *,
    max_bytes: int,
) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes and their initial values where they differ, and the names of those that are not saved."""
    now: Encoded = {}
    before: Encoded = {}
    gaps: list[str] = []
    left = max_bytes
    for owner_name, owner in attribute_owners(model, optimizers):
        prints = initial.get(owner_name, {})
        values: dict[str, Any] = {}
        for name in _plain_names(owner):
            path = describe_attribute(owner_name, name)
            value = vars(owner)[name]
            try:
                size = _num_bytes(value)
                values[name] = encoder.encode(value, f"attribute/{path}") if size <= left else _OPAQUE
            except NotEncodableError:
                if name in prints:
                    values[name] = _OPAQUE
                    gaps.append(f"the attribute {path}, now a {type(value).__name__}, is not saved")
                continue
            if size > left:
                gaps.append(f"the attribute {path} is not saved: {size:,} bytes in tensors that are no buffers")
            left -= size if size <= left else 0
        started = {n: prints.get(n, _ABSENT) for n in {**prints, **values} if prints.get(n, _ABSENT) != values.get(n)}
        if values:
            now[owner_name] = values
        if started:
            before[owner_name] = started
    return {"now": now, "initial": before}, gaps


def restore_attributes(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizers: Mapping[str, Optimizer],
    initial: Encoded,
    decoder: StateDecoder,
    *,
    max_bytes: int,
) -> list[str]:
    """Set the attributes that training has changed. Return those that the user has changed since, by name."""
    changes = []
    encoder = _Fingerprints(model)
    current = fingerprint_attributes(model, optimizers, max_bytes=max_bytes)
    for owner_name, owner in attribute_owners(model, optimizers):
        values, started = saved["now"].get(owner_name, {}), saved["initial"].get(owner_name, {})
        prints, begun = current.get(owner_name, {}), initial.get(owner_name, {})
        for name in {**values, **started, **prints}:
            wanted, is_now = values.get(name, _ABSENT), prints.get(name, _ABSENT)
            if wanted in (_OPAQUE, is_now) or (name not in prints and name in vars(owner)):
                continue
            value = None if wanted == _ABSENT else decoder.decode(wanted)
            wanted_print = wanted if wanted == _ABSENT else encoder.encode(value, "")
            if wanted_print == is_now:
                continue
            then, new = started.get(name, wanted_print), begun.get(name, _ABSENT)
            if then != new:
                path = describe_attribute(owner_name, name)
                changes.append(f"{path} {plain_value(then)} -> {plain_value(new)}")
            elif wanted == _ABSENT:
                del vars(owner)[name]
            else:
                vars(owner)[name] = _updated(vars(owner).get(name), value, encoder)
    return changes


def saved_attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes of a module and its submodules that have an encoding, by submodule and name."""
    saved: dict[str, dict[str, Any]] = {}
    for owner_name, owner in module.named_modules():
        for name in _plain_names(owner):
            if has_encoding(vars(owner)[name]):
                saved.setdefault(owner_name, {})[name] = vars(owner)[name]
    return saved


def has_encoding(value: Any) -> bool:
    """Return whether checkpoints hold an attribute of this value."""
    try:
        _num_bytes(value)
        StateEncoder().encode(value, "")
    except NotEncodableError:
        return False
    return True


def load_attributes(module: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the attributes that `saved_attributes` returned."""
    parts = _Fingerprints(module)
    for owner_name, owner in module.named_modules():
        for name, value in saved.get(owner_name, {}).items():
            vars(owner)[name] = _updated(vars(owner).get(name), value, parts)


def describe_attribute(owner: str, name: str) -> str:
    """Return the name of an attribute as a user knows it."""
    if owner.startswith("@"):
        return join_path("optimizer", f"{owner[1:]}.{name}" if owner[1:] else name)
    return join_path(owner, name)


def _updated(now: Any, value: Any, model: _Fingerprints) -> Any:
    """Return `now` with the content of `value` if possible, since other objects may hold it too; else `value`."""
    if type(now) is not type(value):
        return value
    if isinstance(now, list):
        now[:] = [_updated(*pair, model) for pair in zip(now, value, strict=False)] + value[len(now) :]
        return now
    if isinstance(now, dict):
        items = {key: _updated(now[key], item, model) if key in now else item for key, item in value.items()}
        now.clear()
        now.update(items)
        return now
    if isinstance(now, tuple) and type(now) is tuple and len(now) == len(value):
        return tuple(_updated(*pair, model) for pair in zip(now, value, strict=True))
    if isinstance(now, deque) and now.maxlen == value.maxlen:
        now.clear()
        now.extend(value)
        return now
    if isinstance(now, set):
        now.clear()
        now.update(value)
        return now
    if isinstance(now, torch.Generator) and now.device == value.device:
        now.set_state(value.get_state())
        return now
    if isinstance(now, np.random.Generator) and type(now.bit_generator) is type(value.bit_generator):
        now.bit_generator.state = value.bit_generator.state
        return now
    if isinstance(now, np.random.RandomState):
        now.set_state(value.get_state(legacy=False))
        return now
    if isinstance(now, random.Random):
        now.setstate(value.getstate())
        return now
    if isinstance(now, np.ndarray) and (now.shape, now.dtype) == (value.shape, value.dtype) and now.flags.writeable:
        now[...] = value
        return now
    if isinstance(now, Tensor) and _can_copy(now, value) and not model.is_part(now) and not model.is_part(value):
        with torch.no_grad():
            now.copy_(value)
        return now
    return value


def _can_copy(now: Tensor, value: Tensor) -> bool:
    places = [(t.shape, t.dtype, t.device, t.layout, t.stride(), t.requires_grad) for t in (now, value)]
    return places[0] == places[1] and now.layout is torch.strided and now.is_leaf and now.is_contiguous()


def _num_bytes(value: Any) -> int:
    """Return the bytes of the tensors and arrays in a value.

    Raise NotEncodableError for too many items, and for a container at two places: it would be restored as two.
    """
    total, items, seen, rest = 0, 0, set(), [value]
    while rest:
        part = rest.pop()
        if isinstance(part, Tensor | np.ndarray):
            total += part.nbytes if not isinstance(part, Tensor) or part.layout is torch.strided else 0
        elif isinstance(part, dict | list | tuple | deque | set | frozenset):
            if id(part) in seen and not isinstance(part, tuple | frozenset):
                raise NotEncodableError("", value, why=" with one container at two places")
            seen.add(id(part))
            items += len(part)
            if items > MAX_ITEMS:
                raise NotEncodableError("", value, why=f" of more than {MAX_ITEMS:,} items")
            rest += part.values() if isinstance(part, dict) else part
    return total
