"""Has something been said on standard error that must not be overlooked? Native libraries say some errors only there.

While entered, file descriptor 2 leads through a small process (`stderr_relay.py`) that passes everything on unchanged
and in order, also what child processes write, and also the last words of a process that dies.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self, final

from whet.device import stderr_relay

_STDERR = 2
_LONGEST_WAIT_SECONDS = 2.0


@final
class StderrWatch:
    """Notices a text on standard error; where it cannot be set up, nothing is noticed and nothing changes."""

    def __init__(self, sought: str) -> None:
        self._sought = sought
        self._has_seen = False
        self._relay: subprocess.Popen[bytes] | None = None
        self._original = self._answers = -1

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError, ValueError):
            self._start()
        return self

    def _start(self) -> None:
        _flush()
        original = os.dup(_STDERR)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, original)
            (source, target), (answers, answer_to) = os.pipe(), os.pipe()
            undo.callback(os.close, answers)
            try:
                # Isolated and without site packages: it starts in milliseconds. In a session of its own: Ctrl-C is
                # not meant for it.
                command = [sys.executable, "-I", "-S", str(Path(stderr_relay.__file__)), self._sought]
                relay = subprocess.Popen(command, stdin=source, stdout=answer_to, start_new_session=True)
                os.dup2(target, _STDERR)
            finally:
                for end in (source, target, answer_to):
                    os.close(end)
            undo.pop_all()
        self._relay, self._original, self._answers = relay, original, answers

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._relay is None:
            return
        _flush()
        self.has_seen(wait=True)
        self._stop()

    def has_seen(self, *, wait: bool = False) -> bool:
        """Whether the text has come by; with `wait`, everything written so far is looked at first."""
        if self._relay is None or self._has_seen:
            return self._has_seen
        if wait:
            _flush()
            with contextlib.suppress(OSError):
                os.write(_STDERR, stderr_relay.MARK)
        deadline = time.monotonic() + (_LONGEST_WAIT_SECONDS if wait else 0.0)
        is_passed = not wait
        while select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            answer = os.read(self._answers, 1024)
            self._has_seen |= stderr_relay.SEEN in answer
            is_passed |= stderr_relay.PASSED in answer
            if not answer:
                # The process has gone, for whatever reason: standard error must not lead nowhere.
                self._stop()
                break
            if is_passed and wait:
                break
        return self._has_seen

    def _stop(self) -> None:
        relay, self._relay = self._relay, None
        assert relay is not None
        os.dup2(self._original, _STDERR)
        for end in (self._original, self._answers):
            os.close(end)
        # A process that still holds the old standard error is served on.
        with contextlib.suppress(subprocess.TimeoutExpired):
            relay.wait(_LONGEST_WAIT_SECONDS)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
