"""Remove runs without any training, and leftovers of interrupted writes."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.run import durable, lock
from whet.run.events import History
from whet.run.folder import (
    CHECKPOINTS,
    EVENTS_FILE,
    INDEX_FILE,
    RECIPE_FILE,
    RUN_FILE,
    RUN_PARTS,
    read_header,
    run_folders,
)
from whet.run.proof import PROOF_FILE

# Keep younger runs, because a process may be about to use them.
PRUNE_AGE_SECONDS = 60.0

_INTERRUPTED = "left by an interrupted write"
_OWN_FILES = frozenset(
    (
        *(RUN_FILE, EVENTS_FILE, INDEX_FILE, RECIPE_FILE, PROOF_FILE, CHECKPOINTS, lock.LOCK_FILE),
        *(f"{part}.json" for part in RUN_PARTS),
    )
)


class Pruned(FrozenModel):
    """A path that was removed (or would be with `dry`), and the reason."""

    path: Path
    reason: str
    size_bytes: int


def prune(root: Path, *, dry: bool = False) -> tuple[Pruned, ...]:
    """Remove runs without an optimizer step or a checkpoint, and leftovers of interrupted writes.

    Locked runs, runs younger than a minute, and runs with files that whet did not write are kept. With `dry` nothing is
    removed.
    """
    pruned = [_remove(path, _INTERRUPTED, run=None, dry=dry) for path in _leftovers(root)]
    for run in run_folders(root):
        with contextlib.suppress(FileNotFoundError):  # Another process has removed it.
            if not _is_old(run) or lock.is_locked(run):
                continue
            reason = _why_removable(run)
            if reason is not None:
                pruned.append(_remove(run, reason, run=run, dry=dry))
            else:
                leftovers = [*_leftovers(run), *_leftovers(run / CHECKPOINTS)]
                pruned += [_remove(path, _INTERRUPTED, run=run, dry=dry) for path in leftovers]
    return tuple(one for one in pruned if one is not None)


def foreign_files(path: Path) -> list[str]:
    """Return the files in a run folder that whet did not write."""
    return sorted(c.name for c in path.iterdir() if c.name not in _OWN_FILES and not durable.is_leftover(c))


def disk_usage(path: Path) -> tuple[int, float]:
    """Return the disk usage of a path in bytes, and the unix time of its newest change."""
    size, newest = 0, 0.0
    for entry in _stats(path):
        newest = max(newest, entry.st_mtime)
        size += entry.st_blocks * 512
    return size, newest


def _leftovers(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []  # A copy of a run may lack the checkpoints.
    return [path for path in paths if durable.is_leftover(path) and _is_old(path)]


def _why_removable(path: Path) -> str | None:
    """Return the reason why a run can be removed, or None if it must be kept."""
    if foreign_files(path):
        return None
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        return None  # The target of the link may be on an unmounted disk.
    if checkpoints.exists() and any(_has_progress(child) for child in checkpoints.iterdir()):
        return None
    try:
        read_header(path)
        history = History(path)
    except (WhetError, OSError):
        return None
    if history.damaged or any("step" in block.kinds for block in history.layout.blocks):
        return None
    return "no optimizer step and no checkpoint"


def _has_progress(checkpoint: Path) -> bool:
    """Whether a checkpoint contains more than the state before the first step."""
    return not durable.is_leftover(checkpoint) and checkpoint.name != "step-000000000"


def _remove(path: Path, reason: str, *, run: Path | None, dry: bool) -> Pruned | None:
    """Remove a path, with the lock of its run if there is one. Return None if a process has begun to use the run."""
    pruned = Pruned(path=path, reason=reason, size_bytes=disk_usage(path)[0])
    if dry:
        return pruned
    try:
        held = contextlib.nullcontext() if run is None else lock.acquire(run)
    except WhetError:
        return None
    with held:
        if path == run and _why_removable(run) is None:
            return None
        durable.remove(path)
    return pruned


def _is_old(path: Path) -> bool:
    # A change in the future counts as young. It happens if the clock was set back.
    return time.time() - disk_usage(path)[1] > PRUNE_AGE_SECONDS


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Yield the stat of a path and of everything below it, without following links."""
    folders: list[str] = []
    with contextlib.suppress(OSError):
        own = os.lstat(path)
        folders = [str(path)] if stat.S_ISDIR(own.st_mode) else []
        yield own
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
