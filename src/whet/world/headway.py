"""Does this process get on? What it says of itself beside its pulse, so that one that computes for ever is noticed.

In a step, and while the next batch of an epoch is read, a process has to get on: every micro-batch counts, and what is
too long follows from how long it took before. Whatever else it does (setting up, evaluating, saving, loading, your own
code between two steps) may take as long as it likes.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal, TypeVar

LEAST_SECONDS = 20.0
"""Nobody who got on a moment ago is late before."""
TIMES = 20.0
"""Late is who takes so many times as long as the longest of the last few times."""
FIRST_SECONDS = 300.0
"""For the first steps, of which nothing is known, and for compiled ones: a new shape is compiled in the middle."""
NUM_FIRST = 15
"""Five steps: each is made, written down, and the next batch is read."""
_NUM_KEPT = 32
_PYTHON = Path(os.__file__).parent

Doing = Literal["free", "waits", "works"]
_NOTHING = contextlib.nullcontext()
Batch = TypeVar("Batch")


class Headway:
    """What the main thread of this process does, and since when; other threads may ask."""

    def __init__(self, *, is_alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_alone = is_alone
        self._clock = clock
        self._does: tuple[Doing, str, float] = "free", "", clock()
        self._times: deque[float] = deque(maxlen=_NUM_KEPT)
        self._num_done = 0
        self.is_compiled = False
        """Whether steps may stop for a compiler."""

    def working(self, what: str) -> contextlib.AbstractContextManager[None]:
        """While entered, this process must get on."""
        return _NOTHING if self._is_alone else self._working(what)

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
        return f"late {'inside' if _is_joining(frame) else 'alone'} {what}{_place(frame)}"

    def _longest(self) -> float:
        if self._num_done < NUM_FIRST:
            return float("inf") if self.is_compiled else FIRST_SECONDS
        return max(FIRST_SECONDS if self.is_compiled else LEAST_SECONDS, TIMES * max(self._times, default=0.0))

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
        doing: contextlib.AbstractContextManager[None] = _NOTHING
        while True:
            with doing:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch
            doing = self._working("the next batch")


def find_late(words: dict[int, str]) -> tuple[int | None, str] | None:
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


def _is_joining(frame: FrameType | None) -> bool:
    """Whether a thread is where it would wait for other processes: in a collective, or in the backward pass."""
    path = "" if frame is None else frame.f_code.co_filename.replace(os.sep, "/")
    return "/torch/distributed/" in path or path.endswith("/torch/autograd/graph.py")


def _place(frame: FrameType | None) -> str:
    """The line of the innermost code that is neither torch's nor Python's own."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and not path.is_relative_to(_PYTHON):
            return f", at {path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
