"""What does a run look like to TensorBoard? One event file, written without TensorBoard and without torch.

The file is a row of records: length, checksum of the length, data, checksum of the data. The data is an `Event` of
tensorboard's event.proto, of which a dozen bytes are needed: wall_time, step, file_version, and a `Summary` whose
values have a tag and a number.
"""

import math
import struct
from collections.abc import Iterator, Mapping

from whet.report.export.numbers import KINDS, named_numbers, step_of, without_remade
from whet.run.events import History

_POLYNOMIAL = 0x82F63B78
_MOST_FLOAT = 3.4028234663852886e38
_PIECE_BYTES = 1024**2


def tensorboard_files(history: History) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The one file: its name, and its pieces of bytes."""
    first = next((event.time for event in history.events()), 0.0)
    yield f"events.out.tfevents.{max(0, int(first)):010d}.whet", _pieces(history, started=first)


def _pieces(history: History, *, started: float) -> Iterator[bytes]:
    held = bytearray(record(_double(1, started) + _bytes(3, b"brain.Event:2")))
    heads: dict[str, bytes] = {}
    for event in without_remade(history.events(kinds=KINDS)):
        values = named_numbers(event)
        if not values:
            continue
        head = _double(1, event.time) + _whole(2, step_of(event))
        held += record(head + _bytes(5, _summary(values, heads=heads)))
        if len(held) >= _PIECE_BYTES:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def _summary(values: Mapping[str, float], *, heads: dict[str, bytes]) -> bytes:
    parts = []
    for name, value in values.items():
        head = heads.get(name)
        if head is None:
            tag = _bytes(1, name.encode())
            head = heads[name] = b"\x0a" + _varint(len(tag) + 5) + tag + b"\x15"
        parts.append(head + _four_bytes(value))
    return b"".join(parts)


def _four_bytes(value: float) -> bytes:
    """A number in 32 bits; one that is too large becomes the largest."""
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(_MOST_FLOAT, value))


def record(data: bytes) -> bytes:
    """The data as one record of the file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """The checksum by Castagnoli's polynomial, which the standard library lacks.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc, table = 0xFFFFFFFF, _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table_entry(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc


_TABLE = tuple(_table_entry(byte) for byte in range(256))


def _varint(number: int) -> bytes:
    found = bytearray()
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _whole(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _double(field: int, number: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", number)


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
