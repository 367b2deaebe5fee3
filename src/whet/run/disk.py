"""The system calls that change the disk, and a safe way to open untrusted files for reading.

`durable` makes every call through the `Disk` table. A test replaces `durable.disk` to observe, fail or interrupt any
call.
"""

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from whet.base.errors import WhetError

# Errors of filesystems that do not support a sync call.
NOT_SUPPORTED = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)


class Disk:
    """The system calls of the operating system."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file and return its descriptor, which child processes do not inherit.

        The umask applies to new files.
        """
        if flags & os.O_WRONLY:
            # A run folder may be untrusted: do not write through links, and do not block on pipes.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write as many of the bytes as the system accepts and return their number."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Send all written data to the drive, which may still hold it in its cache."""
        os.fsync(descriptor)

    def full_sync(self, descriptor: int) -> None:
        """Write all data to the medium. On macOS, this flushes the whole cache of the drive."""
        if sys.platform == "darwin":
            # On macOS, fsync(2) does not flush the cache of the drive. SMB, exFAT and some FUSE disks lack F_FULLFSYNC.
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
        os.fsync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Create a folder, which must not exist yet."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder. An existing target must be a file or an empty folder."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()


# Maximum size of a file that is read as a whole.
MAX_WHOLE_FILE_BYTES = 64 * 1024**2


def open_regular_file(path: Path, *, follows_links: bool = False) -> BinaryIO:
    """Open a regular file for reading. Reject pipes, which could block forever, and devices, which never end.

    Links are not followed by default: a link in an untrusted run folder could expose a private file in a report.
    """
    links = 0 if follows_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise WhetError(f"{path} is damaged", got="a symbolic link", try_="a copy of the file instead") from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise WhetError(
        f"{path} is damaged", got="not a regular file", try_="restore this file from a copy, or another run"
    )


def read_regular_file(path: Path, *, follows_links: bool = False) -> bytes:
    """Return all bytes of a small file. Raise ValueError if it is too large."""
    with open_regular_file(path, follows_links=follows_links) as file:
        # Read only the actual size: allocating a buffer of the maximum size would cost more than reading.
        data = file.read(min(os.fstat(file.fileno()).st_size, MAX_WHOLE_FILE_BYTES) + 1)
    if len(data) > MAX_WHOLE_FILE_BYTES:
        raise ValueError(f"over {MAX_WHOLE_FILE_BYTES:,} bytes")
    return data
