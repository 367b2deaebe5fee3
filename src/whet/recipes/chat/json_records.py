"""Read the records of a JSON array or a JSON Lines file one at a time, with transparent decompression."""

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
from whet.base.extras import install_hint
from whet.run.disk import open_regular_file

_DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error)
# The magic number of a Zstandard frame.
_ZSTD = b"\x28\xb5\x2f\xfd"


@contextmanager
def open_stream(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading. Decompress it if its first bytes are those of a compressed format."""
    try:
        with open_regular_file(path, follows_links=True) as file:
            start = file.read(6)
            file.seek(0)
            with _decompress(file, start, path) as stream:
                yield stream
    except _DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UsageError(f"cannot read {path}", got=error.strerror, try_="a readable file") from None
        got = f"{type(error).__name__}: {error}"[:200]
        raise WhetError(
            f"{path} is damaged", got=got, try_="download the file again: it is truncated or corrupt"
        ) from None


def _decompress(file: IO[bytes], start: bytes, path: Path) -> IO[bytes]:
    if start.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=file))
    if start.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.BZ2File(file))
    if start.startswith(b"\xfd7zXZ"):
        return cast("IO[bytes]", lzma.LZMAFile(file))
    if start.startswith(_ZSTD):
        return _zstd(file, path)
    if start.startswith(b"PK\x03\x04"):
        raise UsageError(f"{path} is an archive", got="zip", try_=f"unzip {path.name}, then use one of its files")
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        convert = f"iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}"
        raise UsageError(f"{path} is not UTF-8", got="UTF-16, by its first bytes", try_=convert)
    return file


def _zstd(file: IO[bytes], path: Path) -> IO[bytes]:
    # Python 3.14 added Zstandard to the standard library. For older versions, use pyarrow, an optional dependency.
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
            try_=f"zstd -d {path.name}, or {install_hint('parquet')}",
        ) from None
    return cast("IO[bytes]", library.CompressedInputStream(library.PythonFile(file), "zstd"))


MAX_RECORD_BYTES = 64 * 1024**2
"""Maximum size of a record, which bounds memory. Conversations are much shorter."""

_CHUNK = 1024**2
_BOM = codecs.BOM_UTF8
_SPACE = re.compile(r"\s*")
_JSON_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|["{}\[\],]', re.DOTALL)
"""Matches complete strings, brackets and commas, and the opening quote of an incomplete string."""


class Record(NamedTuple):
    """A record of a file: its parsed value, or the reason why it cannot be parsed."""

    number: int
    """The line number, or the index in the array, counted from 1."""
    value: Any = None
    error: str = ""
    """The reason why the record could not be parsed, or empty."""


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records in order. A record that cannot be parsed has an `error`."""
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


# --- JSON Lines ------------------------------------------------------------------------------------------------------


def _read_lines(head: bytes, stream: IO[bytes]) -> Iterator[Record]:
    for number, (line, is_whole) in enumerate(_lines(head, stream), 1):
        if not is_whole:
            yield Record(number, error=f"longer than {MAX_RECORD_BYTES:,} bytes")
        elif line.strip():
            try:
                yield Record(number, from_json(line))
            except ValueError as error:
                yield Record(number, error=f"not JSON: {str(error)[:80]}")


def _lines(head: bytes, stream: IO[bytes]) -> Iterator[tuple[bytes, bool]]:
    """Yield lines, and whether each is complete. A line over the size limit is replaced by an empty one."""
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
    """A sliding window over the decoded text of a stream."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        # Decode invalid UTF-8 as lone surrogates, so that only the affected record is rejected.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape")
        self._stream = stream
        self.text = self._decoder.decode(head)
        self.at = 0
        self.is_last = False

    def read_more(self) -> bool:
        """Drop the text before `at` and read at least as much as remains. Return False at the end of the file."""
        kept = self.text[self.at :]
        # Doubling the window keeps the total cost of parsing a long element linear in its length.
        read = self._stream.read(max(_CHUNK, len(kept)))
        self.is_last = not read
        self.text, self.at = kept + self._decoder.decode(read, final=self.is_last), 0
        return not self.is_last

    def peek(self) -> str:
        """Skip whitespace and return the next character without consuming it, or an empty string at the end."""
        while True:
            space = _SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if self.is_last or not self.read_more():
                return ""


def _read_array(head: bytes, stream: IO[bytes], path: Path) -> Iterator[Record]:
    window = _Window(head, stream)
    window.at += 1
    if window.peek() == "]":
        window.at += 1
    else:
        for number in count(1):
            yield _element(window, number, path)
            char = window.peek()
            window.at += 1
            if char == "]":
                break
            if char != ",":
                raise _damaged(path, number, got=f"{char!r} after it" if char else "the file ends")
    if window.peek():
        raise UsageError(
            f"{path} continues after its array",
            got=ascii(window.text[window.at : window.at + 40]),
            try_="one array, or JSON lines",
        )


def _element(window: _Window, number: int, path: Path) -> Record:
    """Parse the element at the position of the window, and advance past it."""
    window.peek()
    while True:
        error_text = ""
        try:
            value, end = _decode(window.text, window.at)
            # A number at the end of the window may continue in the next chunk.
            if end < len(window.text) or window.is_last:
                window.at = end
                return Record(number, value)
        except (ValueError, RecursionError) as error:
            error_text = f"not JSON: {str(error)[:80]}"
            end_of_bad = _end_of_element(window.text, window.at)
            if end_of_bad is not None:
                window.at = end_of_bad
                return Record(number, error=error_text)
        if len(window.text) - window.at > MAX_RECORD_BYTES:
            raise _damaged(path, number, got=f"no end within {MAX_RECORD_BYTES:,} bytes")
        if (window.is_last or not window.read_more()) and error_text:
            raise _damaged(path, number, got="the file ends inside it")


_CLOSING = {"{": "}", "[": "]"}
_decode = json.JSONDecoder().raw_decode


def _end_of_element(text: str, start: int) -> int | None:
    """Find the end of an invalid element by its brackets. Return None if it is not within the text."""
    open_brackets: list[str] = []
    for match in _JSON_TOKEN.finditer(text, start):
        char = match[0]
        if char == '"':
            return None
        if char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif char in "}]":
            if char not in open_brackets:
                return match.start()
            # Discard brackets that were opened after the matching one and never closed.
            while open_brackets.pop() != char:
                pass
        elif char == "," and not open_brackets:
            return match.start()
    return None


def _damaged(path: Path, number: int, *, got: str) -> WhetError:
    return WhetError(
        f"{path} is damaged: record {number} has no end, so the records after it cannot be read",
        got=got,
        try_="download the file again, or use JSON Lines, where a bad line does not affect others",
    )
