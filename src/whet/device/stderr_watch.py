"""Watch standard error for texts. Native libraries report some errors only there.

During a watch, file descriptor 2 is a pipe to a relay process, which runs this file as a program. The relay copies all
output unchanged and in order. This includes the output of child processes and the last output of a crashing process.
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

METAL_FAILURES = ("command buffer exited with error status", "Execution of the command buffer was aborted")
"""Metal prints these and continues with undefined memory. Until torch 2.15 it is the only report of a GPU failure."""
WATCHDOG_TEXTS = ("ImpactingInteractivity", "Impacting Interactivity")
"""macOS has ended a command buffer because the display had to wait for it (ml-explore/mlx#3267)."""
GPU_MEMORY_TEXTS = ("Insufficient Memory", "ErrorOutOfMemory")

# Protocol: MARK requests a PASSED once everything before it was examined. A text is reported as its number.
MARK = b"\0whet\0"
PASSED = b"."

_STDERR = 2
_MAX_WAIT_SECONDS = 2.0
_CHUNK = 65_536


@final
class StderrWatch:
    """Detects texts on standard error. Does nothing if the relay cannot be started."""

    def __init__(self, *texts: str) -> None:
        assert len(texts) <= 10, "a text is reported by one digit"
        self._texts = texts
        self._seen: set[str] = set()
        self._relay: subprocess.Popen[bytes] | None = None
        self._original = self._answers = -1

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError, ValueError):
            self._start()
        return self

    def _start(self) -> None:
        # Flush first, so that buffered output does not appear after later output of the relay.
        _flush()
        original = os.dup(_STDERR)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, original)
            (source, target), (answers, answer_to) = os.pipe(), os.pipe()
            undo.callback(os.close, answers)
            try:
                # Isolated and without site-packages, the relay starts in milliseconds. A new session protects it
                # from Ctrl-C.
                command = [sys.executable, "-I", "-S", str(Path(__file__)), *self._texts]
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
        self.seen(wait=True)
        # A relay that has exited was stopped there.
        if self._relay is not None:
            self._stop()

    def seen(self, *, wait: bool = False) -> frozenset[str]:
        """Return the texts that have appeared. With `wait`, first wait until all output so far was examined."""
        if self._relay is None:
            return frozenset(self._seen)
        if wait:
            _flush()
            with contextlib.suppress(OSError):
                os.write(_STDERR, MARK)
        deadline = time.monotonic() + (_MAX_WAIT_SECONDS if wait else 0.0)
        is_passed = not wait
        while select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
            answer = os.read(self._answers, 1024)
            self._seen.update(text for number, text in enumerate(self._texts) if b"%d" % number in answer)
            is_passed |= PASSED in answer
            if not answer:
                # The relay has exited. Reconnect standard error.
                self._stop()
                break
            if is_passed and wait:
                break
        return frozenset(self._seen)

    def _stop(self) -> None:
        relay, self._relay = self._relay, None
        assert relay is not None
        os.dup2(self._original, _STDERR)
        for end in (self._original, self._answers):
            os.close(end)
        # If the relay does not exit in time, let it run: child processes may still write to its pipe.
        with contextlib.suppress(subprocess.TimeoutExpired):
            relay.wait(_MAX_WAIT_SECONDS)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


# --- relay process ---------------------------------------------------------------------------------------------------
# The relay copies stdin to stderr and reports on stdout.


def relay(texts: list[bytes]) -> None:
    """Copy until every writer has closed the pipe. Report the number of each text, and PASSED for each MARK.

    Marks are removed from the output.
    """
    held, window = b"", b""
    longest = max(map(len, texts))
    while arrived := os.read(0, _CHUNK):
        data = held + arrived
        num_marks = data.count(MARK)
        data = data.replace(MARK, b"")
        held = _partial_mark(data)
        data = data[: len(data) - len(held)]
        _write_through(data)
        window += data
        for number, text in enumerate(texts):
            if text in window:
                _answer(b"%d" % number)
        # Keep the end of the window, which may be the start of a text.
        window = window[len(window) - longest + 1 :] if len(window) >= longest else window
        _answer(PASSED * num_marks)
    _write_through(held)


def _partial_mark(data: bytes) -> bytes:
    """Return the end of `data` that may be the start of a mark; empty if there is none."""
    return next((MARK[:size] for size in range(len(MARK) - 1, 0, -1) if data.endswith(MARK[:size])), b"")


def _write_through(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:
            # Standard error has no reader anymore. That must not block training.
            return


def _answer(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, data)


if __name__ == "__main__":
    relay([text.encode() for text in sys.argv[1:]])
