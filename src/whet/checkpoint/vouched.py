"""How is a file of a checkpoint read that may have been changed by anybody? Only as an ordinary file, only what was
vouched for."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from whet.checkpoint import plain_json
from whet.checkpoint.manifest import File, damaged
from whet.run import durable

_READ_AT_ONCE = 16 * 1024**2


def read_vouched(path: Path, *, vouched: File | None = None) -> bytearray:
    """A file's bytes: of an ordinary file only, and only if they are those that were vouched for."""
    with opened(path, vouched=vouched) as file:
        data = read_exactly(file, os.fstat(file.fileno()).st_size, path=path)
    if vouched is not None:
        refuse_other_hash(data, vouched.sha256, path=path)
    return data


@contextmanager
def opened(path: Path, *, vouched: File | None = None) -> Iterator[FileIO]:
    """An ordinary file, of the size that was vouched for."""
    try:
        # Neither a link, nor a pipe that would let us wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            most = plain_json.MOST_BYTES if path.suffix == ".json" else 2**53
            if not stat.S_ISREG(found.st_mode) or found.st_size > most:
                raise damaged("a file of the checkpoint is no ordinary file", path, f"{found.st_size} bytes")
            if vouched is not None and found.st_size != vouched.size:
                got = f"{found.st_size} bytes; expected {vouched.size}"
                raise damaged("a file of the checkpoint is damaged", path, got)
            yield file
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM):
            # Not the checkpoint's fault: it must not be passed over for an older one.
            raise durable.explain(error, doing="read", path=path) from error
        raise damaged("a file of the checkpoint cannot be read", path, error.strerror) from None


def read_exactly(file: FileIO, num_bytes: int, *, path: Path) -> bytearray:
    """The next bytes of a file, all of them."""
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        count = file.readinto(view[filled : filled + _READ_AT_ONCE]) or 0
        if count == 0:
            raise damaged("a file of the checkpoint has become shorter", path, f"{filled} bytes")
        filled += count
    return data


def refuse_other_hash(data: bytes | bytearray, sha256: str, *, path: Path) -> None:
    """Bytes that are not those that were vouched for."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise damaged("a file of the checkpoint is damaged", path, f"sha256 {found}; expected {sha256}")
