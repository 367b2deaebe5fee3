"""Plain attributes of modules and optimizers: numbers, strings, containers, generators, and tensors outside buffers.

Training may change attributes such as a dropout rate, a counter or a generator. A checkpoint stores their current
values and their values at the start of the session. A resume restores the attributes that training changed. Attributes
that the user changed between sessions keep their new values and are reported.
"""

import contextlib
import hashlib
import io
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.checkpoint.encoding import as_bytes
from whet.checkpoint.shared_memory import memory_key
from whet.checkpoint.state_decoder import StateDecoder
from whet.checkpoint.state_encoder import NotEncodableError, StateEncoder, ValueEncoder
from whet.checkpoint.state_format import CHANGEABLE, join_path, missing_children, seed_of_spawner, spawn
from whet.checkpoint.state_json import plain_value

MIN_TENSOR_BYTES = 64 * 1024**2
MAX_SHARE = 0.25
"""Tensors in attributes are saved up to this fraction of the model's size, or up to `MIN_TENSOR_BYTES` if that is
more."""

MAX_ITEMS = 100_000
"""Attributes with more items, such as a large vocabulary, are not saved. If training changes one, it is reported."""

Encoded = dict[str, dict[str, Any]]
"""Maps owner and attribute names to encoded values."""

_ABSENT: dict[str, Any] = {"$": "absent"}
_OPAQUE: dict[str, Any] = {"$": "opaque"}
"""Marks an attribute that had an encoding when the session began and now has none."""


