"""The system calls that change the disk, and opening untrusted files for reading."""

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
        """A descriptor that is closed in child processes; new files may be read by all whom the umask lets."""
        if flags & os.O_WRONLY:
            # A run folder may come from anywhere: no link in it leads our writing elsewhere, no pipe lets us wait.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Writes some of the bytes from the front; how many."""
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Hands all that was written to the drive."""
        os.fsync(descriptor)

    def full_sync(self, descriptor: int) -> None:
        """Puts all that was written onto the medium itself, and on macOS all else in the drive's cache with it."""
        if sys.platform == "darwin":
            # fsync(2) on macOS leaves the drive's own cache unwritten; SMB, exFAT and some FUSE disks lack F_FULLFSYNC.
            try:
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
            except OSError as error:
                if error.errno not in NOT_SUPPORTED:
                    raise
        os.fsync(descriptor)

    def truncate(self, descriptor: int, size: int) -> None:
        """Cuts off what lies behind `size`."""
        os.ftruncate(descriptor, size)

    def close(self, descriptor: int) -> None:
        """Gives the descriptor back."""
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Makes a folder that must not be there."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or folder its name; a target that is there is refused unless it is a file or an empty folder."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Takes a file's or link's name away."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()


MAX_WHOLE_FILE_BYTES = 64 * 1024**2
"""Of a file that is read as a whole."""


def open_regular_file(path: Path, *, follows_links: bool = False) -> BinaryIO:
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


def read_regular_file(path: Path, *, follows_links: bool = False) -> bytes:
    """All bytes of a small file; ValueError for one that is too large to be what it should be."""
    with open_regular_file(path, follows_links=follows_links) as file:
        # As much as there is: a buffer for the most that may be would cost more than the reading.
        data = file.read(min(os.fstat(file.fileno()).st_size, MAX_WHOLE_FILE_BYTES) + 1)
    if len(data) > MAX_WHOLE_FILE_BYTES:
        raise ValueError(f"over {MAX_WHOLE_FILE_BYTES:,} bytes")
    return data
