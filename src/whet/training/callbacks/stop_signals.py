"""Handle Ctrl-C and SIGTERM: the first one finishes the step and saves, a second one skips the save."""

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from whet.base.process import exit_code, stop_immediately, stop_message
from whet.training.callback import Action, Callback
from whet.training.supervisor import is_supervised

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

_HANDLED = (signal.SIGINT, signal.SIGTERM)
_ECHO_SECONDS = 0.3
"""In a supervised run, a second signal within this many seconds is ignored.

Ctrl-C reaches the process twice: from the terminal and forwarded by the parent process.
"""


class StopSignals(Callback):
    """A callback that turns Ctrl-C and SIGTERM into stop requests, so that nothing is raised inside a step."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that was received on any rank; None if there was none."""
        self._received_at = 0.0
        self._is_supervised = is_supervised()
        self._run: RunContext | None = None
        self._previous: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """The exit code that a shell expects after this signal; 0 without a signal."""
        return 0 if self.signal is None else exit_code(self.signal)

    def on_start(self, run: "RunContext") -> None:
        self._run = run
        run.exit_stack.enter_context(self)

    def __enter__(self) -> Self:
        # Python delivers signals only to the main thread, and signal.signal raises in any other thread.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _HANDLED}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._received_at = number, now
            if self._run is not None:
                self._run.request(Action(stop=signal.Signals(number).name, signal=number))
                self._announce(self._run, number)
        elif not (self._is_supervised and now - self._received_at < _ECHO_SECONDS):
            stop_immediately(number)

    def _announce(self, run: "RunContext", number: int) -> None:
        """Report the signal immediately: a step may take long, and the user must see that the signal was received."""
        when = (
            "after this step" if run.group.is_single_process else "after the next step at which all ranks synchronize"
        )
        when = "once all is evaluated and saved" if run.state.is_finished else when
        run.log.notify_from_signal("stopping", step=run.state.step, message=stop_message(number, when=when))
