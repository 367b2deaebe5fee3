"""The runs in a folder, their state, and removing those without any training."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.run import durable, lock
from whet.run.event import SESSION_START_KINDS, Event
from whet.run.events import History
from whet.run.folder import (
    CHECKPOINTS,
    EVENTS_FILE,
    INDEX_FILE,
    RECIPE_FILE,
    RUN_FILE,
    RUN_PARTS,
    Run,
    open_run,
    read_header,
    run_folder,
    run_folders,
)
from whet.run.proof import PROOF_FILE
from whet.run.strict_json import StrictModel

RunState = Literal["running", "done", "stopped", "failed", "never started", "unreadable"]

_INTERRUPTED = "left by an interrupted write"
PRUNE_AGE_SECONDS = 60.0
"""Younger ones are left alone: a process may be about to use them."""

_OWN_FILES = frozenset(
    (
        *(RUN_FILE, EVENTS_FILE, INDEX_FILE, RECIPE_FILE, PROOF_FILE, CHECKPOINTS, lock.LOCK_FILE),
        *(f"{p}.json" for p in RUN_PARTS),
    )
)


class RunStatus(StrictModel):
    """One line of `whet runs`."""

    path: Path
    state: RunState
    recipe: str | None = None
    step: int = 0
    total_steps: int | None = None
    last_loss: float | None = None
    goal: str | None = None
    """The name of the metric that counts."""
    goal_value: float | None = None
    """Its newest value."""
    age_seconds: float = 0.0
    """Since the last event, or since the run was made."""
    size_bytes: int = 0
    problem: str | None = None
    """Why it is unreadable."""


class Pruned(FrozenModel):
    """What was removed (or would be), and why."""

    path: Path
    reason: str
    size_bytes: int


def list_runs(root: Path) -> tuple[RunStatus, ...]:
    """The runs in a folder, by name."""
    now = time.time()
    found = (_read_status(path, now=now) for path in run_folders(root))
    # One that was removed while it was read is no damaged run.
    return tuple(run for run in found if run.state != "unreadable" or run.path.exists())


def run_state(run: Run | Path, *, history: History) -> RunState:
    """Whether a run is under way, and how it ended if it is not."""
    if lock.is_locked(run_folder(run)):
        return "running"
    turn = history.last(*SESSION_START_KINDS, "end")
    if turn is None:
        return "stopped" if history.last("step") else "never started"
    if turn.kind != "end":
        return "stopped"
    state = turn.get("state")
    return state if state in ("done", "stopped", "failed") else "done"


def total_steps(run: Run, *, history: History) -> int | None:
    """How many steps the run is to have: as its last start said, else as its config says."""
    for event in history.backwards(kinds=SESSION_START_KINDS):
        told = event.get("total_steps")
        if isinstance(told, int) and not isinstance(told, bool):
            return told
    wanted = run.config.get("max_steps")
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) else None


def goal_name(history: History) -> str | None:
    """The metric that counts, as the newest start that names one says."""
    names = (event.get("goal") for event in history.backwards(kinds=SESSION_START_KINDS))
    return next((name for name in names if isinstance(name, str)), None)


def prune(root: Path, *, dry: bool = False) -> tuple[Pruned, ...]:
    """Removes runs without an optimizer step or a checkpoint, and what interrupted writes left behind.

    Never removes a run that a process holds, one younger than a minute, or one with files that are not whet's.
    With `dry` it only says what it would remove.
    """
    found = [_Removable(path, _INTERRUPTED) for path in _leftovers(root)]
    for run in run_folders(root):
        with contextlib.suppress(FileNotFoundError):  # Somebody removes it meanwhile.
            if _is_old(run) and not lock.is_locked(run):
                found.extend(_removable(run))
    return tuple(pruned for find in found if (pruned := _remove(find, dry=dry)) is not None)


@dataclass(frozen=True, slots=True)
class _Removable:
    path: Path
    reason: str
    run: Path | None = None
    """The run whose lock must be held to remove it."""


def _removable(run: Path) -> Iterator[_Removable]:
    reason = _why_removable(run)
    if reason is not None:
        yield _Removable(run, reason, run)
        return
    for folder in (run, run / CHECKPOINTS):
        for path in _leftovers(folder):
            yield _Removable(path, _INTERRUPTED, run)


def _leftovers(folder: Path) -> list[Path]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []  # A copy may have left the checkpoints behind.
    return [path for path in found if durable.is_leftover(path) and _is_old(path)]


def _is_worth_keeping(checkpoint: Path) -> bool:
    """Whether it holds more than the state before the first step."""
    return not durable.is_leftover(checkpoint) and checkpoint.name != "step-000000000"


def foreign_files(path: Path) -> list[str]:
    """What lies in a run folder and was not put there by whet."""
    return sorted(c.name for c in path.iterdir() if c.name not in _OWN_FILES and not durable.is_leftover(c))


def _why_removable(path: Path) -> str | None:
    """Why a run may go; None when it must stay."""
    if foreign_files(path):
        return None
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        # Its target may be on a disk that is not there now.
        return None
    if checkpoints.exists() and any(_is_worth_keeping(child) for child in checkpoints.iterdir()):
        return None
    try:
        read_header(path)
        history = History(path)
    except (WhetError, OSError):
        return None
    if history.damaged or any("step" in block.kinds for block in history.layout.blocks):
        return None
    return "no optimizer step and no checkpoint"


def _remove(find: _Removable, *, dry: bool) -> Pruned | None:
    pruned = Pruned(path=find.path, reason=find.reason, size_bytes=_size_and_change(find.path)[0])
    if dry:
        return pruned
    if find.run is None:
        durable.remove(find.path)
        return pruned
    try:
        held = lock.acquire(find.run)
    except WhetError:
        return None  # Somebody has begun to use it.
    with held:
        if find.path == find.run and _why_removable(find.run) is None:
            return None
        durable.remove(find.path)
    return pruned


def _is_old(path: Path) -> bool:
    # A change in the future (the clock was set back) counts as young.
    return time.time() - _size_and_change(path)[1] > PRUNE_AGE_SECONDS


def _size_and_change(path: Path) -> tuple[int, float]:
    """The bytes under a path on the disk, and when the newest of it changed."""
    size, newest = 0, 0.0
    for found in _stats(path):
        newest = max(newest, found.st_mtime)
        size += found.st_blocks * 512
    return size, newest


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Of a path and all that lies under it; links are not followed."""
    folders: list[str] = []
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        folders = [str(path)] if stat.S_ISDIR(found.st_mode) else []
        yield found
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)


def _read_status(path: Path, *, now: float) -> RunStatus:
    size, changed = _size_and_change(path)
    try:
        run = open_run(path)
        history = History(run)
        step: Event | None = history.last("step")
        newest: Event | None = next(history.backwards(), None)
        goal = goal_name(history)
        evaluated = (event.number(goal) for event in history.backwards(kinds=("eval",))) if goal else iter(())
        return RunStatus(
            path=path,
            state=run_state(run, history=history),
            recipe=run.header.recipe,
            step=step.step if step else 0,
            total_steps=total_steps(run, history=history),
            last_loss=step.number("loss") if step else None,
            goal=goal,
            goal_value=next((value for value in evaluated if value is not None), None),
            age_seconds=max(0.0, now - (newest.time if newest else run.header.created)),
            size_bytes=size,
        )
    except (WhetError, OSError) as error:
        problem = error.what if isinstance(error, WhetError) else str(error)
        return RunStatus(
            path=path, state="unreadable", age_seconds=max(0.0, now - changed), size_bytes=size, problem=problem
        )
