"""How is a file opened that anybody may have put there? Only an ordinary one, without waiting, and with a limit."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from whet.base.errors import WhetError

MOST_BYTES = 64 * 1024**2
"""Of a file that is read as a whole."""


def open_plain(path: Path, *, follows_links: bool = False) -> BinaryIO:
    """The file for reading; a pipe would let us wait for ever, and a device has no end.

    A link in a folder of somebody else may lead to a file of yours, which would then be shown in a report.
    """
    links = 0 if follows_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise WhetError(f"{path} is damaged", got="a link to elsewhere", try_="a copy of the file instead") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise WhetError(
        f"{path} is damaged", got="not a regular file", try_="restore this file from a copy, or another run"
    )


def read_plain(path: Path, *, follows_links: bool = False) -> bytes:
    """All bytes of a small file; ValueError for one that is too large to be what it should be."""
    with open_plain(path, follows_links=follows_links) as file:
        # As much as there is: a buffer for the most that may be would cost more than the reading.
        data = file.read(min(os.fstat(file.fileno()).st_size, MOST_BYTES) + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"over {MOST_BYTES:,} bytes")
    return data
