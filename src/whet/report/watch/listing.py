"""List the runs of a folder, and find out which of them have changed since the last scan."""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from whet.report.run_status import RunStatus
from whet.report.watch.status_reader import RunStamp, StatusReader, run_id
from whet.run.folder import RUN_FILE, run_folders

# Maximum seconds for reading runs in one scan. The next scan reads the remaining runs.
_SCAN_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class ListingChanges:
    """The changes since a scan."""

    changed: tuple[RunStatus, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of removed runs."""
    groups: dict[str, int] | None = None
    """Folders that contain runs, with the number of runs in each, or None if unchanged."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed or self.groups is not None)


class RunListing:
    """The runs of a folder, or a single run. Scans exclude each other. Any thread may read the list."""

    def __init__(self, folder: Path) -> None:
        self._only = folder.name if (folder / RUN_FILE).is_file() else None
        self._root = folder.parent if self._only else folder
        self._readers: dict[str, StatusReader] = {}
        self._folders: dict[str, Path] = {}
        self._ids: dict[str, str] = {}
        self._scanning = threading.Lock()
        self.is_complete = False
        """Whether all runs are up to date. Reading thousands of runs for the first time takes several scans."""
        self.scanned_at = 0.0
        self.groups: dict[str, int] = {}
        """Folders that contain runs, such as those of a search, with the number of runs in each."""
        # Start from the current time, so that a page that was opened with an earlier server gets all runs.
        self.version = int(time.time())
        """Number that increases with each scan that finds a change."""
        self._changed_at: dict[str, int] = {}
        """Version in which each run last changed or was removed."""

    def folder(self, run: str) -> Path | None:
        """Return the folder of a run by its id, or None if the id was never listed."""
        return self._folders.get(run)

    def changes(self, *, since: int = 0) -> ListingChanges:
        """Return the runs that changed after a version, newest first, and those that were removed.

        Without a version, return all runs.
        """
        runs = [run for run, version in list(self._changed_at.items()) if version > since]
        readers = dict(self._readers)
        changed = sorted((readers[run].status for run in runs if run in readers), key=lambda status: -status.updated)
        return ListingChanges(
            changed=tuple(changed), removed=tuple(run for run in runs if run not in readers), groups=self.groups
        )

    def scan(self, *, seconds: float = _SCAN_SECONDS) -> ListingChanges:
        """Read the runs that have changed since the last scan, newest first, and return the changes."""
        with self._scanning:
            self.scanned_at = time.monotonic()
            try:
                stamps, groups = self._stamps()
            except (FileNotFoundError, NotADirectoryError):
                stamps, groups, self._folders = {}, {}, {}
            except OSError:
                return ListingChanges()  # The disk does not respond, but its runs may still exist.
            is_regrouped, self.groups = groups != self.groups, groups
            removed = tuple(run for run in self._readers if run not in stamps)
            for run in removed:
                del self._readers[run]
            changed = self._refresh(stamps, until=time.monotonic() + seconds)
            self.scanned_at = time.monotonic()
            changes = ListingChanges(changed=changed, removed=removed, groups=groups if is_regrouped else None)
            if changes:
                self.version += 1
                self._changed_at |= dict.fromkeys((*(run_id(one.path.name) for one in changed), *removed), self.version)
            return changes

    def _refresh(self, stamps: dict[str, RunStamp], *, until: float) -> tuple[RunStatus, ...]:
        changed: list[RunStatus] = []
        self.is_complete = True
        # Read unreadable runs last, because they are retried in every scan, and must not delay other runs.
        unreadable = {run for run, reader in self._readers.items() if reader.status.state == "unreadable"}
        for run, stamp in sorted(stamps.items(), key=lambda item: (item[0] in unreadable, -item[1].newest)):
            if time.monotonic() > until:
                self.is_complete = run in unreadable
                break
            is_new = run not in self._readers
            if is_new:
                self._readers[run] = StatusReader(self._folders[run])
            if self._readers[run].refresh(stamp) or is_new:
                changed.append(self._readers[run].status)
        return tuple(changed)

    def _stamps(self) -> tuple[dict[str, RunStamp], dict[str, int]]:
        """Return the stamps of all run folders, including damaged ones, and the folders that contain runs.

        Links and hidden folders are skipped.
        """
        stamps: dict[str, RunStamp] = {}
        groups: dict[str, int] = {}
        folders: dict[str, Path] = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.startswith(".") or (self._only and entry.name != self._only):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if (stamp := RunStamp.of(entry.path)).newest:
                    run = self._ids.get(entry.name) or run_id(entry.name)
                    self._ids[entry.name] = run
                    stamps[run] = stamp
                    folders[run] = self._folders.get(run) or self._root / entry.name
                elif number := len(run_folders(Path(entry.path))):
                    groups[entry.name] = number
        self._folders = folders
        return stamps, groups
