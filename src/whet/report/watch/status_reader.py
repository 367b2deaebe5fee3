"""The status of one run in a list, updated by reading only new bytes."""

import hashlib
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import WhetError
from whet.report.page.html import shorten
from whet.report.run_status import RunState, RunStatus, ended_state, loss_sparkline, read_status
from whet.run.disk import open_regular_file
from whet.run.event import SESSION_START_KINDS, Event, parse_event
from whet.run.events import History
from whet.run.folder import EVENTS_FILE, RUN_FILE, Run, open_run
from whet.run.lock import LOCK_FILE, is_locked

# If there are more new bytes than this, read the run again with its index.
_MAX_NEW_BYTES = 1024**2
# Maximum bytes of a log that are read for a list. Of a longer log without an index, only both ends are read.
_MAX_SCAN_BYTES = 8 * 1024**2
_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 1024**2
_SLOW_SECONDS = 0.2
# A run that takes longer than `_SLOW_SECONDS` to fail is retried only after this time, unless it changes.
_RETRY_SECONDS = 30.0
_MAX_TEXT = 300
# The sparkline is drawn again when a run has this many times as many steps.
_SPARKLINE_GROWTH = 1.2

FileStamp = tuple[int, int, int]


def file_stamp(path: str) -> FileStamp | None:
    """Return modification time, size and inode of a file, or None if it does not exist."""
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


@dataclass(frozen=True, slots=True)
class RunStamp:
    """File stamps that show whether a run has changed without reading it."""

    events: FileStamp | None
    header: FileStamp | None
    lock: FileStamp | None
    """Stamp of the lock file. It changes when a process takes the lock, before the first event."""

    @classmethod
    def of(cls, folder: Path | str) -> "RunStamp":
        """Return the stamp of a run folder.

        This is called for thousands of runs every second, so it creates no Path objects."""
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
    """Return the status as JSON for a page, with an id instead of a path."""
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
        self._position = 0
        self._last_turn: Event | None = None
        """Newest start, resume or end event."""
        self._next_sparkline = 0.0
        """Step from which on the sparkline is drawn again."""
        self.status = RunStatus(path=folder, state="never started")

    def refresh(self, stamp: RunStamp) -> bool:
        """Read new events. Return whether the status changed."""
        before, begun = self.status, time.monotonic()
        if stamp == self._failed_stamp and begun < self._retry_at:
            return False
        try:
            if stamp != self._stamp:
                if not self._read_new_bytes(stamp):
                    self._read_all()
                self._stamp = stamp
            elif self.status.state == "running" and not is_locked(self._folder):
                self._set_state(is_running=False)  # The process died without writing an end.
        except (WhetError, OSError) as error:
            problem = f"{error.what}: {error.got}" if isinstance(error, WhetError) else str(error)
            self.status = RunStatus(
                path=self._folder,
                state="unreadable",
                updated=stamp.newest / 1e9,
                problem=hide_path(problem, self._folder),
            )
            # Retry at every scan, because the run may be being copied. But a disk may take seconds to fail.
            self._stamp, self._failed_stamp = None, stamp
            if time.monotonic() - begun > _SLOW_SECONDS:
                self._retry_at = begun + _RETRY_SECONDS
        return self.status != before

    def _read_all(self) -> None:
        run = open_run(self._folder)
        try:
            history = History(run, progress=_stop_long_scan)
        except _LongScanError:
            self._read_both_ends(run)
            return
        self._position = history.layout.end
        self._last_turn = history.last(*SESSION_START_KINDS, "end")
        status = read_status(run, history=history)
        self._next_sparkline = _SPARKLINE_GROWTH * status.step + 1
        self.status = status.model_copy(update={"sparkline": loss_sparkline(history, status.losses)})

    def _read_both_ends(self, run: Run) -> None:
        """Read the status from the first and last megabyte of the log."""
        events, self._position = _read_log_ends(self._folder)
        self._last_turn = _last(events, *SESSION_START_KINDS, "end")
        step, evaluation = _last(events, "step"), _last(events, "eval")
        total, goal = _start_value(events, "total_steps"), _start_value(events, "goal")
        self._next_sparkline = math.inf
        self.status = RunStatus(
            path=self._folder,
            state="stopped",
            recipe=run.header.title,
            step=step.step if step else 0,
            total_steps=total if type(total) is int else None,
            loss=step.number("loss") if step else None,
            goal=goal if isinstance(goal, str) else None,
            goal_value=evaluation.number(goal) if evaluation and isinstance(goal, str) else None,
            updated=events[-1].time if events else run.header.created,
        )
        self._set_state(is_running=is_locked(self._folder))

    def _read_new_bytes(self, stamp: RunStamp) -> bool:
        """Continue from the last position. Return False if the run must be read again."""
        if self._stamp is None or self._stamp.events is None or stamp.events is None:
            return False
        _, size, inode = stamp.events
        # A replaced run.json, another inode or a shorter log means that this is a different run.
        is_same = stamp.header == self._stamp.header and inode == self._stamp.events[2]
        if not is_same or size < self._stamp.events[1] or self.status.state == "unreadable":
            return False
        if size - self._position > _MAX_NEW_BYTES:
            return False
        with open_regular_file(self._folder / EVENTS_FILE) as file:
            file.seek(self._position)
            data = file.read(_MAX_NEW_BYTES)
        data = data[: data.rfind(b"\n") + 1]  # A torn last line is read next time.
        events = _parse_lines(data.split(b"\n"))
        if any(event.kind in SESSION_START_KINDS for event in events):
            return False  # A resume may have voided steps.
        if any(event.kind == "step" and event.step >= self._next_sparkline for event in events):
            return False
        self._position += len(data)
        self._last_turn = _last(events, "end") or self._last_turn
        update: dict[str, object] = {}
        losses = dict(self.status.losses)
        for event in events:
            update["updated"] = event.time
            if event.kind == "step":
                losses |= {name: value for name in losses if (value := event.number(name)) is not None}
                update |= {"step": event.step, "loss": event.number("loss"), "losses": dict(losses)}
            elif event.kind == "eval" and self.status.goal and (value := event.number(self.status.goal)) is not None:
                update["goal_value"] = value
        self.status = self.status.model_copy(update=update)
        self._set_state(is_running=is_locked(self._folder))
        return True

    def _set_state(self, *, is_running: bool) -> None:
        ended = ended_state(self._last_turn, has_steps=self.status.step > 0)
        state: RunState = "running" if is_running else ended
        self.status = self.status.model_copy(update={"state": state})


