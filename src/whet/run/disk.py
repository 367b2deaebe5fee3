"""Which calls change the disk? All of them, one by one: durable makes none past this table.

A test puts another table in the place of `durable.disk`, and can then see, refuse or cut short any single call.
"""

import errno
import fcntl
import os
import sys
from pathlib import Path

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
