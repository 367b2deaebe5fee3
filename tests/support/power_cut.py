"""Power cuts: an ext4 filesystem of its own, whose writes stop at an instant, as if the plug were pulled."""

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

EXT4_SHUTDOWN = 0x8004587D
WITHOUT_JOURNAL_FLUSH = 2


class Disk:
    """An ext4 image in a loop mount; needs root."""

    def __init__(self, folder: Path, *, megabytes: int = 24) -> None:
        self.place = folder / "disk"
        self._image = folder / "image"
        self._num_cuts = 0
        self.place.mkdir()
        with self._image.open("wb") as file:
            file.truncate(megabytes * 1024**2)
        _run("mkfs.ext4", "-q", "-F", self._image)
        self._mount()

    def remount(self) -> None:
        """Mount what has reached the medium, which replays the journal as after a power cut.

        A copy is mounted: while another mount namespace still holds the old mount, mounting the same image again would
        return the filesystem that was shut down.
        """
        _run("umount", self.place)
        copy = self._image.with_suffix(f".{self._num_cuts}")
        shutil.copyfile(self._image, copy)
        self._image.unlink()
        self._image = copy
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", self._image, self.place)

    def cut(self) -> None:
        """From now on nothing reaches the medium, not even data that the journal holds in memory."""
        self._num_cuts += 1
        descriptor = os.open(self.place, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, EXT4_SHUTDOWN, struct.pack("I", WITHOUT_JOURNAL_FLUSH))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.place)], capture_output=True, check=False)


def why_not(folder: Path) -> str | None:
    """Return why power cannot be cut here; None if it can."""
    if os.geteuid() != 0:
        return "only root may mount a filesystem"
    try:
        disk = Disk(folder)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no ext4 image can be mounted here: {error}"
    try:
        disk.cut()
    except OSError as error:
        return f"ext4 cannot be shut down here: {error}"
    finally:
        disk.close()
    return None


def _run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
