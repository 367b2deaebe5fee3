"""Watch standard error for given texts, because native libraries report some errors only there.

During a watch, file descriptor 2 is a pipe to a relay process, which runs this file as a program. The relay copies all
output unchanged and in order, including the output of child processes and the last output of a crashing process.
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
"""Texts that Metal prints when a command buffer fails. Training then continues with undefined results.

Before torch 2.15, they are the only report of a GPU failure.
"""
WATCHDOG_TEXTS = ("ImpactingInteractivity", "Impacting Interactivity")
"""Texts for a command buffer that macOS has stopped because the display had to wait for it (ml-explore/mlx#3267)."""
GPU_MEMORY_TEXTS = ("Insufficient Memory", "ErrorOutOfMemory")

# The watch writes MARK to standard error. The relay answers PASSED after it has examined everything before the MARK. It
# reports a text by its index.
MARK = b"\0whet\0"
PASSED = b"."

_STDERR = 2
_MAX_WAIT_SECONDS = 2.0
_CHUNK = 65_536


@final
class StderrWatch:
    """Detects given texts on standard error. Does nothing if the relay process cannot be started."""

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
        # Flush first, so that output buffered before the watch is written directly.
        _flush()
        original = os.dup(_STDERR)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, original)
            (source, target), (answers, answer_to) = os.pipe(), os.pipe()
            undo.callback(os.close, answers)
            try:
                # In isolated mode and without site-packages, the relay starts in milliseconds. In its own session, it
                # does not receive Ctrl-C.
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
        # `seen` has already called `_stop` if the relay has exited.
        if self._relay is not None:
            self._stop()

    def seen(self, *, wait: bool = False) -> frozenset[str]:
        """Return the texts that have appeared. With `wait`, first wait until the relay has examined all output so far.

        The wait ends after two seconds at the latest.
        """
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
                # The relay has exited, so restore standard error.
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
        # If the relay does not exit in time, leave it running, because child processes may still write to its pipe.
        with contextlib.suppress(subprocess.TimeoutExpired):
            relay.wait(_MAX_WAIT_SECONDS)


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


# --- relay process ---------------------------------------------------------------------------------------------------
# The relay copies its stdin to its stderr, and reports matches on its stdout.


def relay(texts: list[bytes]) -> None:
    """Copy stdin to stderr until every writer has closed the pipe.

    Report each text found by its index, and each MARK as PASSED.

    Marks are not copied.
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
        # Keep the end of the window, because a text to detect may begin there and continue in the next chunk.
        window = window[len(window) - longest + 1 :] if len(window) >= longest else window
        _answer(PASSED * num_marks)
    _write_through(held)


def _partial_mark(data: bytes) -> bytes:
    """Return the longest suffix of `data` that is a prefix of MARK, or b"" if there is none."""
    return next((MARK[:size] for size in range(len(MARK) - 1, 0, -1) if data.endswith(MARK[:size])), b"")


def _write_through(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [])
        except OSError:
            # Standard error has no reader anymore. Discard the output, so that the pipe does not fill and block
            # training.
            return


def _answer(data: bytes) -> None:
    with contextlib.suppress(OSError):
        os.write(1, data)


if __name__ == "__main__":
    relay([text.encode() for text in sys.argv[1:]])
