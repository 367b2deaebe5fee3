"""How is a file read that may be compressed? By its first bytes, piece by piece, never as a whole."""

import bz2
import gzip
import importlib
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

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
