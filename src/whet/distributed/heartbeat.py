"""Heartbeats and stall detection: end a run whose rank died, hangs or computes forever.

The launcher sees a rank that was killed and asks the others to stop, but they may be waiting for it inside a step. A
rank that is frozen (stopped, or suspended with its machine) is seen by nobody: NCCL and gloo know no shorter timeout than
the longest evaluation. The heartbeat is sent by a thread, which still runs in a rank that computes forever, so each
heartbeat also says whether the main thread makes progress.
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

# Not imported at run time: stall detection needs no torch, the store does.
if TYPE_CHECKING:
    from whet.distributed.store import RankStore

MIN_STALL_SECONDS = 20.0
"""A rank that made progress a moment ago is not stalled before this."""
STALL_FACTOR = 20.0
"""A rank is stalled if it takes this many times as long as the longest of its recent times."""
WARMUP_SECONDS = 300.0
"""For the first steps, of which nothing is known, and for compiled ones: a new shape is compiled inside a step."""
WARMUP_PHASES = 15
"""Five steps of three phases: the step, its logging, and reading the next batch."""
_WINDOW = 32
_STDLIB = Path(os.__file__).parent

INTERVAL_SECONDS = 1.0
LOST_AFTER_SECONDS = 15.0
"""A rank without a heartbeat for this long counts as lost."""
EXIT_GRACE_SECONDS = 5.0
"""Until a rank that learns of a lost one, and hangs in a collective, ends itself."""
LEFT_MARK = "left"

Activity = Literal["free", "waits", "works"]
_NULL_CONTEXT = contextlib.nullcontext()
Batch = TypeVar("Batch")


class StallDetector:
    """What the main thread of this rank does, and since when; other threads may ask.

    Inside a step, and while the next batch of an epoch is read, a rank must make progress: every micro-batch counts, and
    the limit follows from earlier times. Everything else (setup, evaluation, saving, the user's code between steps) may
    take as long as it likes.
    """

    def __init__(self, *, is_single_process: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_single_process = is_single_process
        self._clock = clock
        self._activity: tuple[Activity, str, float] = "free", "", clock()
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._num_phases = 0
        self.is_compiled = False
        """Whether a step may wait for a compiler."""

    def working(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While entered, this rank must make progress."""
        return _NULL_CONTEXT if self._is_single_process else self._working(what)

    def progress(self) -> None:
        """Some of the work is done."""
        activity, what, since = self._activity
        if activity == "works":
            now = self._clock()
            self._times.append(now - since)
            self._activity = "works", what, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, this rank waits for all others."""
        self.progress()
        activity, what, _ = self._activity
        self._activity = "waits", what, self._clock()
        try:
            yield
        finally:
            self._activity = activity, what, self._clock()

    def reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches; the first one may take long, since workers start for it."""
        return batches if self._is_single_process else self._reading(batches)

    def restart(self) -> None:
        """The process was suspended for a while: count from now."""
        activity, what, _ = self._activity
        self._activity = activity, what, self._clock()

    def status(self) -> str:
        """For the other ranks: free, waits, or late; then whether it seems to wait inside torch, and where."""
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
    """The rank that all others wait for, and what it does; None while any rank makes progress.

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
    # A rank that seems to wait inside torch may be the one, if no other rank is late.
    stalled = alone or ([*late] if len(late) == 1 else [])
    return (stalled[0], late[stalled[0]][1]) if stalled else (None, next(iter(late.values()))[1])


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread is where it would wait for other ranks: in a collective, or in the backward pass."""
    path = "" if frame is None else frame.f_code.co_filename.replace(os.sep, "/")
    return "/torch/distributed/" in path or path.endswith("/torch/autograd/graph.py")


def _source_line(frame: FrameType | None) -> str:
    """The line of the innermost code that is neither torch's nor Python's own."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and not path.is_relative_to(_STDLIB):
            return f", at {path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Heartbeat:
    """Sends the heartbeat of this rank and watches others: rank 0 watches all, all others watch rank 0."""

    def __init__(
        self, store: "RankStore", stall_detector: StallDetector, *, lost_seconds: float = LOST_AFTER_SECONDS
    ) -> None:
        self._store = store
        self._stall_detector = stall_detector
        rank, size = store.rank, store.size
        self._watched = list(range(1, size)) if rank == 0 else [0]
        # If rank 0 is silent, rank 1 reports it first.
        self._patience = lost_seconds if rank < 2 else lost_seconds + 2 * INTERVAL_SECONDS
        self._seen: dict[int, tuple[str, float]] = {}
        """The last heartbeat of each watched rank, and when it changed."""
        self._processes: dict[int, dict[str, Any]] = {}
        self._answered_at = time.monotonic()
        self._has_left = threading.Event()
        self.lost: str | None = None
        """Which rank is lost, as a message."""
        self.notify: Callable[[str], None] = lambda _line: None
        """Called with that message on the rank that finds out."""
        store.check_lost = self.check_lost
        me = psutil.Process()
        process = {"host": platform.node(), "pid": me.pid, "created": me.create_time()}
        store.post(f"process/{rank}", json.dumps(process))
        store.post(f"heartbeat/{rank}", "0 free")

    def start(self) -> None:
        """Start the threads, once all ranks have posted a first heartbeat."""
        for target in (self._communicate, self._count):
            threading.Thread(target=target, daemon=True, name="whet-heartbeat").start()

    def leave(self) -> None:
        """Announce that this rank ends normally and is not lost."""
        self._has_left.set()
        self._store.post(f"heartbeat/{self._store.rank}", LEFT_MARK)

    def check_lost(self) -> None:
        """Raise if a rank is known to be lost."""
        if self.lost is not None:
            raise LostRankError(
                "another rank does not answer",
                got=self.lost,
                try_="the same command, which resumes from the last checkpoint",
            )

    def _communicate(self) -> None:
        """Thread: everything that may have to wait for the network."""
        count = 0
        while not self._has_left.wait(INTERVAL_SECONDS) and self.lost is None:
            count += 1
            try:
                self._store.post(f"heartbeat/{self._store.rank}", f"{count} {self._stall_detector.status()}")
                heartbeats = self._store.find_all([f"heartbeat/{rank}" for rank in self._watched])
                message = self._store.find("lost")
            except RuntimeError:
                # The store is gone; the other thread counts for how long.
                continue
            now = self._answered_at = time.monotonic()
            for rank, heartbeat in zip(self._watched, heartbeats, strict=True):
                if self._seen.get(rank, ("", 0.0))[0] != heartbeat:
                    self._seen[rank] = heartbeat, now
            if message is not None and not self._has_left.is_set():
                self._end(message)
            elif (gone := self._find_gone()) is not None:
                self._report_lost(gone, "has ended unexpectedly")
            elif self._store.rank == 0:
                self._check_stalls()

    def _count(self) -> None:
        """Thread: only counts seconds."""
        before = time.monotonic()
        while not self._has_left.wait(INTERVAL_SECONDS) and self.lost is None:
            now = time.monotonic()
            if now - before > 3 * INTERVAL_SECONDS:
                # This process was suspended, perhaps with all others (Ctrl-Z, a closed laptop): count from now.
                self._answered_at = now
                self._stall_detector.restart()
                self._seen = {rank: (heartbeat, now) for rank, (heartbeat, _) in self._seen.items()}
            before = now
            if now - self._answered_at > self._patience:
                self._end(f"the store of the ranks has not answered for {self._patience:.0f} s")
                return
            silent = [
                rank
                for rank, (heartbeat, seen_at) in self._seen.items()
                if heartbeat != LEFT_MARK and now - seen_at > self._patience
            ]
            if silent:
                self._report_lost(silent[0], f"has sent no heartbeat for {self._patience:.0f} s, and is ended")
                return

    def _find_gone(self) -> int | None:
        """A rank on this machine whose process has ended without leaving."""
        for rank in self._watched:
            if self._seen[rank][0] == LEFT_MARK or self._process(rank) is not None or not self._is_local(rank):
                continue
            # It may have left a moment ago.
            if self._store.find(f"heartbeat/{rank}") != LEFT_MARK:
                return rank
        return None

    def _check_stalls(self) -> None:
        """End the run if all ranks wait for one that makes no progress, or for each other."""
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
        """Tell the user and the other ranks, and end."""
        self.notify(line)
        self._store.post("lost", f"{lost}: {line}")
        self._end(f"{lost}: {line}")

    def _end(self, message: str) -> None:
        """End the lost process if it is on this machine, and this one too if it does not end by itself."""
        rank, _, line = message.partition(": ") if ": " in message else ("", "", message)
        self.lost = line
        if rank.isdecimal() and int(rank) != self._store.rank and (hung := self._process(int(rank))) is not None:
            with contextlib.suppress(psutil.Error):
                hung.send_signal(signal.SIGKILL)
        if not self._has_left.wait(EXIT_GRACE_SECONDS):
            os._exit(LostRankError.exit_code)

    def _is_local(self, rank: int) -> bool:
        return self._process_info(rank).get("host") == platform.node()

    def _process(self, rank: int) -> psutil.Process | None:
        """The process of a rank on this machine; not another one that has its pid by now."""
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
