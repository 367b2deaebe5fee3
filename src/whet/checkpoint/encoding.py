"""Encode and decode checkpoint files: safetensors and canonical JSON."""

import ctypes
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from whet.base.errors import WhetError

# --- JSON ------------------------------------------------------------------------------------------------------------
# Each value has exactly one encoding, so that equal values have equal hashes. Reading enforces limits, because a file
# may come from an untrusted source.

MAX_JSON_BYTES = 64 * 1024**2
# The facts of a checkpoint also hold the user's lists of numbers, such as a replay buffer.
MAX_FACTS_BYTES = 256 * 1024**2
# Limit the nesting, because a malicious file could exceed Python's recursion limit.
MAX_JSON_DEPTH = 96


def dump_json(value: Any) -> bytes:
    """Return a value as canonical JSON.

    Raise ValueError for NaN and Inf, and TypeError for a type that JSON does not have.
    """
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def load_json(data: bytes | bytearray, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Decode a JSON object written by `dump_json`. Raise ValueError for JSON with any other formatting."""
    value = load_foreign_json(data, max_bytes=max_bytes)
    # Encode the value again: any difference means that another program wrote the file.
    if dump_json(value) != data:
        raise ValueError("not canonical JSON")
    return value


def load_foreign_json(data: bytes | bytearray, *, max_bytes: int | None = None) -> dict[str, Any]:
    """Decode a JSON object, preserving the order of keys. Raise ValueError for invalid JSON and above the limits."""
    limit = MAX_JSON_BYTES if max_bytes is None else max_bytes
    if len(data) > limit:
        raise ValueError(f"{len(data):,} bytes of JSON; at most {limit:,}")
    try:
        value = json.loads(data, parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _check_depth(value, left=MAX_JSON_DEPTH)
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Duplicate keys are ambiguous: some readers use the first value, others the last.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key appears twice")
    return unique


def _check_depth(value: Any, *, left: int) -> None:
    if left == 0:
        raise ValueError("nested too deeply")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        if isinstance(item, dict | list):
            _check_depth(item, left=left - 1)


# --- safetensors -----------------------------------------------------------------------------------------------------
# A file consists of the length of the header in eight bytes, the JSON header, and the elements of all tensors.

MAX_HEADER_BYTES = 16 * 1024**2
MAX_TENSORS = 100_000
MAX_TENSOR_DIMENSIONS = 32

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Type, shape and byte range of one tensor. Offsets are relative to the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The slots of all tensors in a file, in byte order."""

    slots: dict[str, TensorSlot]

    @property
    def num_bytes(self) -> int:
        """Total size of all tensors in bytes, without the header."""
        return max((slot.end for slot in self.slots.values()), default=0)

    def header_bytes(self) -> int:
        """Return the size of the JSON header in bytes."""
        return len(self._header_text())

    def _header_text(self) -> bytes:
        entries = {
            name: {"dtype": dtype_name(p.dtype), "shape": p.shape, "data_offsets": (p.start, p.end)}
            for name, p in self.slots.items()
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        # Padding aligns the first tensor to 8 bytes. Later tensors are aligned because wide dtypes come first.
        return text + b" " * (-len(text) % 8)

    def header(self) -> bytes:
        """Return the start of the file: the size of the JSON header, and the header padded to a multiple of 8 bytes."""
        text = self._header_text()
        if len(text) > MAX_HEADER_BYTES or len(self.slots) > MAX_TENSORS:
            got = f"{len(self.slots):,} tensors, {len(text):,} bytes of names"
            raise WhetError("too many tensors for a checkpoint", got=got, try_=f"at most {MAX_TENSORS:,}")
        return len(text).to_bytes(8, "little") + text


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype. Raise WhetError if it has none."""
    if dtype not in _DTYPE_NAMES:
        raise WhetError("tensors of this dtype cannot be saved", got=dtype, try_="one of " + ", ".join(DTYPES))
    return _DTYPE_NAMES[dtype]


def layout_tensors(tensors: Mapping[str, Tensor]) -> FileLayout:
    """Return the file layout of tensors, sorted by decreasing element size, which aligns all of them, then by name."""
    return layout_slots({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})


def layout_slots(kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> FileLayout:
    """Return the file layout of tensors, given their dtypes and shapes."""
    slots: dict[str, TensorSlot] = {}
    end = 0
    for name in sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name)):
        dtype, shape = kinds[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        slots[name] = TensorSlot(dtype, shape, start, end)
    return FileLayout(slots)


def encode_tensors(
    tensors: Mapping[str, Tensor], *, digests: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, one tensor at a time, without copying contiguous CPU tensors.

    The safetensors library would copy all tensors at once. If `digests` is given, the SHA-256 of each tensor is added
    to it.
    """
    layout = layout_tensors(tensors)
    yield layout.header()
    for name, slot in layout.slots.items():
        data: bytes | memoryview = b""
        if slot.end > slot.start:
            # Make the tensor contiguous before the copy, because MPS copies strided views wrongly (pytorch#189961).
            # Do not convert the dtype in the copy, because that has overwritten the source (pytorch#189563).
            data = as_bytes(tensors[name].detach().contiguous().cpu())
        if digests is not None:
            digests[name] = hashlib.sha256(data).hexdigest()
        if slot.end > slot.start:
            yield data


def as_bytes(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor. The view keeps the tensor alive.

    NumPy is avoided, because torch can no longer resize memory that NumPy has viewed, and some of torch's quantization
    observers resize their buffers.
    """
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def decode_tensors(data: bytearray, *, is_foreign: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of `data`.

    Raise ValueError unless `encode_tensors` could have written the file. With `is_foreign`, the file may also have any
    alignment, list its tensors in any order, and contain metadata, which is ignored.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8) or (length % 8 and not is_foreign):
        raise ValueError(f"a header of {length:,} bytes")
    header = load_foreign_json(data[8 : 8 + length].rstrip(b" "))
    if is_foreign:
        header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ValueError(f"{len(header):,} tensors")
    if is_foreign:
        # Other writers may list tensors in any order. Their byte ranges must still have no gaps.
        header = dict(sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])))
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in header.items():
        slot = _decode_slot(name, entry, start=end)
        end = slot.end
        if end > len(data) - 8 - length:
            raise ValueError(f"{name!r} is beyond the end")
        # torch.frombuffer does not accept an empty range.
        if slot.end == slot.start:
            tensors[name] = torch.empty(slot.shape, dtype=slot.dtype)
        else:
            count = (slot.end - slot.start) // slot.dtype.itemsize
            flat = torch.frombuffer(data, dtype=slot.dtype, count=count, offset=8 + length + slot.start)
            tensors[name] = flat.reshape(slot.shape)
    if end != len(data) - 8 - length:
        raise ValueError("bytes that belong to no tensor")
    return tensors


def _decode_slot(name: str, entry: Any, *, start: int) -> TensorSlot:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    # bool is a subclass of int, so isinstance would accept true as a size.
    if len(shape) > MAX_TENSOR_DIMENSIONS or any(
        type(n) is not int or not 0 <= n < 2**48 for n in (*shape, first, last)
    ):
        raise ValueError(f"{name!r} has an impossible shape")
    count = 1
    # Python integers do not overflow, so a huge shape cannot wrap around to a valid size.
    for size in shape:
        count *= size
    if first != start or last - first != count * dtype.itemsize or first % dtype.itemsize:
        raise ValueError(f"{name!r} is at the wrong offset")
    return TensorSlot(dtype, shape, first, last)
