"""Encode and decode checkpoint files: safetensors and canonical JSON."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from whet.base.errors import WhetError

MAX_JSON_BYTES = 64 * 1024**2
MAX_JSON_DEPTH = 64


def dump_json(value: Any) -> bytes:
    """The one text of a value; ValueError for NaN, TypeError for what is not JSON."""
    return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":")).encode()


def load_json(data: bytes | bytearray) -> dict[str, Any]:
    """The object in a text that `dump_json` wrote; ValueError for any other text, however close."""
    value = load_foreign_json(data)
    if dump_json(value) != data:
        raise ValueError("not written the way whet writes JSON")
    return value


def load_foreign_json(data: bytes | bytearray) -> dict[str, Any]:
    """The object in any strict JSON text within the limits, names in their order; else ValueError."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{len(data):,} bytes of JSON; {MAX_JSON_BYTES:,} are the most")
    try:
        value = json.loads(data, parse_constant=_refuse, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    _refuse_depth(value, left=MAX_JSON_DEPTH)
    return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that comes twice means one thing to us and another to the next reader."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _refuse_depth(value: Any, *, left: int) -> None:
    if left == 0:
        raise ValueError("nested too deeply")
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inside:
        if isinstance(item, dict | list):
            _refuse_depth(item, left=left - 1)


MAX_HEADER_BYTES = 16 * 1024**2
MAX_TENSORS = 100_000
MAX_TENSOR_DIMENSIONS = 32

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
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
    """Where one tensor lies, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """All places of one file, in the order of their bytes."""

    places: dict[str, TensorSlot]

    @property
    def num_bytes(self) -> int:
        """The bytes of all numbers."""
        return max((place.end for place in self.places.values()), default=0)

    def header(self) -> bytes:
        """What the file begins with; padded so that every number is aligned."""
        entries = {
            name: {"dtype": dtype_name(p.dtype), "shape": p.shape, "data_offsets": (p.start, p.end)}
            for name, p in self.places.items()
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
            got = f"{len(entries):,} tensors, {len(text):,} bytes of names"
            raise WhetError("too many tensors for a checkpoint", got=got, try_=f"at most {MAX_TENSORS:,}")
        return len(text).to_bytes(8, "little") + text


def dtype_name(dtype: torch.dtype) -> str:
    """The kind of number as safetensors calls it."""
    if dtype not in _DTYPE_NAMES:
        raise WhetError("tensors of this kind cannot be saved", got=dtype, try_="one of " + ", ".join(DTYPES))
    return _DTYPE_NAMES[dtype]


def layout_tensors(tensors: Mapping[str, Tensor]) -> FileLayout:
    """Wide numbers first, so that all are aligned; then by name."""
    return layout_slots({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})


def layout_slots(kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> FileLayout:
    """The same from what the tensors are, without them."""
    places: dict[str, TensorSlot] = {}
    end = 0
    for name in sorted(kinds, key=lambda name: (-kinds[name][0].itemsize, name)):
        dtype, shape = kinds[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        places[name] = TensorSlot(dtype, shape, start, end)
    return FileLayout(places)


def encode_tensors(
    tensors: Mapping[str, Tensor], *, digests: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of the file, one tensor at a time; tensors that lie on the CPU in one piece are not copied.

    `digests` is filled with the SHA-256 of each tensor on the way.
    """
    layout = layout_tensors(tensors)
    yield layout.header()
    for name, place in layout.places.items():
        data: bytes | memoryview = b""
        if place.end > place.start:
            # Contiguous first, since copies of views with gaps from MPS are wrong (pytorch#189961); and no other
            # dtype, since such a copy has overwritten its source (pytorch#189563).
            data = as_bytes(tensors[name].detach().contiguous().cpu())
        if digests is not None:
            digests[name] = hashlib.sha256(data).hexdigest()
        if place.end > place.start:
            yield data


def as_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor on the CPU, where they lie."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def decode_tensors(data: bytearray, *, is_foreign: bool = False) -> dict[str, Tensor]:
    """The tensors in a file's bytes, where they lie; ValueError when it is not a file that `encode_tensors` makes.

    A foreign one may be aligned otherwise, name tensors in any order and hold texts about itself, which are not read.
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
        header = dict(sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])))
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in header.items():
        place = _decode_slot(name, entry, start=end)
        end = place.end
        if end > len(data) - 8 - length:
            raise ValueError(f"{name!r} lies beyond the end")
        if place.end == place.start:
            tensors[name] = torch.empty(place.shape, dtype=place.dtype)
        else:
            count = (place.end - place.start) // place.dtype.itemsize
            flat = torch.frombuffer(data, dtype=place.dtype, count=count, offset=8 + length + place.start)
            tensors[name] = flat.reshape(place.shape)
    if end != len(data) - 8 - length:
        raise ValueError("bytes that belong to no tensor")
    return tensors


def _decode_slot(name: str, entry: Any, *, start: int) -> TensorSlot:
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if len(shape) > MAX_TENSOR_DIMENSIONS or any(
        type(n) is not int or not 0 <= n < 2**48 for n in (*shape, first, last)
    ):
        raise ValueError(f"{name!r} has an impossible shape")
    count = 1
    for size in shape:
        count *= size
    if first != start or last - first != count * dtype.itemsize or first % dtype.itemsize:
        raise ValueError(f"{name!r} does not lie where it should")
    return TensorSlot(dtype, shape, first, last)
