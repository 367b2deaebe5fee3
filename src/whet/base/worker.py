"""A child process that answers requests with JSON lines."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TextIO

import psutil

_LOOK_EVERY_SECONDS = 0.02
_TICK_SECONDS = 0.5
_LAST_LINES_SECONDS = 1.0
"""What it started may hold its stdout open for ever."""


class JsonWorker:
    """A Python module run in a child; its answers are read with limits, and it is ended at the latest when we leave.

    Lines on its stdout that begin with `mark` are answers. `most_bytes` is the memory at which it is ended.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str] = (),
        *,
        mark: str,
        environment: Mapping[str, str],
        most_bytes: int | None = None,
    ) -> None:
        self._mark = mark.encode()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._seen = 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environment),
            # A group of its own, to be ended with everything that it started.
            process_group=0,
        )
        assert self._process.stdout is not None
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_pump_lines, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()
        self.tick: Callable[[], None] | None = None
        """Called about twice a second while an answer is waited for."""
        self.took_too_much: int | None = None
        """The bytes it had when it was ended for them."""
        self._watching = threading.Thread(target=self._watch, args=(most_bytes,), daemon=True) if most_bytes else None
        if self._watching is not None:
            self._watching.start()

    def __enter__(self) -> "JsonWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._process.wait()
        self._reader.join(_LAST_LINES_SECONDS)
        if self._watching is not None:
            self._watching.join()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._stderr.close()

    def ask(self, seconds: float, **question: Any) -> dict[str, Any] | str:
        """The answer to a question; "late" when none came in time, "dead" when none will."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, OSError):
            return "dead"
        return self.answer(seconds)

    def answer(self, seconds: float) -> dict[str, Any] | str:
        """The next answer; "late" when none came in time, "dead" when none will."""
        ends_at = time.monotonic() + seconds
        while True:
            try:
                left = max(0.0, ends_at - time.monotonic())
                line = self._lines.get(timeout=min(left, _TICK_SECONDS if self.tick else threading.TIMEOUT_MAX))
            except queue.Empty:
                if time.monotonic() >= ends_at:
                    return "late"
                if self.tick is not None:
                    self.tick()
                continue
            if line is None:
                return "dead"
            if line.startswith(self._mark):
                return dict(json.loads(line[len(self._mark) :]))

    def said_since(self, size: int) -> str:
        """What it wrote to stderr between the last look and that size."""
        # Not through a seek: the child writes at the position that it shares with us.
        text = os.pread(self._stderr.fileno(), size - self._seen, self._seen).decode(errors="replace")
        self._seen = size
        return text

    def last_words(self) -> str:
        """How the process ended, and the last line it wrote."""
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "it still runs and says nothing"
        size = os.fstat(self._stderr.fileno()).st_size
        said = os.pread(self._stderr.fileno(), 10_000, max(0, size - 10_000)).decode(errors="replace")
        lines = said.strip().splitlines()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}: {lines[-1][:300]}" if lines else how

    def _kill(self) -> None:
        # Its group may outlive it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _watch(self, most_bytes: int) -> None:
        try:
            child = psutil.Process(self._process.pid)
            while self._process.poll() is None:
                taken = child.memory_info().rss
                if taken > most_bytes:
                    self.took_too_much = taken
                    self._kill()
                    return
                time.sleep(_LOOK_EVERY_SECONDS)
        except psutil.Error:
            return


def _pump_lines(stream: IO[bytes], lines: "queue.SimpleQueue[bytes | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def requests() -> Iterator[str]:
    """The lines of stdin, for this reader alone; when they end, this process does at once, whatever it is doing."""
    # Code that we run may read stdin as well, and would take a question for its own.
    ours = os.fdopen(os.dup(sys.stdin.fileno()))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_pump_until_parent_ends, args=(ours, lines), daemon=True, name="questions").start()
    while True:
        yield lines.get()


def _pump_until_parent_ends(stream: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    for line in stream:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)