class _LongScanError(Exception):
    """Raised if the whole log would have to be read."""


def _stop_long_scan(done: int, total: int) -> None:
    if total - done > _MAX_SCAN_BYTES:
        raise _LongScanError


def _read_log_ends(folder: Path) -> tuple[list[Event], int]:
    """Return the first and last events of a log, and the position after its last complete line."""
    with open_regular_file(folder / EVENTS_FILE) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(min(_HEAD_BYTES, size))
        begin = file.seek(max(len(head), size - _TAIL_BYTES))
        tail = file.read(size - begin)
    complete = tail[: tail.rfind(b"\n") + 1]
    # The last line of the head and the first line of the tail are incomplete, so drop them.
    events = _parse_lines([*head.split(b"\n")[:-1], *complete.split(b"\n")[1:]])
    return events, begin + len(complete)


def _parse_lines(lines: list[bytes]) -> list[Event]:
    return [event for line in lines if line and (event := parse_event(line)) is not None]


def _last(events: list[Event], *kinds: str) -> Event | None:
    return next((event for event in reversed(events) if event.kind in kinds), None)


def _start_value(events: list[Event], name: str) -> object:
    """Return the value of a field in the newest start or resume event that has it, or None."""
    values = (event.get(name) for event in reversed(events) if event.kind in SESSION_START_KINDS)
    return next((value for value in values if value is not None), None)
