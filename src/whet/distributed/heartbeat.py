"""Heartbeats and stall detection, which end a run if a rank has died, hangs or computes forever.

If a rank is killed, the launcher asks the other ranks to stop, but they may be waiting for it inside a step. If a rank
is frozen (stopped, or suspended with its machine), the launcher does not detect it, and the timeout of NCCL and gloo is
of little use, because it must exceed the longest evaluation. A separate thread sends heartbeats, even while the main
thread hangs or computes forever. Each heartbeat therefore reports whether the main thread makes progress.
"""

import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

from whet.base.errors import LostRankError
from whet.base.origin import code_origin

# Do not import the store at run time, because it imports torch, which stall detection does not need.
if TYPE_CHECKING:
    from whet.distributed.store import RankStore

MIN_STALL_SECONDS = 20.0
"""Minimum of the stall limit, which is the number of seconds without progress after which a rank is stalled."""
STALL_FACTOR = 20.0
"""The stall limit as a multiple of the longest recent time between two signs of progress."""
WARMUP_SECONDS = 300.0
"""The stall limit during warm-up, when no earlier times are known.

Compiled models have no limit during warm-up. After it, this is their minimum, because a step may compile a new shape.
"""
WARMUP_PHASES = 15
"""Number of phases in the warm-up: five steps with three phases each (step, logging, and reading the next batch)."""
_WINDOW = 32
"""Number of recent times on which the stall limit is based."""

INTERVAL_SECONDS = 1.0
"""Seconds between heartbeats."""
LOST_AFTER_SECONDS = 15.0
"""A rank is lost after this many seconds without a heartbeat."""
EXIT_GRACE_SECONDS = 5.0
"""Seconds in which a rank can exit normally after another rank is lost. Then it is killed, because it may hang in a
collective."""
LEFT_MARK = "left"
"""Content of the last heartbeat of a rank that exits normally."""

Activity = Literal["free", "waits", "works"]
_NULL_CONTEXT = contextlib.nullcontext()
Batch = TypeVar("Batch")


