"""Which runs are in a folder, and which of them changed since the last look?"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from whet.report.watch.status_reader import ListedRun, RunStamp, StatusReader, run_id
from whet.run.folder import RUN_FILE, run_folders

_SCAN_SECONDS = 0.3
"""So long one look reads at most; what is left is read at the next one."""


@dataclass(frozen=True, slots=True)
class ListingChanges:
    """What one look found."""

    changed: tuple[ListedRun, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of runs that are gone."""
    groups: dict[str, int] | None = None
    """Folders that hold runs of their own, and how many; None where that is as before."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed or self.groups is not None)


class RunListing:
    """The runs of a folder, or one run. One thread at a time looks; any may ask."""

    def __init__(self, folder: Path) -> None:
        self._only = folder.name if (folder / RUN_FILE).is_file() else None
        self._root = folder.parent if self._only else folder
        self._readers: dict[str, StatusReader] = {}
        self._folders: dict[str, Path] = {}
        self._idents: dict[str, str] = {}
        self._looking = threading.Lock()
        self.is_complete = False
        """Whether every run was read as it is now; reading thousands for the first time takes a few looks."""
        self.looked_at = 0.0
        self.groups: dict[str, int] = {}
        """Folders beside the runs that hold some, as those of a search do, and how many each."""

    def folder(self, ident: str) -> Path | None:
        """The folder of a run; None for any id that was not listed."""
        return self._folders.get(ident)

    def lines(self) -> tuple[ListedRun, ...]:
        """All runs that were read so far, the newest first."""
        lines = [reader.line for reader in list(self._readers.values())]
        return tuple(sorted(lines, key=lambda line: -line.changed))

    def look(self, *, seconds: float = _SCAN_SECONDS) -> ListingChanges:
        """Finds what changed: three stats for each run, reading only for those that did, new ones first."""
        with self._looking:
            self.looked_at = time.monotonic()
            try:
                marks, groups = self._marks()
            except (FileNotFoundError, NotADirectoryError):
                marks, groups, self._folders = {}, {}, {}
            except OSError:
                return ListingChanges()  # The disk does not answer: what was there may be there still.
            is_other, self.groups = groups != self.groups, groups
            removed = tuple(ident for ident in self._readers if ident not in marks)
            for ident in removed:
                del self._readers[ident]
            changed: list[ListedRun] = []
            until, self.is_complete = time.monotonic() + seconds, True
            # What could not be read comes last: it is tried at every look, and nothing should wait for it.
            unreadable = {ident for ident, reader in self._readers.items() if reader.line.state == "unreadable"}
            for ident, mark in sorted(marks.items(), key=lambda one: (one[0] in unreadable, -one[1].newest)):
                if time.monotonic() > until:
                    self.is_complete = ident in unreadable
                    break
                reader = self._readers.get(ident)
                if reader is None:
                    reader = self._readers[ident] = StatusReader(self._folders[ident])
                    reader.refresh(mark)
                    changed.append(reader.line)
                elif reader.refresh(mark):
                    changed.append(reader.line)
            self.looked_at = time.monotonic()
            return ListingChanges(changed=tuple(changed), removed=removed, groups=groups if is_other else None)

    def _marks(self) -> tuple[dict[str, RunStamp], dict[str, int]]:
        """Of every folder that is a run, or was before something damaged it, and those that hold runs instead.

        Links and hidden ones are neither.
        """
        found: dict[str, RunStamp] = {}
        groups: dict[str, int] = {}
        folders: dict[str, Path] = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.startswith(".") or (self._only and entry.name != self._only):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    continue
                if (mark := RunStamp.of(entry.path)).newest:
                    ident = self._idents.get(entry.name) or run_id(entry.name)
                    self._idents[entry.name] = ident
                    found[ident] = mark
                    folders[ident] = self._folders.get(ident) or self._root / entry.name
                elif number := len(run_folders(Path(entry.path))):
                    groups[entry.name] = number
        self._folders = folders
        return found, groups
