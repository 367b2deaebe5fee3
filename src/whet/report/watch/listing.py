"""Which runs are in a folder, and which of them changed since the last look?"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from whet.report.watch.line import LineReader, Mark, RunLine, run_id
from whet.run.folder import EVENTS_FILE, RUN_FILE

_LOOK_SECONDS = 0.3
"""So long one look reads at most; what is left is read at the next one."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What one look found."""

    changed: tuple[RunLine, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of runs that are gone."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed)


class Listing:
    """The runs of a folder, or one run. One thread at a time looks; any may ask."""

    def __init__(self, folder: Path) -> None:
        self._only = folder.name if (folder / RUN_FILE).is_file() else None
        self._root = folder.parent if self._only else folder
        self._readers: dict[str, LineReader] = {}
        self._folders: dict[str, Path] = {}
        self._looking = threading.Lock()
        self.is_complete = False
        """Whether every run was read as it is now; reading thousands for the first time takes a few looks."""
        self.looked_at = 0.0

    def folder(self, ident: str) -> Path | None:
        """The folder of a run; None for any id that was not listed."""
        return self._folders.get(ident)

    def lines(self) -> tuple[RunLine, ...]:
        """All runs that were read so far, the newest first."""
        lines = [reader.line for reader in list(self._readers.values())]
        return tuple(sorted(lines, key=lambda line: -line.changed))

    def look(self, *, seconds: float = _LOOK_SECONDS) -> Changes:
        """Finds what changed: a few stats for each run, reading only for those that did, new ones first."""
        with self._looking:
            found = {run_id(path.name): path for path in self._runs()}
            removed = tuple(ident for ident in self._readers if ident not in found)
            for ident in removed:
                del self._readers[ident]
            self._folders = found
            marks = {ident: Mark.of(path) for ident, path in found.items()}
            changed: list[RunLine] = []
            until, self.is_complete = time.monotonic() + seconds, True
            for ident in sorted(found, key=lambda one: -_newest(marks[one])):
                if time.monotonic() > until:
                    self.is_complete = False
                    break
                reader = self._readers.get(ident) or LineReader(found[ident])
                if reader.refresh(marks[ident]) or ident not in self._readers:
                    changed.append(reader.line)
                self._readers[ident] = reader
            self.looked_at = time.monotonic()
            return Changes(changed=tuple(changed), removed=removed)

    def _runs(self) -> list[Path]:
        """The folders that are runs; like `run_folders`, but for thousands of them every second."""
        try:
            with os.scandir(self._root) as entries:
                folders = [
                    self._root / entry.name
                    for entry in entries
                    if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
                ]
        except OSError:
            return []
        return [path for path in folders if (not self._only or path.name == self._only) and self._is_run(path)]

    def _is_run(self, path: Path) -> bool:
        return run_id(path.name) in self._readers or any((path / name).exists() for name in (RUN_FILE, EVENTS_FILE))


def _newest(mark: Mark) -> int:
    return max((one[0] for one in (mark.events, mark.header) if one), default=0)
