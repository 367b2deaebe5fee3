"""The status of one run in a list, updated by reading only new bytes."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from whet.base.errors import WhetError
from whet.report.page.html import shorten
from whet.run.disk import open_regular_file
from whet.run.event import SESSION_START_KINDS, Event, parse_event
from whet.run.events import History
from whet.run.folder import EVENTS_FILE, RUN_FILE, Run, open_run
from whet.run.lock import LOCK_FILE, is_locked
from whet.run.prune import RunState, goal_name, run_state, total_steps
from whet.run.strict_json import StrictModel

_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class LogEnds:
    """The first and the last events of a log."""

    events: tuple[Event, ...]
    position: int
    """Behind the last whole line."""

    def last(self, *kinds: str) -> Event | None:
        """The newest of these kinds, as far as can be seen from the ends."""
        return next((event for event in reversed(self.events) if event.kind in kinds), None)

    def told(self, name: str) -> object:
        """What the newest start or resume that says anything about it says."""
        values = (event.get(name) for event in reversed(self.events) if event.kind in SESSION_START_KINDS)
        return next((value for value in values if value is not None), None)


def read_log_ends(folder: Path) -> LogEnds:
    """Reads a megabyte at most, whatever the size of the log."""
    with open_regular_file(folder / EVENTS_FILE) as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(min(_HEAD_BYTES, size))
        begin = file.seek(max(len(head), size - _TAIL_BYTES))
        tail = file.read(size - begin)
    whole = tail[: tail.rfind(b"\n") + 1]
    lines = [*head.split(b"\n")[:-1], *whole.split(b"\n")[1:]]
    events = tuple(event for line in lines if line and (event := parse_event(line)) is not None)
    return LogEnds(events=events, position=begin + len(whole))


_MAX_NEW_BYTES = 1024**2
"""Bytes that are read as news; behind more, the run is looked at anew, with its index."""
_MAX_SCAN_BYTES = 8 * 1024**2
"""Bytes of a log that are read for its line in a list; of more without an index, only the ends."""
_SLOW_SECONDS = 0.2
"""What takes longer only to fail is left alone"""
_REST_SECONDS = 30.0
"""for so long, unless it changes."""
_MAX_TEXT = 300


class ListedRun(StrictModel):
    """What a list shows of a run."""

    id: str
    """Stands for the run in addresses; says nothing about where it lies."""
    name: str
    state: RunState
    recipe: str | None = None
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    goal: str | None = None
    goal_value: float | None = None
    changed: float = 0.0
    """Unix seconds of the newest event, or when the run was made."""
    problem: str | None = None
    """Why it is unreadable."""


@dataclass(frozen=True, slots=True)
class RunStamp:
    """What tells without reading whether a run has changed."""

    events: tuple[int, int, int] | None
    header: tuple[int, int, int] | None
    lock: tuple[int, int, int] | None
    """Whoever takes or releases it writes in it: a run is under way long before its first word."""

    @classmethod
    def of(cls, folder: Path | str) -> "RunStamp":
        """The mark of a run folder now; of thousands every second, so without making paths."""
        names = {"events": EVENTS_FILE, "header": RUN_FILE, "lock": LOCK_FILE}
        return cls(**{part: file_stamp(f"{folder}/{name}") for part, name in names.items()})

    @property
    def newest(self) -> int:
        """When it last changed, in nanoseconds; 0 for what is no run."""
        return max((one[0] for one in (self.events, self.header) if one), default=0)


def run_id(name: str) -> str:
    """What stands for a run in addresses."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:20]


def hide_path(text: str, folder: Path) -> str:
    """What is said about a run, without where on the disk it lies."""
    return text.replace(f"{folder}", folder.name)


class _LongScanError(Exception):
    """The log would have to be read as a whole."""


def _stop_long_scan(done: int, total: int) -> None:
    if total - done > _MAX_SCAN_BYTES:
        raise _LongScanError