class StallDetector:
    """Tracks the activity of the main thread of this rank, and when it began. Other threads may read the status.

    A rank must make progress inside a step and while it reads the next batch of an epoch. Every micro-batch counts as
    progress. The time limit is based on earlier times. Setup, evaluation, saving and user code between steps have no
    limit.
    """

    def __init__(self, *, is_single_process: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_single_process = is_single_process
        self._clock = clock
        self._activity: tuple[Activity, str, float] = "free", "", clock()
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._num_phases = 0
        self.is_compiled = False
        """Whether the model is compiled. A step may then include a compilation."""

    def working(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank must make progress. `what` names the activity in messages."""
        return _NULL_CONTEXT if self._is_single_process else self._working(what)

    def progress(self) -> None:
        """Record progress and restart the time limit."""
        activity, what, since = self._activity
        if activity == "works":
            now = self._clock()
            self._times.append(now - since)
            self._activity = "works", what, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark this rank as waiting for other ranks inside the `with` block."""
        self.progress()
        activity, what, _ = self._activity
        self._activity = "waits", what, self._clock()
        try:
            yield
        finally:
            self._activity = activity, what, self._clock()

    def reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, with a time limit for each one except the first, which starts the data workers."""
        return batches if self._is_single_process else self._reading(batches)

    def restart(self) -> None:
        """Restart the time limit after the process was suspended."""
        activity, what, _ = self._activity
        self._activity = activity, what, self._clock()

    def status(self) -> str:
        """Return the status that is sent to other ranks.

        It is "free" (no limit is exceeded), "waits" (in a collective), or "late".

        "late" is followed by "inside" if the main thread seems to wait in a collective, otherwise by "alone", and then
        by the activity and the source line.
        """
        activity, what, since = self._activity
        if activity != "works" or self._clock() - since <= self._limit():
            return "waits" if activity == "waits" else "free"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return f"late {'inside' if _is_in_collective(frame) else 'alone'} {what}{_source_line(frame)}"

    def _limit(self) -> float:
        if self._num_phases < WARMUP_PHASES:
            return float("inf") if self.is_compiled else WARMUP_SECONDS
        return max(
            WARMUP_SECONDS if self.is_compiled else MIN_STALL_SECONDS, STALL_FACTOR * max(self._times, default=0.0)
        )

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        self._activity = "works", what, self._clock()
        try:
            yield
            self.progress()
            self._num_phases += 1
        finally:
            self._activity = "free", "", self._clock()

    def _reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        context: contextlib.AbstractContextManager[None] = _NULL_CONTEXT
        while True:
            with context:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            context = self._working("the next batch")


def find_stalled_rank(statuses: dict[int, str]) -> tuple[int | None, str] | None:
    """Return the rank for which all other ranks wait, and its activity. Return None if no rank is stalled.

    If all ranks wait for each other, the rank in the result is None.

    >>> find_stalled_rank({0: "late inside step 7", 1: "late alone step 7, at loss.py:3"})
    (1, 'step 7, at loss.py:3')
    >>> find_stalled_rank({0: "waits", 1: "free"}), find_stalled_rank({0: "waits", 1: "waits"})
    (None, None)
    >>> find_stalled_rank({0: "late inside step 7", 1: "late inside step 7"})
    (None, 'step 7')
    """
    late = {rank: status.split(" ", 2)[1:] for rank, status in statuses.items() if status.startswith("late ")}
    if not late or any(status == "free" for status in statuses.values()):
        return None
    alone = [rank for rank, (how, _) in late.items() if how == "alone"]
    # If only one rank is late, it is the stalled rank, even if it seems to wait in a collective.
    stalled = alone or ([*late] if len(late) == 1 else [])
    return (stalled[0], late[stalled[0]][1]) if stalled else (None, next(iter(late.values()))[1])


def _is_in_collective(frame: FrameType | None) -> bool:
    """Return whether the frame is in a collective or in the backward pass, where a thread may wait for other ranks."""
    path = "" if frame is None else frame.f_code.co_filename.replace(os.sep, "/")
    return "/torch/distributed/" in path or path.endswith("/torch/autograd/graph.py")


def _source_line(frame: FrameType | None) -> str:
    """Return the innermost source line outside torch and the standard library as ", at FILE:LINE", or ""."""
    while frame is not None:
        file = frame.f_code.co_filename
        if code_origin(file) not in ("torch", "python"):
            return f", at {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Heartbeat:
    """Sends the heartbeat of this rank, and watches other ranks. Rank 0 watches all others, and they watch rank 0."""

    def __init__(
        self, store: "RankStore", stall_detector: StallDetector, *, lost_seconds: float = LOST_AFTER_SECONDS
    ) -> None:
        self._store = store
        self._stall_detector = stall_detector
        rank, size = store.rank, store.size
        self._watched = list(range(1, size)) if rank == 0 else [0]
        # If rank 0 is silent, rank 1 reports it first, and the other ranks receive its message before their own limit.
        self._patience = lost_seconds if rank < 2 else lost_seconds + 2 * INTERVAL_SECONDS
        self._seen: dict[int, tuple[str, float]] = {}
        """The last heartbeat of each watched rank, and the time at which it changed."""
        self._seen_lock = threading.Lock()
        """Protects `_seen`: `_communicate` adds ranks while `_count` iterates over it or replaces it."""
        self._processes: dict[int, dict[str, Any]] = {}
        self._answered_at = time.monotonic()
        self._has_left = threading.Event()
        self.lost: str | None = None
        """A message that names the lost rank, or None while all ranks are alive."""
        self.notify: Callable[[str], None] = lambda _line: None
        """A function that is called with the message on the rank that detects the loss."""
        store.check_lost = self.check_lost
        me = psutil.Process()
        # A process is identified by its pid and its creation time, because a pid can be reused.
        process = {"host": platform.node(), "pid": me.pid, "created": me.create_time()}
        store.post(f"process/{rank}", json.dumps(process))
        store.post(f"heartbeat/{rank}", "0 free")

    def start(self) -> None:
        """Start the threads. Before this, all ranks must have posted their first heartbeat."""
        for target in (self._communicate, self._count):
            threading.Thread(target=target, daemon=True, name="whet-heartbeat").start()

    def leave(self) -> None:
        """Post that this rank exits normally, so that it does not count as lost."""
        self._has_left.set()
        self._store.post(f"heartbeat/{self._store.rank}", LEFT_MARK)

    def check_lost(self) -> None:
        """Raise LostRankError if a rank is known to be lost."""
        if self.lost is not None:
            raise LostRankError(
                "another rank does not respond",
                got=self.lost,
                try_="run the same command again to resume from the last checkpoint",
            )

    def _communicate(self) -> None:
        """Send and receive heartbeats. This runs in a separate thread, because it may wait for the network."""
        count = 0
        while not self._has_left.wait(INTERVAL_SECONDS) and self.lost is None:
            count += 1
            try:
                self._store.post(f"heartbeat/{self._store.rank}", f"{count} {self._stall_detector.status()}")
                heartbeats = self._store.find_all([f"heartbeat/{rank}" for rank in self._watched])
                message = self._store.find("lost")
            except RuntimeError:
                # The store does not respond. If this lasts too long, `_count` ends this rank.
                continue
            now = self._answered_at = time.monotonic()
            with self._seen_lock:
                for rank, heartbeat in zip(self._watched, heartbeats, strict=True):
                    if self._seen.get(rank, ("", 0.0))[0] != heartbeat:
                        self._seen[rank] = heartbeat, now
            if message is not None and not self._has_left.is_set():
                self._end(message)
            elif (lost := self._find_lost_rank()) is not None:
                self._report_lost(lost, "has ended unexpectedly")
            elif self._store.rank == 0:
                self._check_stalls()

    def _count(self) -> None:
        """Check how long the store and the other ranks have been silent. This thread never waits for the network."""
        before = time.monotonic()
        while not self._has_left.wait(INTERVAL_SECONDS) and self.lost is None:
            now = time.monotonic()
            if now - before > 3 * INTERVAL_SECONDS:
                # This process was suspended, perhaps with all other ranks (Ctrl-Z, or a closed laptop). Restart all
                # time limits.
                self._answered_at = now
                self._stall_detector.restart()
                with self._seen_lock:
                    self._seen = {rank: (heartbeat, now) for rank, (heartbeat, _) in self._seen.items()}
            before = now
            if now - self._answered_at > self._patience:
                self._end(f"the store of the ranks has not answered for {self._patience:.0f} s")
                return
            with self._seen_lock:
                silent = [
                    rank
                    for rank, (heartbeat, seen_at) in self._seen.items()
                    if heartbeat != LEFT_MARK and now - seen_at > self._patience
                ]
            if silent:
                self._report_lost(silent[0], f"has sent no heartbeat for {self._patience:.0f} s, and is ended")
                return

    def _find_lost_rank(self) -> int | None:
        """Return a watched rank on this machine whose process has ended without a normal exit, or None."""
        for rank in self._watched:
            if self._seen[rank][0] == LEFT_MARK or self._process(rank) is not None or not self._is_local(rank):
                continue
            # The rank may have exited normally after its last heartbeat was read, so read the heartbeat again.
            if self._store.find(f"heartbeat/{rank}") != LEFT_MARK:
                return rank
        return None

    def _check_stalls(self) -> None:
        """End the run if all other ranks wait for one stalled rank, or all ranks wait for each other."""
        statuses = {rank: heartbeat.partition(" ")[2] or "free" for rank, (heartbeat, _) in self._seen.items()}
        stalled = find_stalled_rank({self._store.rank: self._stall_detector.status(), **statuses})
        if stalled is None:
            return
        rank, where = stalled
        if rank is None:
            self._end_all(f"all {self._store.size} ranks wait for each other in {where}, and are ended")
        else:
            self._report_lost(rank, f"makes no progress in {where}, while the others wait, and is ended")

    def _report_lost(self, rank: int, how: str) -> None:
        self._end_all(f"rank {rank} of {self._store.size} {how}", lost=str(rank))

    def _end_all(self, line: str, *, lost: str = "") -> None:
        """Report the problem to the user and to all ranks, and end this rank."""
        self.notify(line)
        self._store.post("lost", f"{lost}: {line}")
        self._end(f"{lost}: {line}")

    def _end(self, message: str) -> None:
        """Kill the lost rank's process if it is on this machine. Exit this process if it does not exit in time."""
        rank, _, line = message.partition(": ") if ": " in message else ("", "", message)
        self.lost = line
        if rank.isdecimal() and int(rank) != self._store.rank and (hung := self._process(int(rank))) is not None:
            with contextlib.suppress(psutil.Error):
                hung.send_signal(signal.SIGKILL)
        if not self._has_left.wait(EXIT_GRACE_SECONDS):
            # Do not use sys.exit, because it would end only this thread. The main thread may hang in a collective.
            os._exit(LostRankError.exit_code)

    def _is_local(self, rank: int) -> bool:
        return self._process_info(rank).get("host") == platform.node()

    def _process(self, rank: int) -> psutil.Process | None:
        """Return the process of a rank, or None if it is not on this machine, has ended, or its pid was reused."""
        if not self._is_local(rank):
            return None
        with contextlib.suppress(psutil.Error):
            info = self._process_info(rank)
            process = psutil.Process(info["pid"])
            if process.create_time() == info["created"] and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def _process_info(self, rank: int) -> dict[str, Any]:
        if rank not in self._processes:
            self._processes[rank] = json.loads(self._store.find(f"process/{rank}") or "{}")
        return self._processes[rank]
