"""Bytes that tell values apart: scalars, tensors, arrays and generators. No whole tensor is copied from the device."""

import datetime as dt
import random
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
"""Elements of a tensor whose bytes are hashed, evenly spread. Larger tensors have checksums of all elements too."""
_WORDS_PER_ROW = 1_024

SCALARS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, Enum, np.generic, Fraction, Decimal,
    dt.date, dt.time, dt.timedelta, PurePath, uuid.UUID,
)  # fmt: skip
"""Values whose text tells them apart."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def scalar_bytes(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    # Objects without a stable representation are equal: their repr is an address.
    text = repr(value) if isinstance(value, SCALARS) else type(value).__qualname__
    return f"{type(value).__name__} {text}".encode(errors="replace")


def tensor_bytes(tensor: Tensor, *, is_sample: bool) -> bytes:
    about = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.requires_grad}".encode()
    try:
        # The rows of this rank: reading a sharded tensor would wait for the other ranks, which may not look.
        flat = local_tensor(tensor.detach())
        if flat.layout is torch.strided and flat.numel() and not flat.untyped_storage().nbytes():
            # FSDP frees the memory of gathered parameters between steps. Reading it would end the process.
            return about
        if flat.layout is not torch.strided:
            flat = flat.coalesce().values() if flat.layout is torch.sparse_coo else flat.values()
        if flat.numel() > _MAX_ELEMENTS:
            about += b"" if is_sample else _checksums(flat)
            if not flat.is_contiguous():
                flat = flat.flatten(0, -2)[:: max(1, flat.numel() // flat.shape[-1] // 64)]
            flat = flat.reshape(-1)[:: max(1, flat.numel() // _MAX_ELEMENTS)]
        # A copy: a storage that is exported to NumPy can no longer be resized.
        flat = flat.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1)
        return about + flat.view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError):
        # A meta or fake tensor has no values.
        return about


def _checksums(tensor: Tensor) -> bytes:
    """Return sums of all elements as integers: those of the rows and those of the columns of their words.

    They take the time of reading the memory, which is a fraction of that of a hash.
    """
    data = tensor.contiguous().reshape(-1)
    if data.storage_offset():
        # Memory can be read as words from a multiple of eight bytes only.
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
        # A copy, because torch cannot read an array that is not writeable.
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
        return _with_lists(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _with_lists(generator.get_state(legacy=False))
    return generator.getstate()


def _with_lists(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {key: _with_lists(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state
