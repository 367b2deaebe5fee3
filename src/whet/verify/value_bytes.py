"""Bytes for comparing scalars, tensors, arrays and generators. Large tensors are not copied whole from the device."""

import datetime as dt
import random
import re
import uuid
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.distributed.strategies import local_tensor

_MAX_ELEMENTS = 65_536
"""Approximate maximum of elements that are compared directly.

A larger tensor is sampled at even intervals, and checksums cover all of its elements.
"""
_WORDS_PER_ROW = 1_024

SCALARS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, Enum, np.generic, Fraction, Decimal,
    dt.date, dt.time, dt.timedelta, PurePath, uuid.UUID, re.Pattern, torch.dtype, torch.device, np.dtype,
)  # fmt: skip
"""Types whose values are compared by their repr."""
GENERATORS = (
    torch.Generator, np.random.Generator, np.random.RandomState, random.Random,
    np.random.BitGenerator, np.random.SeedSequence,
)  # fmt: skip


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Return whether all bits of two tensors are the same. A NaN equals itself, and 0.0 differs from -0.0."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))


def scalar_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    # The repr of other objects may contain an address, so all objects of one type count as equal.
    text = repr(value) if isinstance(value, SCALARS) else type(value).__qualname__
    return f"{type(value).__name__} {text}".encode(errors="replace")


def tensor_bytes(tensor: Tensor, *, is_sample: bool) -> bytes:
    about = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode()
    try:
        # Read only this rank's rows: gathering a sharded tensor would wait for ranks that may not take part.
        flat = local_tensor(tensor.detach())
        if flat.layout is torch.strided and flat.numel() and not flat.untyped_storage().nbytes():
            # FSDP frees the memory of gathered parameters between steps. Reading it would crash the process.
            return about
        if flat.layout is not torch.strided:
            flat = flat.coalesce().values() if flat.layout is torch.sparse_coo else flat.values()
        if flat.numel() > _MAX_ELEMENTS:
            about += b"" if is_sample else _checksums(flat)
            if not flat.is_contiguous():
                flat = flat.flatten(0, -2)[:: max(1, flat.numel() // flat.shape[-1] // 64)]
            flat = flat.reshape(-1)[:: max(1, flat.numel() // _MAX_ELEMENTS)]
        # Copy, because a storage that is exported to NumPy can no longer be resized.
        flat = flat.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1)
        return about + flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError):
        # A meta or fake tensor has no values.
        return about


def _checksums(tensor: Tensor) -> bytes:
    """Return the row and column sums of a tensor's memory, read as a table of 64-bit words.

    This is limited by memory bandwidth, and takes a fraction of the time of a hash.
    """
    data = tensor.contiguous().reshape(-1)
    if data.storage_offset():
        # Memory can be viewed as 64-bit words only at an offset that is a multiple of eight bytes.
        data = data.clone()
    data = data.view(torch.uint8)
    size = len(data) // (8 * _WORDS_PER_ROW) * 8 * _WORDS_PER_ROW
    rows = data[:size].view(torch.int64).reshape(-1, _WORDS_PER_ROW)
    sums = torch.cat([rows.sum(0), rows.sum(1)]).cpu()
    return sums.numpy().tobytes() + data[size:].to("cpu", copy=True).numpy().tobytes()


def array_bytes(array: "np.ndarray[Any, Any]", *, is_sample: bool) -> bytes:
    about = f"{array.dtype} {array.shape}".encode()
    if array.dtype.hasobject:
        return about
    if array.size > _MAX_ELEMENTS and not is_sample:
        # Copy, because torch warns about arrays that are not writable.
        about += _checksums(torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8))
    step = max(1, array.size // _MAX_ELEMENTS)
    sample = array.reshape(-1)[::step] if array.flags.c_contiguous else array[(slice(None, None, step), ...)]
    return about + np.ascontiguousarray(sample).tobytes()


def generator_bytes(generator: Any) -> bytes:
    return repr(_generator_state(generator)).encode()


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, np.random.Generator):
        return _generator_state(generator.bit_generator)
    if isinstance(generator, np.random.BitGenerator):
        # `spawn` counts its children in the seed sequence and does not change the state of the generator.
        children = getattr(generator.seed_seq, "n_children_spawned", 0)
        return _with_lists(generator.state), children
    if isinstance(generator, np.random.SeedSequence):
        return _with_lists(generator.state)
    if isinstance(generator, np.random.RandomState):
        return _with_lists(generator.get_state(legacy=False))
    return generator.getstate()


def _with_lists(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _with_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
