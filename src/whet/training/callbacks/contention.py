"""Let waiting threads sleep while other programs use the cores.

The number of threads stays as planned, because the last bits of sums depend on it. How threads wait changes no bit.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from whet.base import env
from whet.device.cpu import IdleThreads, start_idle_threads
from whet.machine.load import ThreadTimes, thread_times
from whet.step.step import Outcome
from whet.training.callback import Action, Callback, State

if TYPE_CHECKING:
    from whet.training.run_context import RunContext

MAX_WAITING_SHARE = 0.1
"""The share of its time in which the training thread may be ready without a core.

One other busy process on two cores gives about a third, a machine of its own less than a hundredth.
"""
MIN_SLEEPING_SECONDS, MAX_SLEEPING_SECONDS = 30.0, 480.0
"""For how long threads sleep before they try to spin again; doubled each time that the cores are still shared.

Only threads that spin show whether they are alone: a thread that was woken waits for a core on a quiet machine too.
"""


class CoreContention(Callback):
    """Watches whether the training thread gets a core, unless the user has chosen how threads wait.

    Threads that spin briefly (`env.set_brief_spin`) are watched too: beside many other programs even that is too long.
    """

    every_seconds = 1.0

    def __init__(
        self,
        *,
        start_idle: Callable[[], IdleThreads | None] = start_idle_threads,
        read_times: Callable[[int], ThreadTimes | None] = thread_times,
    ) -> None:
        self._start_idle, self._read_times = start_idle, read_times
        self._is_watching = False
        self._idle: IdleThreads | None = None
        self._last: ThreadTimes | None = None
        """The times at the last reading while threads spin."""
        self._sleep_seconds = MIN_SLEEPING_SECONDS
        self._spin_at = 0.0
        """The times of the thread, added up, at which threads spin again. They leave out pauses of the training."""
        self._was_reported = False

    def on_start(self, run: "RunContext") -> None:
        self._run = run
        if run.device.kind == "cpu" and run.plan.threads != 1 and env.wait_variable() is None:
            self._is_watching = True
            run.exit_stack.callback(self._spin)

    def after_step(self, state: State, outcome: Outcome) -> Action:  # noqa: ARG002
        times = self._read_times(threading.get_native_id()) if self._is_watching else None
        if times is None:
            self._is_watching = False
        else:
            self._follow(state.step, times)
        return Action.NONE

    def _follow(self, step: int, times: ThreadTimes) -> None:
        if self._idle is not None:
            if times.total >= self._spin_at:
                self._spin()
                self._last = times
            return
        last, self._last = self._last, times
        if last is None or times.total == last.total:
            return
        if (times.waiting - last.waiting) / (times.total - last.total) <= MAX_WAITING_SHARE:
            self._sleep_seconds = MIN_SLEEPING_SECONDS
            return
        self._idle = self._start_idle()
        self._spin_at = times.total + self._sleep_seconds
        self._sleep_seconds = min(2 * self._sleep_seconds, MAX_SLEEPING_SECONDS)
        if self._idle is not None and env.spins_long() and not self._was_reported:
            self._was_reported = True
            self._run.log.event("plan", step=step, message=f"{_SHARED_CORES}: {env.brief_spin_export()}")

    def _spin(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None


_SHARED_CORES = "other programs use the cores, so threads now sleep while they wait; to have it from the start"
