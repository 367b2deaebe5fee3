"""Handle Ctrl-C and SIGTERM: the first finishes the step and saves, the second stops immediately."""

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from whet.base.process import exit_code, stop_immediately
from whet.training.supervisor import is_supervised

_HANDLED = (signal.SIGINT, signal.SIGTERM)
_ECHO_SECONDS = 0.3
"""Ctrl-C at a terminal reaches a supervised training twice: from the terminal, and passed on by its parent."""


class StopSignals:
    """While entered, Ctrl-C and SIGTERM set a flag instead of raising somewhere inside a step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.say: Callable[[int], None] | None = None
        """Is told of the first signal, at once: who waits for a long step must know that it was heard."""
        self._noted_at = 0.0
        self._is_supervised = is_supervised()
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that was stopped so; 0 when nobody asked."""
        return 0 if self.signal is None else exit_code(self.signal)

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the caller keeps its own handling.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _HANDLED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._noted_at = number, now
            if self.say is not None:
                self.say(number)
        elif not (self._is_supervised and now - self._noted_at < _ECHO_SECONDS):
            stop_immediately(number)