class StatusReader:
    """Reads one run, again and again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark: RunStamp | None = None
        self._unread: RunStamp | None = None
        self._rests_until = 0.0
        self._position = 0
        self._last_turn: Event | None = None
        self.line = ListedRun(id=run_id(folder.name), name=_clip(folder.name), state="never started")

    def refresh(self, mark: RunStamp) -> bool:
        """Reads what is new, if anything; whether the line is another one now."""
        before, begun = self.line, time.monotonic()
        if mark == self._unread and begun < self._rests_until:
            return False
        try:
            if mark != self._mark:
                if not self._read_news(mark):
                    self._look_anew()
                self._mark = mark
            elif self.line.state == "running" and not is_locked(self._folder):
                self._set_state(is_running=False)  # It died without a word.
        except (WhetError, OSError) as error:
            told = f"{error.what}: {error.got}" if isinstance(error, WhetError) else str(error)
            problem = hide_path(told, self._folder)
            self.line = ListedRun(
                id=before.id, name=before.name, state="unreadable", changed=mark.newest / 1e9, problem=_clip(problem)
            )
            # Looked at again each time: it may be on its way here, file by file. But a disk may need seconds to fail.
            self._mark, self._unread = None, mark
            if time.monotonic() - begun > _SLOW_SECONDS:
                self._rests_until = begun + _REST_SECONDS
        return self.line != before

    def _look_anew(self) -> None:
        run = open_run(self._folder)
        try:
            history = History(run, progress=_stop_long_scan)
        except _LongScanError:
            self._look_at_ends(run)
            return
        self._position = history.layout.end
        self._last_turn = history.last(*SESSION_START_KINDS, "end")
        step, newest, goal = history.last("step"), next(history.backwards(), None), goal_name(history)
        evaluated = (event.number(goal) for event in history.backwards(kinds=("eval",))) if goal else iter(())
        self.line = ListedRun(
            id=self.line.id,
            name=self.line.name,
            state=run_state(run, history=history),
            recipe=_clip(run.header.recipe),
            step=step.step if step else 0,
            total_steps=total_steps(run, history=history),
            loss=step.number("loss") if step else None,
            goal=_clip(goal) if goal else None,
            goal_value=next((value for value in evaluated if value is not None), None),
            changed=newest.time if newest else run.header.created,
        )

    def _look_at_ends(self, run: Run) -> None:
        ends = read_log_ends(self._folder)
        self._position = ends.position
        self._last_turn = ends.last(*SESSION_START_KINDS, "end")
        step, total, goal = ends.last("step"), ends.told("total_steps"), ends.told("goal")
        evaluated = ends.last("eval")
        self.line = ListedRun(
            id=self.line.id,
            name=self.line.name,
            state="stopped",
            recipe=_clip(run.header.recipe),
            step=step.step if step else 0,
            total_steps=total if type(total) is int else None,
            loss=step.number("loss") if step else None,
            goal=_clip(goal) if isinstance(goal, str) else None,
            goal_value=evaluated.number(goal) if evaluated and isinstance(goal, str) else None,
            changed=ends.events[-1].time if ends.events else run.header.created,
        )
        self._set_state(is_running=is_locked(self._folder))

    def _read_news(self, mark: RunStamp) -> bool:
        """Reads on from where we were; False where that is not enough to know the line."""
        if self._mark is None or self._mark.events is None or mark.events is None:
            return False
        _, size, inode = mark.events
        is_same = mark.header == self._mark.header and inode == self._mark.events[2] and size >= self._mark.events[1]
        if not is_same or self.line.state == "unreadable" or size - self._position > _MAX_NEW_BYTES:
            return False
        with open_regular_file(self._folder / EVENTS_FILE) as file:
            file.seek(self._position)
            data = file.read(_MAX_NEW_BYTES)
        data = data[: data.rfind(b"\n") + 1]
        found = [event for line in data.split(b"\n") if line and (event := parse_event(line)) is not None]
        if any(event.kind in SESSION_START_KINDS for event in found):
            return False  # Steps may have become void.
        self._position += len(data)
        self._last_turn = next((event for event in reversed(found) if event.kind == "end"), self._last_turn)
        values: dict[str, object] = {}
        for event in found:
            values["changed"] = event.time
            if event.kind == "step":
                values |= {"step": event.step, "loss": event.number("loss")}
            elif event.kind == "eval" and self.line.goal and (value := event.number(self.line.goal)) is not None:
                values["goal_value"] = value
        self.line = self.line.model_copy(update=values)
        self._set_state(is_running=is_locked(self._folder))
        return True

    def _set_state(self, *, is_running: bool) -> None:
        state: RunState = "running" if is_running else self._state_at_rest()
        self.line = self.line.model_copy(update={"state": state})

    def _state_at_rest(self) -> RunState:
        if self._last_turn is None:
            return "stopped" if self.line.step else "never started"
        if self._last_turn.kind != "end":
            return "stopped"
        told = self._last_turn.get("state")
        return told if told in ("stopped", "failed") else "done"


def file_stamp(path: str) -> tuple[int, int, int] | None:
    """Another one whenever a file is; None where there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _clip(text: str) -> str:
    return str(shorten(text, most=_MAX_TEXT))
