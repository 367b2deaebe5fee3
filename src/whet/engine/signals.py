"""How a run is asked to stop: the first signal is noted and the step is finished, the second one stops at once."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StopRequests:
    """While entered, Ctrl-C and SIGTERM set a flag instead of raising somewhere inside a step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that was stopped so; 0 when nobody asked."""
        return _EXIT_CODES.get(signal.Signals(self.signal), 1) if self.signal is not None else 0

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the caller keeps its own handling.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _EXIT_CODES}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