def attribute_owners(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for every module, and for every optimizer with "@" in front of its name."""
    yield from model.named_modules()
    for name, optimizer in optimizers.items():
        yield f"@{name}", optimizer


def plain_names(owner: Any) -> list[str]:
    """Return the names of the attributes that the user's class defines."""
    if isinstance(owner, nn.Module):
        return [name for name in vars(owner) if name not in module_machinery() and not _is_computed(owner, name)]
    is_torchs = type(owner).__module__.startswith("torch.optim")
    machinery = _optimizer_names() | _KERNEL_NAMES if is_torchs else _optimizer_names()
    return [name for name in vars(owner) if name not in machinery]


def _is_computed(module: nn.Module, name: str) -> bool:
    """Return whether pruning, weight_norm or spectral_norm recomputes an attribute in each forward pass."""
    parameters, buffers = module._parameters, module._buffers
    if f"{name}_orig" in parameters:
        return f"{name}_mask" in buffers or f"{name}_u" in buffers
    return f"{name}_g" in parameters and f"{name}_v" in parameters


@cache
def module_machinery() -> frozenset[str]:
    """Return the names of the attributes that torch manages in a module, and of one flag of transformers.

    The flag records that hooks are installed. Restoring it would keep a new process from installing them. torch.compile
    marks a module with an id, which another process does not have.
    """
    marks = ("_compiled_call_impl", "_torchdynamo_wrapper_id", "_output_capturing_hooks_installed")
    return frozenset({*vars(nn.Module()), *marks})


_KERNEL_NAMES = frozenset(
    {"_need_device_dtype_check_for_fused", "_numel_cache", "_params", "_step_supports_amp_scaling"}
)
"""More attributes that optimizers of torch set themselves: flags of fused kernels, and what LBFGS derives from its
parameters (torch 2.13)."""


@cache
def _optimizer_names() -> frozenset[str]:
    return frozenset({*vars(Optimizer([nn.Parameter(torch.empty(0))], {})), "_opt_called", "_step_count"})


def _named_attributes(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> Iterator[tuple[str, str, Any]]:
    """Yield (owner, name, value) of all plain attributes, sorted as they are sorted in the file.

    Attributes are encoded and decoded in this order, because an object that appears twice is encoded as a reference to
    its first occurrence.
    """
    for owner_name, owner in sorted(attribute_owners(model, optimizers), key=lambda named: named[0]):
        yield from ((owner_name, name, vars(owner)[name]) for name in sorted(plain_names(owner)))


def fingerprint_attributes(model: nn.Module, optimizers: Mapping[str, Optimizer], *, max_bytes: int) -> Encoded:
    """Return the encoded attributes, with hashes in place of tensors.

    Attributes that have no encoding or are larger than `max_bytes` are omitted.
    """
    values: dict[str, dict[str, Any]] = {}
    for owner_name, name, value in _named_attributes(model, optimizers):
        with contextlib.suppress(NotEncodableError):
            if _num_bytes(value) <= max_bytes:
                values.setdefault(owner_name, {})[name] = value
    return _fingerprints(values, model)


def _fingerprints(values: Mapping[str, Mapping[str, Any]], model: nn.Module) -> Encoded:
    encoder = _Fingerprints(model)
    prints: Encoded = {}
    with encoder.one_state():
        for owner_name, of_owner in values.items():
            for name, value in of_owner.items():
                with contextlib.suppress(NotEncodableError):
                    path = f"attribute/{describe_attribute(owner_name, name)}"
                    prints.setdefault(owner_name, {})[name] = encoder.encode(value, path)
    return prints


class _Fingerprints(ValueEncoder):
    """Encodes values with hashes in place of tensors. Tensors of the model are encoded by name."""

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
    """Return the encoded attributes, initial values of changed ones, and a message for each that is not saved."""
    now: Encoded = {}
    gaps: list[str] = []
    left = max_bytes
    with encoder.one_state():
        for owner_name, name, value in _named_attributes(model, optimizers):
            path = describe_attribute(owner_name, name)
            try:
                size = _num_bytes(value)
                encoded = encoder.encode(value, f"attribute/{path}") if size <= left else _OPAQUE
            except NotEncodableError:
                if name in initial.get(owner_name, {}):
                    now.setdefault(owner_name, {})[name] = _OPAQUE
                    gaps.append(f"the attribute {path}, now a {type(value).__name__}, is not saved")
                continue
            now.setdefault(owner_name, {})[name] = encoded
            if size > left:
                gaps.append(f"the attribute {path} is not saved: {size:,} bytes in tensors that are not buffers")
            left -= size if size <= left else 0
    before: Encoded = {}
    for owner_name, _ in attribute_owners(model, optimizers):
        prints, values = initial.get(owner_name, {}), now.get(owner_name, {})
        started = {n: prints.get(n, _ABSENT) for n in {**prints, **values} if prints.get(n, _ABSENT) != values.get(n)}
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
    """Restore the attributes that training changed.

    Attributes whose initial value the user changed between sessions are left unchanged. Return a description of each
    such change.
    """
    changes = []
    values = decode_attributes(saved, decoder)
    wanted_prints = _fingerprints(values, model)
    current = fingerprint_attributes(model, optimizers, max_bytes=max_bytes)
    merge = _Merge(model)
    for owner_name, owner in attribute_owners(model, optimizers):
        of_owner, started = values.get(owner_name, {}), saved["initial"].get(owner_name, {})
        prints, begun = current.get(owner_name, {}), initial.get(owner_name, {})
        opaque = saved["now"].get(owner_name, {}).keys() - of_owner.keys()
        for name in sorted({*of_owner, *started, *prints} - opaque):
            if name not in prints and name in vars(owner):
                continue
            wanted, is_now = wanted_prints.get(owner_name, {}).get(name, _ABSENT), prints.get(name, _ABSENT)
            then, new = started.get(name, wanted), begun.get(name, _ABSENT)
            if wanted != is_now and then != new:
                path = describe_attribute(owner_name, name)
                changes.append(f"{path} {plain_value(then)} -> {plain_value(new)}")
            elif wanted != _ABSENT:
                vars(owner)[name] = merge(vars(owner).get(name), of_owner[name], is_equal=wanted == is_now)
            elif is_now != _ABSENT:
                del vars(owner)[name]
    return changes


def decode_attributes(saved: Mapping[str, Any], decoder: StateDecoder) -> dict[str, dict[str, Any]]:
    """Decode saved attributes. Return them by owner and name."""
    return {
        owner: {name: decoder.decode(encoded) for name, encoded in sorted(of_owner.items()) if encoded != _OPAQUE}
        for owner, of_owner in sorted(saved["now"].items())
    }


def saved_attributes(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that a checkpoint can store, by the names of the submodule and the attribute."""
    saved: dict[str, dict[str, Any]] = {}
    for owner_name, owner in module.named_modules():
        for name in plain_names(owner):
            if has_encoding(vars(owner)[name]):
                saved.setdefault(owner_name, {})[name] = vars(owner)[name]
    return saved


def has_encoding(value: Any) -> bool:
    """Return whether a checkpoint can store an attribute with this value."""
    try:
        _num_bytes(value)
        StateEncoder().encode(value, "")
    except NotEncodableError:
        return False
    return True


def load_attributes(module: nn.Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the attributes of a module to values returned by `saved_attributes`."""
    merge = _Merge(module)
    for owner_name, owner in module.named_modules():
        for name, value in saved.get(owner_name, {}).items():
            vars(owner)[name] = merge(vars(owner).get(name), value)


def describe_attribute(owner: str, name: str) -> str:
    """Return the name of an attribute in the form shown to users."""
    if owner.startswith("@"):
        return join_path("optimizer", f"{owner[1:]}.{name}" if owner[1:] else name)
    return join_path(owner, name)


class _Merge:
    """Copies saved values into existing objects, because other objects may refer to them.

    Object identity is preserved: what was one object in the saved state becomes one object, and distinct objects stay
    distinct.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = _Fingerprints(model)
        self._results: dict[int, Any] = {}
        """The restored object for each saved object, by the id of the saved object."""
        self._seen: list[Any] = []
        """The saved and restored objects, kept alive so that their ids stay unique."""
        self._taken: set[int] = set()

    def __call__(self, now: Any, value: Any, *, is_equal: bool = False) -> Any:
        """Copy the content of `value` into `now` and return `now`. If that is impossible, return `value`.

        Pass `is_equal=True` if both already have the same content, so that only object identity has to be restored.
        """
        if type(value) is tuple or hasattr(value, "_fields"):
            return self._tuple(now, value, is_equal=is_equal)
        if not isinstance(value, CHANGEABLE):
            if is_equal:
                return now
            return self._tensor(now, value) if isinstance(value, Tensor) else value
        if id(value) in self._results:
            return self._results[id(value)]
        target = now if type(now) is type(value) and id(now) not in self._taken and _can_hold(now, value) else value
        self._results[id(value)] = target
        self._seen += [value, target]
        self._taken.add(id(target))
        self._fill(target, value, is_equal=is_equal)
        return target

    def _fill(self, target: Any, value: Any, *, is_equal: bool) -> None:
        """Replace the content of `target` with that of `value`, which has the same type and may be the same object."""
        if isinstance(value, list | deque):
            items = [self(*pair, is_equal=is_equal) for pair in zip_longest([*target][: len(value)], value)]
            target.clear()
            target.extend(items)
        elif isinstance(value, dict):
            entries = {key: self(target.get(key), item, is_equal=is_equal) for key, item in value.items()}
            target.clear()
            target.update(entries)
        elif target is not value and not is_equal:
            _copy_content(target, value)

    def _tuple(self, now: Any, value: Any, *, is_equal: bool) -> Any:
        before = now if type(now) is type(value) and len(now) == len(value) else (None,) * len(value)
        items = [self(*pair, is_equal=is_equal) for pair in zip(before, value, strict=True)]
        if all(item is old for item, old in zip(items, before, strict=True)) and before is now:
            return now
        return value._make(items) if hasattr(value, "_fields") else tuple(items)

    def _tensor(self, now: Any, value: Tensor) -> Tensor:
        is_own = type(now) is type(value) and not self._model.is_part(now) and not self._model.is_part(value)
        if not is_own or not _can_copy(now, value):
            return value
        with torch.no_grad():
            now.copy_(value)
        return now


def _can_hold(now: Any, value: Any) -> bool:
    """Return whether the content of a saved object can be copied into an existing one."""
    if isinstance(now, deque):
        return bool(now.maxlen == value.maxlen)
    if isinstance(now, torch.Generator):
        return now.device == value.device
    if isinstance(now, np.random.Generator):
        is_alike = type(now.bit_generator) is type(value.bit_generator)
        return is_alike and missing_children(now, seed_of_spawner(value)) is not None
    if isinstance(now, np.ndarray):
        return (now.shape, now.dtype) == (value.shape, value.dtype) and now.flags.writeable
    if isinstance(now, defaultdict):
        return now.default_factory is value.default_factory
    return True


def _copy_content(target: Any, value: Any) -> None:
    if isinstance(value, set):
        target.clear()
        target.update(value)
    elif isinstance(value, torch.Generator):
        target.set_state(value.get_state())
    elif isinstance(value, np.random.Generator):
        spawn(target, missing_children(target, seed_of_spawner(value)) or 0)
        target.bit_generator.state = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        target.set_state(value.get_state(legacy=False))
    elif isinstance(value, random.Random):
        target.setstate(value.getstate())
    elif isinstance(value, io.BytesIO):
        target.seek(0)
        target.truncate()
        target.write(value.getvalue())
        target.seek(value.tell())
    else:
        # The value is a NumPy array or a bytearray, whose content is copied as a whole.
        target[... if isinstance(value, np.ndarray) else slice(None)] = value


def _can_copy(now: Tensor, value: Tensor) -> bool:
    places = [(t.shape, t.dtype, t.device, t.layout, t.stride(), t.requires_grad) for t in (now, value)]
    return places[0] == places[1] and now.layout is torch.strided and now.is_leaf and now.is_contiguous()


def _num_bytes(value: Any) -> int:
    """Return the total size of the tensors and arrays in a value, in bytes.

    Raise NotEncodableError for too many items.
    """
    total, items, seen, rest = 0, 0, set(), [value]
    while rest:
        part = rest.pop()
        if type(part) in weakref.ProxyTypes:
            raise NotEncodableError("", part)
        if isinstance(part, Tensor | np.ndarray):
            total += part.nbytes if not isinstance(part, Tensor) or part.layout is torch.strided else 0
        elif isinstance(part, dict | list | tuple | deque | set | frozenset):
            if id(part) in seen:
                continue
            seen.add(id(part))
            items += len(part)
            if items > MAX_ITEMS:
                raise NotEncodableError("", value, why=f" of more than {MAX_ITEMS:,} items")
            rest += part.values() if isinstance(part, dict) else part
    return total
