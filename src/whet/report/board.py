"""Which runs of a folder does a live view show, and how are they looked at often without reading much?

Every look asks the system for the size of each events file; only what is shown and has changed is read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from whet.base.errors import WhetError
from whet.base.record import Record
from whet.report.glance import Glance, glance, unreadable
from whet.run.folder import EVENTS_FILE, RUN_FILE, groups_of_runs, open_run, run_folders
from whet.run.live import LiveHistory
from whet.run.lock import is_locked

LIVELY_SECONDS = 120.0
"""Runs that changed since stand first, by name, so that their rows keep their place."""
_CURVE_POINTS = 200
_GROUPS_SECONDS = 5.0

Stamp = tuple[int, int, int]


class Board(Record):
    """What a live view shows at one moment."""

    folder: Path
    now: float
    num_runs: int
    rows: tuple[Glance, ...]
    """As many as there is room for."""
    first: int = 0
    """Which of all runs the first row is."""
    chosen: int | None = None
    """Which of the rows is shown in full."""
    groups: dict[Path, int] = Field(default_factory=dict)
    """Folders beside the runs that hold some, as those of a search do, and how many each."""


@dataclass(slots=True)
class _Seen:
    stamp: Stamp
    glance: Glance
    history: LiveHistory | None
    """Kept, so that only new bytes are read; None for what cannot be read."""


class Lookout:
    """Looks at the runs in a folder, or at the one run that it is."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._seen: dict[Path, _Seen] = {}
        self._chosen: Path | None = None
        self._num_lively = 0
        self._groups: dict[Path, int] = {}
        self._grouped_at = -_GROUPS_SECONDS

    def look(self, *, rows: int, move: int = 0) -> Board:
        """The runs as they are now, `rows` of them; `move` chooses the one that many places further down."""
        now = self._clock()
        paths = self._paths(now)
        position = self._choose(paths, move)
        first = max(0, min(position - rows // 2, len(paths) - rows))
        shown = paths[first : first + rows]
        seen = {path: self._glance(path) for path in shown}
        self._seen = seen
        return Board(
            folder=self._folder,
            now=now,
            num_runs=len(paths),
            rows=tuple(seen[path].glance for path in shown),
            first=first,
            chosen=position - first if shown else None,
            groups=self._groups_of(now),
        )

    def _groups_of(self, now: float) -> dict[Path, int]:
        """Looked for now and then: it is a look into every folder that is no run."""
        if (self._folder / RUN_FILE).is_file():
            return {}
        if not 0 <= now - self._grouped_at < _GROUPS_SECONDS:
            self._groups, self._grouped_at = groups_of_runs(self._folder), now
        return self._groups

    def _choose(self, paths: list[Path], move: int) -> int:
        """Until somebody chooses, it is the run that was made last of those at work."""
        if self._chosen in paths:
            position = paths.index(self._chosen)
        else:
            lively = range(self._num_lively)
            position = max(lively, key=lambda place: _made(paths[place]), default=0)
        if move and paths:
            position = max(0, min(position + move, len(paths) - 1))
            self._chosen = paths[position]
        return position

    def _paths(self, now: float) -> list[Path]:
        """The liveliest first."""
        if (self._folder / RUN_FILE).is_file():
            return [self._folder.absolute()]
        changes = {path: stamp_of(path)[2] / 1e9 for path in run_folders(self._folder.absolute())}
        lively = [path for path in changes if now - changes[path] < LIVELY_SECONDS]
        self._num_lively = len(lively)
        quiet = sorted(changes.keys() - set(lively), key=lambda path: (-changes[path], path))
        return lively + quiet

    def _glance(self, path: Path) -> _Seen:
        stamp, before = stamp_of(path), self._seen.get(path)
        history = before.history if before else None
        # What could not be read is looked at each time: it may be on its way here, file by file.
        if before and history is not None and before.stamp == stamp and not _is_other_state(before.glance):
            return before
        try:
            run = open_run(path)
            if history is None:
                history = LiveHistory(run)
            else:
                history.refresh()
            return _Seen(stamp, glance(run, history, points=_CURVE_POINTS), history)
        except (WhetError, OSError) as error:
            return _Seen(stamp, unreadable(path, error, changed=stamp[2] / 1e9), None)


def stamp_of(path: Path) -> Stamp:
    """Changes whenever the events of a run do; all zero where there are none."""
    try:
        stat = (path / EVENTS_FILE).stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _made(path: Path) -> float:
    try:
        return (path / RUN_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _is_other_state(seen: Glance) -> bool:
    """Whether a process has come or gone without a word in the log."""
    try:
        return is_locked(seen.path) != (seen.state == "running")
    except (WhetError, OSError):
        return False
