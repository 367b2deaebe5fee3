"""Read the status of one run for a list. Updates read only new bytes."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import WhetError
from whet.report.page.html import shorten
from whet.report.run_status import RunStatus, loss_sparkline, read_status
from whet.run.folder import EVENTS_FILE, RUN_FILE, open_run
from whet.run.follow import LiveHistory
from whet.run.lock import LOCK_FILE, is_locked

_SLOW_SECONDS = 0.2
# If reading a run fails after more than `_SLOW_SECONDS`, retry it only after this time, or when it changes.
_RETRY_SECONDS = 30.0
_MAX_TEXT = 300

FileStamp = tuple[int, int, int]


def file_stamp(path: str) -> FileStamp | None:
    """Return the modification time in nanoseconds, size and inode of a file, or None if it cannot be read."""
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@dataclass(frozen=True, slots=True)
class RunStamp:
    """File stamps that show whether a run has changed, without reading it."""

    events: FileStamp | None
    header: FileStamp | None
    lock: FileStamp | None
    """Stamp of the lock file, which changes when a process takes the lock, before its first event."""

    @classmethod
    def of(cls, folder: Path | str) -> "RunStamp":
        """Return the stamp of a run folder.

        Create no Path objects, because this is called for thousands of runs every second.
        """
        names = {"events": EVENTS_FILE, "header": RUN_FILE, "lock": LOCK_FILE}
        return cls(**{part: file_stamp(f"{folder}/{name}") for part, name in names.items()})

    @property
    def newest(self) -> int:
        """Time of the last change in nanoseconds, or 0 if the folder is not a run."""
        return max((stamp[0] for stamp in (self.events, self.header) if stamp), default=0)


def run_id(name: str) -> str:
    """Return an id for URLs, which does not reveal the path of the run."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:20]


def status_json(status: RunStatus) -> dict[str, Any]:
    """Return a status as JSON for a page, with an id instead of the path."""
    fields = status.as_json()
    del fields["path"], fields["size_bytes"]
    name = status.path.name
    return {"id": run_id(name), "name": shorten(name, most=_MAX_TEXT), **shorten(fields, most=_MAX_TEXT)}


def hide_path(text: str, folder: Path) -> str:
    """Return the text with the path of a run replaced by its name."""
    return text.replace(f"{folder}", folder.name)


class StatusReader:
    """Reads the status of one run repeatedly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: RunStamp | None = None
        self._failed_stamp: RunStamp | None = None
        self._retry_at = 0.0
        self._history: LiveHistory | None = None
        """History of a run in progress, which reads only new bytes. None for other runs, to save memory."""
        self.status = RunStatus(path=folder, state="never started")

    def refresh(self, stamp: RunStamp) -> bool:
        """Read new events. Return whether the status changed."""
        before, begun = self.status, time.monotonic()
        if stamp == self._failed_stamp and begun < self._retry_at:
            return False
        try:
            # Check the lock too, because a process may die without writing an end event.
            if stamp != self._stamp or (self.status.state == "running" and not is_locked(self._folder)):
                self.status = self._read()
                self._stamp = stamp
        except (WhetError, OSError) as error:
            problem = f"{error.what}: {error.got}" if isinstance(error, WhetError) else str(error)
            self.status = RunStatus(
                path=self._folder,
                state="unreadable",
                updated=stamp.newest / 1e9,
                problem=hide_path(problem, self._folder),
            )
            # Retry in every scan, because the folder may be in the middle of a copy, unless the disk is slow to fail.
            self._stamp, self._failed_stamp, self._history = None, stamp, None
            if time.monotonic() - begun > _SLOW_SECONDS:
                self._retry_at = begun + _RETRY_SECONDS
        return self.status != before

    def _read(self) -> RunStatus:
        run = open_run(self._folder)
        if self._history is None:
            history = LiveHistory(run)
        else:
            history = self._history
            history.refresh()
        status = read_status(run, history=history)
        self._history = history if status.state == "running" else None
        return status.model_copy(update={"sparkline": loss_sparkline(history, status.losses)})
