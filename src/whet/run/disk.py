"""The system calls that change the disk, and opening untrusted files for reading.

`durable` makes no call outside the `Disk` table. A test replaces `durable.disk` to observe, fail or interrupt any call.
"""

import errno
import fcntl
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

from whet.base.errors import WhetError

NOT_SUPPORTED = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)


class Disk:
    """The system's own calls."""

    def open(self, path: Path, flags: int) -> int:
        """A descriptor that child processes do not inherit; new files get the permissions of the umask."""
        if flags & os.O_WRONLY:
            # A run folder may come from anywhere: do not write through its links, and do not block on its pipes.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write some of the bytes; returns how many."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Hand everything written to the drive."""
        os.fsync(descriptor)

    def full_sync(self, descriptor: int) -> None:
        """Write everything to the medium itself; on macOS this flushes the whole cache of the drive."""
        if sys.platform == "darwin":
            # fsync(2) on macOS does not flush the drive's own cache; SMB, exFAT and some FUSE disks lack F_FULLFSYNC.
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
        os.fsync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        """Truncate the file to `size` bytes."""
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        """Close the descriptor."""
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Create a folder that must not exist."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; an existing target must be a file or an empty folder."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file or link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


# Limit for files that are read as a whole.
MAX_WHOLE_FILE_BYTES = 64 * 1024**2


def open_regular_file(path: Path, *, follows_links: bool = False) -> BinaryIO:
    """Open a regular file for reading: a pipe would block forever, and a device has no end.

    Links are not followed: one in a foreign run folder may lead to a private file, which a report would then show.
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
    """All bytes of a small file; ValueError for one that is too large."""
    with open_regular_file(path, follows_links=follows_links) as file:
        # Read only as much as there is: allocating a buffer of the maximum would cost more than reading.
        data = file.read(min(os.fstat(file.fileno()).st_size, MAX_WHOLE_FILE_BYTES) + 1)
    if len(data) > MAX_WHOLE_FILE_BYTES:
        raise ValueError(f"over {MAX_WHOLE_FILE_BYTES:,} bytes")
    return data
