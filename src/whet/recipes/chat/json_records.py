"""Read the records of a JSON array or a JSON Lines file one at a time, compressed or not."""

import bz2
import codecs
import gzip
import importlib
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pydantic_core import from_json

from whet.base.errors import UsageError, WhetError
from whet.run.disk import open_regular_file

_DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
_ZSTD = b"\x28\xb5\x2f\xfd"


@contextmanager
def open_stream(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked; a broken stream is told in three lines."""
    try:
        with open_regular_file(path, follows_links=True) as file:
            start = file.read(6)
            file.seek(0)
            with _unpacked(file, start, path) as stream:
                yield stream
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(f"cannot read {path}", got=error.strerror, try_="a file that may be read") from None
        got = f"{type(error).__name__}: {error}"[:200]
        raise WhetError(
            f"{path} is damaged", got=got, try_="get the file again: its end is missing or its bytes changed"
        ) from None


def _unpacked(file: IO[bytes], start: bytes, path: Path) -> IO[bytes]:
    if start.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    if start.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(file))
    if start.startswith(b"\xfd7zXZ"):
        return cast("IO[bytes]", lzma.LZMAFile(file))
    if start.startswith(_ZSTD):
        return _zstd(file, path)
    if start.startswith(b"PK\x03\x04"):
        raise UsageError(f"{path} is an archive of files", got="zip", try_=f"unzip {path.name}, then one of its files")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        again = f"iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}"
        raise UsageError(f"{path} is not UTF-8", got="UTF-16, by its first bytes", try_=again)
    return file


def _zstd(file: IO[bytes], path: Path) -> IO[bytes]:
    """Python has it from 3.14 on; before that, pyarrow can, where it is installed for Parquet."""
    library: Any
    try:
        library = importlib.import_module("compression.zstd")
        return cast("IO[bytes]", library.ZstdFile(file))
    except ImportError:
        pass
    try:
        library = importlib.import_module("pyarrow")
    except ImportError:
        raise UsageError(
            f"{path} is compressed with Zstandard, which this Python cannot read",
            got="no compression.zstd (Python 3.14) and no pyarrow",
            try_=f"zstd -d {path.name}, or pip install 'whet[parquet]'",
        ) from None
    return cast("IO[bytes]", library.CompressedInputStream(library.PythonFile(file), "zstd"))


MAX_RECORD_BYTES = 64 * 1024**2
"""Of one record: memory is bounded, and a conversation is shorter."""

_CHUNK = 1024**2
_BOM = codecs.BOM_UTF8
_SPACE = re.compile(r"\s*")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|["{}\[\],]', re.DOTALL)
"""What decides where an element ends: whole strings, brackets and commas; and a quote whose string is not whole."""


class Record(NamedTuple):
    """One entry of a file."""

    number: int
    """Of its line, or its place in the array; from 1."""
    value: Any = None
    fault: str = ""
    """Why it could not be read."""


def read_records(path: Path) -> Iterator[Record]:
    """The records in order; what cannot be read comes with its fault."""
    with open_stream(path) as stream:
        head = stream.read(_CHUNK)
        while head and not head.removeprefix(_BOM).strip():
            more = stream.read(_CHUNK)
            if not more:
                break
            head = more
        text = head.removeprefix(_BOM).lstrip()
        if not text:
            raise UsageError(f"{path} is empty", got="no records", try_="a file with conversations")
        if text.startswith(b"["):
            yield from _read_array(text, stream, path)
        elif text.startswith(b"{"):
            yield from _read_lines(head.removeprefix(_BOM), stream)
        else:
            raise UsageError(
                f"{path} is neither a JSON array nor JSON lines",
                got=ascii(text[:40].decode(errors="replace")),
                try_='[{"messages": [...]}, ...], or one {"messages": [...]} a line',
            )


# --- lines -----------------------------------------------------------------------------------------------------------


def _read_lines(head: bytes, stream: IO[bytes]) -> Iterator[Record]:
    for number, (line, is_whole) in enumerate(_lines(head, stream), 1):
        if not is_whole:
            yield Record(number, fault=f"longer than {MAX_RECORD_BYTES:,} bytes")
        elif line.strip():
            try:
                yield Record(number, from_json(line))
            except ValueError as error:
                yield Record(number, fault=f"not JSON: {str(error)[:80]}")


def _lines(head: bytes, stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Lines, and whether each is whole: what is too long is passed over."""
    rest, is_whole = b"", True
    for chunk in _chunks(head, stream):
        *lines, tail = chunk.split(b"\n")
        if not lines:
            rest = rest + tail if is_whole else b""
            is_whole = is_whole and len(rest) <= MAX_RECORD_BYTES
            continue
        yield rest + lines[0] if is_whole else b"", is_whole
        for line in lines[1:]:
            yield line, True
        rest, is_whole = tail, True
    if rest or not is_whole:
        yield rest, is_whole


def _chunks(head: bytes, stream: IO[bytes]) -> Iterator[bytes]:
    yield head
    while chunk := stream.read(_CHUNK):
        yield chunk


# --- arrays ----------------------------------------------------------------------------------------------------------


class _Window:
    """The part of a long text that is looked at now."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        # Bytes that are no UTF-8 become lone surrogates: the text they are in is refused later, not the whole file.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._stream = stream
        self.text = self._decoder.decode(head)
        self.at = 0
        self.is_last = False

    def more(self) -> bool:
        """Reads on, as much again as is kept; whether there was something."""
        kept = self.text[self.at :]
        read = self._stream.read(max(_CHUNK, len(kept)))
        self.is_last = not read
        self.text, self.at = kept + self._decoder.decode(read, final=self.is_last), 0
        return not self.is_last

    def next_sign(self) -> str:
        """The next sign that is no space, which stays where it is; empty at the end."""
        while True:
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_last or not self.more():
                return ""


def _read_array(head: bytes, stream: IO[bytes], path: Path) -> Iterator[Record]:
    window = _Window(head, stream)
    window.at += 1
    if window.next_sign() == "]":
        window.at += 1
    else:
        for number in count(1):
            yield _element(window, number, path)
            sign = window.next_sign()
            window.at += 1
            if sign == "]":
                break
            if sign != ",":
                raise _damaged(path, number, got=f"{sign!r} behind it" if sign else "the file ends there")
    if window.next_sign():
        raise UsageError(
            f"{path} goes on behind its array",
            got=ascii(window.text[window.at : window.at + 40]),
            try_="one array, or JSON lines",
        )


def _element(window: _Window, number: int, path: Path) -> Record:
    """The element that starts here; the window stands behind it afterwards."""
    window.next_sign()
    while True:
        fault = ""
        try:
            value, end = _decode(window.text, window.at)
            if end < len(window.text) or window.is_last:
                window.at = end
                return Record(number, value)
        except (ValueError, RecursionError) as error:
            fault = f"not JSON: {str(error)[:80]}"
            end_of_bad = _end_of_element(window.text, window.at)
            if end_of_bad is not None:
                window.at = end_of_bad
                return Record(number, fault=fault)
        if len(window.text) - window.at > MAX_RECORD_BYTES:
            raise _damaged(path, number, got=f"no end within {MAX_RECORD_BYTES:,} bytes")
        if (window.is_last or not window.more()) and fault:
            raise _damaged(path, number, got="the file ends inside")


_CLOSING = {"{": "}", "[": "]"}
_decode = json.JSONDecoder().raw_decode


def _end_of_element(text: str, start: int) -> int | None:
    """Where an element that cannot be parsed ends, by its brackets alone; None where that lies further on."""
    inside: list[str] = []
    for found in _JSON_TOKEN.finditer(text, start):
        sign = found[0]
        if sign == '"':
            return None
        if sign in _CLOSING:
            inside.append(_CLOSING[sign])
        elif sign in "}]":
            if sign not in inside:
                return found.start()
            # What was opened inside and not closed was forgotten.
            while inside.pop() != sign:
                pass
        elif sign == "," and not inside:
            return found.start()
    return None


def _damaged(path: Path, number: int, *, got: str) -> WhetError:
    return WhetError(
        f"{path} is damaged: record {number} has no end, so what follows it cannot be read",
        got=got,
        try_="get the file again, or write JSON lines, where one bad line harms no other",
    )
