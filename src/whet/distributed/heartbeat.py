"""Heartbeats and stall detection: end a run whose rank died, hangs or computes forever."""

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
from typing import Any, Literal, TypeVar

import psutil

from whet.base.errors import LostRankError
from whet.distributed.store import RankStore

MIN_STALL_SECONDS = 20.0
"""Nobody who got on a moment ago is late before."""
STALL_FACTOR = 20.0
"""Late is who takes so many times as long as the longest of the last few times."""
WARMUP_SECONDS = 300.0
"""For the first steps, of which nothing is known, and for compiled ones: a new shape is compiled in the middle."""
WARMUP_PHASES = 15
"""Five steps: each is made, written down, and the next batch is read."""
_WINDOW = 32
_STDLIB = Path(os.__file__).parent

Activity = Literal["free", "waits", "works"]
_NULL_CONTEXT = contextlib.nullcontext()
Batch = TypeVar("Batch")


class StallDetector:
    """What the main thread of this process does, and since when; other threads may ask."""

    def __init__(self, *, is_alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_alone = is_alone
        self._clock = clock
        self._does: tuple[Activity, str, float] = "free", "", clock()
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._num_done = 0
        self.is_compiled = False
        """Whether steps may stop for a compiler."""

    def working(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While entered, this process must get on."""
        return _NULL_CONTEXT if self._is_alone else self._working(what)

    def get_on(self) -> None:
        """Some of the work is done."""
        does, what, since = self._does
        if does == "works":
            now = self._clock()
            self._times.append(now - since)
            self._does = "works", what, now

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """While entered, this process waits for all others."""
        self.get_on()
        does, what, _ = self._does
        self._does = "waits", what, self._clock()
        try:
            yield
        finally:
            self._does = does, what, self._clock()

    def reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the first one may take its time, since workers start for it."""
        return batches if self._is_alone else self._reading(batches)

    def begin_anew(self) -> None:
        """This process was stopped for a while, which is not its fault."""
        does, what, _ = self._does
        self._does = does, what, self._clock()

    def word(self) -> str:
        """For the others: free, waits, or late; then whether it looks as if it waits inside of torch, and where."""
        does, what, since = self._does
        if does != "works" or self._clock() - since <= self._longest():
            return "waits" if does == "waits" else "free"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return f"late {'inside' if _is_in_collective(frame) else 'alone'} {what}{_source_line(frame)}"

    def _longest(self) -> float:
        if self._num_done < WARMUP_PHASES:
            return float("inf") if self.is_compiled else WARMUP_SECONDS
        return max(
            WARMUP_SECONDS if self.is_compiled else MIN_STALL_SECONDS, STALL_FACTOR * max(self._times, default=0.0)
        )

    @contextlib.contextmanager
    def _working(self, what: str) -> Iterator[None]:
        self._does = "works", what, self._clock()
        try:
            yield
            self.get_on()
            self._num_done += 1
        finally:
            self._does = "free", "", self._clock()

    def _reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        doing: contextlib.AbstractContextManager[None] = _NULL_CONTEXT
        while True:
            with doing:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            doing = self._working("the next batch")


def find_stalled_rank(words: dict[int, str]) -> tuple[int | None, str] | None:
    """Which process all others wait for, by what each says of itself, and in what; None while anybody gets on.

    >>> find_late({0: "late inside step 7", 1: "late alone step 7, at loss.py:3"})
    (1, 'step 7, at loss.py:3')
    >>> find_late({0: "waits", 1: "free"}), find_late({0: "waits", 1: "waits"})
    (None, None)
    >>> find_late({0: "late inside step 7", 1: "late inside step 7"})
    (None, 'step 7')
    """
    late = {rank: word.split(" ", 2)[1:] for rank, word in words.items() if word.startswith("late ")}
    if not late or any(word == "free" for word in words.values()):
        return None
    alone = [rank for rank, (how, _) in late.items() if how == "alone"]
    # Who seems to wait inside of torch may be the one, if nobody else is late.
    found = alone or ([*late] if len(late) == 1 else [])
    return (found[0], late[found[0]][1]) if found else (None, next(iter(late.values()))[1])


def _is_in_collective(frame: FrameType | None) -> bool:
    """Whether a thread is where it would wait for other processes: in a collective, or in the backward pass."""
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


INTERVAL_SECONDS = 1.0
LOST_AFTER_SECONDS = 15.0
"""Without a heartbeat for so long, a process counts as lost."""
EXIT_GRACE_SECONDS = 5.0
"""Until a process that learns of a lost one, and hangs in what it waits for, ends itself."""
LEFT_MARK = "left"


class Heartbeat:
    """Shows this process's heartbeat and watches those of others: the first one all, all others the first."""

    def __init__(
        self, exchange: RankStore, stall_detector: StallDetector, *, lost_seconds: float = LOST_AFTER_SECONDS
    ) -> None:
        self._exchange = exchange
        self._stall_detector = stall_detector
        self._lost_seconds = lost_seconds
        rank, size = exchange.rank, exchange.size
        self._watched = list(range(1, size)) if rank == 0 else [0]
        # The second one speaks first where the first one is silent.
        self._patience = lost_seconds if rank < 2 else lost_seconds + 2 * INTERVAL_SECONDS
        self._seen: dict[int, tuple[str, float]] = {}
        self._places: dict[int, dict[str, Any]] = {}
        self._answered_at = time.monotonic()
        self._has_left = threading.Event()
        self.lost: str | None = None
        """Which process is gone, in words."""
        self.say: Callable[[str], None] = lambda _line: None
        """Is given that line in the process that finds it out."""
        exchange.refuse_lost = self.refuse_lost
        me = psutil.Process()
        place = {"host": platform.node(), "pid": me.pid, "born": me.create_time()}
        exchange.post(f"place/{rank}", json.dumps(place))
        exchange.post(f"pulse/{rank}", "0 free")

    def start(self) -> None:
        """From here on; all processes have shown a first heartbeat."""
        for target in (self._talk, self._watch):
            threading.Thread(target=target, daemon=True, name="whet-heartbeat").start()

    def leave(self) -> None:
        """Says good-bye: a process that ends is not lost."""
        self._has_left.set()
        self._exchange.post(f"pulse/{self._exchange.rank}", LEFT_MARK)

    def refuse_lost(self) -> None:
        """Raises where a process is known to be lost."""
        if self.lost is not None:
            raise LostRankError(
                "another process of this training does not answer",
                got=self.lost,
                try_="the same command, which goes on from the last checkpoint",
            )

    def _talk(self) -> None:
        """All that may have to wait for the network."""
        count = 0
        while not self._has_left.wait(INTERVAL_SECONDS) and self.lost is None:
            count += 1
            try:
                self._exchange.post(f"pulse/{self._exchange.rank}", f"{count} {self._stall_detector.word()}")
                pulses = self._exchange.find_all([f"pulse/{rank}" for rank in self._watched])
                told = self._exchange.find("lost")
            except RuntimeError:
                # Nobody keeps the texts any more; the other thread counts how long.
                continue
            now = self._answered_at = time.monotonic()
            for rank, heartbeat in zip(self._watched, pulses, strict=True):
                if self._seen.get(rank, ("", 0.0))[0] != heartbeat:
                    self._seen[rank] = heartbeat, now
            if told is not None and not self._has_left.is_set():
                self._lose(told)
            elif (gone := self._gone()) is not None:
                self._find_lost(gone, "has ended without a word")
            elif self._exchange.rank == 0:
                self._find_late()

    def _watch(self) -> None:
        """Only counts."""
        before = time.monotonic()
        while not self._has_left.wait(INTERVAL_SECONDS) and self.lost is None:
            now = time.monotonic()
            if now - before > 3 * INTERVAL_SECONDS:
                # We were stopped ourselves, perhaps with all others (Ctrl-Z, a laptop that was closed): begin anew.
                self._answered_at = now
                self._stall_detector.begin_anew()
                self._seen = {rank: (heartbeat, now) for rank, (heartbeat, _) in self._seen.items()}
            before = now
            if now - self._answered_at > self._patience:
                self._lose(f"what the processes tell each other by is silent for {self._patience:.0f} s")
                return
            silent = [
                rank
                for rank, (heartbeat, seen_at) in self._seen.items()
                if heartbeat != LEFT_MARK and now - seen_at > self._patience
            ]
            if silent:
                self._find_lost(silent[0], f"shows no sign of life for {self._patience:.0f} s, and is ended")
                return

    def _gone(self) -> int | None:
        """A process on this machine that has ended without saying so."""
        for rank in self._watched:
            if self._seen[rank][0] == LEFT_MARK or self._process(rank) is not None or not self._is_here(rank):
                continue
            # It may have said so a moment ago.
            if self._exchange.find(f"pulse/{rank}") != LEFT_MARK:
                return rank
        return None

    def _find_late(self) -> None:
        """All wait for one that does not get on, or for each other."""
        words = {rank: heartbeat.partition(" ")[2] or "free" for rank, (heartbeat, _) in self._seen.items()}
        found = find_stalled_rank({self._exchange.rank: self._stall_detector.word(), **words})
        if found is None:
            return
        rank, where = found
        if rank is None:
            self._end_all(f"all {self._exchange.size} processes wait for each other in {where}, and are ended")
        else:
            self._find_lost(rank, f"does not get on with {where}, while the others wait, and is ended")

    def _find_lost(self, rank: int, how: str) -> None:
        """This process has found out: it tells the others and the user."""
        self._end_all(f"rank {rank} of {self._exchange.size} {how}", lost=str(rank))

    def _end_all(self, line: str, *, lost: str = "") -> None:
        self.say(line)
        self._exchange.post("lost", f"{lost}: {line}")
        self._lose(f"{lost}: {line}")

    def _lose(self, told: str) -> None:
        """Ends the lost process if it is on this machine; and this one too, if it does not end by itself."""
        rank, _, line = told.partition(": ") if ": " in told else ("", "", told)
        self.lost = line
        if rank.isdecimal() and int(rank) != self._exchange.rank and (hung := self._process(int(rank))) is not None:
            with contextlib.suppress(psutil.Error):
                hung.send_signal(signal.SIGKILL)
        if not self._has_left.wait(EXIT_GRACE_SECONDS):
            os._exit(LostRankError.exit_code)

    def _is_here(self, rank: int) -> bool:
        return self._place(rank).get("host") == platform.node()

    def _process(self, rank: int) -> psutil.Process | None:
        """A process of this training on this machine; not another one that has its number by now."""
        if not self._is_here(rank):
            return None
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._place(rank)["pid"])
            if process.create_time() == self._place(rank)["born"] and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def _place(self, rank: int) -> dict[str, Any]:
        if rank not in self._places:
            self._places[rank] = json.loads(self._exchange.find(f"place/{rank}") or "{}")
        return self._places[rank]
