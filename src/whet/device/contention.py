"""Make torch's waiting threads sleep instead of spin while other programs use the cores.

The number of threads stays as planned, because the rounding of sums depends on it. How threads wait does not affect
results (docs/choices/0022).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from whet.base import env
from whet.device.cpu import IdleThreads, start_idle_threads
from whet.machine.load import ThreadTimes, thread_times

READ_EVERY_SECONDS = 0.25
MAX_WAITING_SHARE = 0.1
"""Maximum share of time that the training thread may wait for a core before threads stop spinning.

On two cores, one other busy process raises the share to about a third. On an idle machine it is below a hundredth.
"""
MAX_WAKE_SECONDS = 100e-6
"""Maximum mean wait for a core after a wakeup at which sleeping threads may spin again.

On an idle machine it is a few microseconds. On two cores with a load of 14, it is 170 to 410 microseconds.
"""
MIN_SLEEPING_SECONDS, MAX_SLEEPING_SECONDS = 30.0, 480.0
"""Minimum and maximum time that threads sleep before they spin again. It doubles if the cores are still busy."""


class ContentionWatch:
    """Measures how long a thread waits for a core, and switches torch's threads between spinning and sleeping.

    Threads that spin only briefly (`env.set_brief_spin`) are switched too. On a busy machine, even that is too long.
    """

    def __init__(
        self,
        *,
        start_idle: Callable[[], IdleThreads | None] = start_idle_threads,
        read_times: Callable[[int], ThreadTimes | None] = thread_times,
    ) -> None:
        self._start_idle, self._read_times = start_idle, read_times
        self._thread_id = threading.get_native_id()
        self._idle: IdleThreads | None = None
        self._last: ThreadTimes | None = None
        self._sleep_seconds = MIN_SLEEPING_SECONDS
        self._spin_at = 0.0
        """`ThreadTimes.total` at which threads may spin again. Time in which the training thread sleeps is excluded."""
        self._is_over = threading.Event()
        self.was_contended = False
        """Whether the watch has made threads sleep."""

    def run(self) -> None:
        """Call `read` at intervals until `stop`. Runs in a separate thread, because a step may take minutes."""
        while self.read() and not self._is_over.wait(READ_EVERY_SECONDS):
            pass
        self._spin()

    def stop(self) -> None:
        """End `run`, and make torch's threads spin again while they wait."""
        self._is_over.set()

    def read(self) -> bool:
        """Read the scheduling times of the thread, and switch between spinning and sleeping if necessary.

        Return False if the system does not provide the times, or if torch's threads cannot be switched.
        """
        times = self._read_times(self._thread_id)
        last, self._last = self._last, times
        if times is None:
            return False
        if last is None or times.total == last.total:
            return True
        waited = times.waiting - last.waiting
        if self._idle is not None:
            is_shared = waited > MAX_WAKE_SECONDS * max(1, times.slices - last.slices)
            if times.total >= self._spin_at and not is_shared:
                # Only while threads spin does the measurement show reliably whether the cores are free.
                self._spin()
        elif waited > MAX_WAITING_SHARE * (times.total - last.total):
            self._idle = self._start_idle()
            if self._idle is None:
                # torch has not loaded libgomp, and will not load it later. Searching again would read the memory map of
                # the process again.
                return False
            self.was_contended = True
            self._spin_at = times.total + self._sleep_seconds
            self._sleep_seconds = min(2 * self._sleep_seconds, MAX_SLEEPING_SECONDS)
        else:
            self._sleep_seconds = MIN_SLEEPING_SECONDS
        return True

    def _spin(self) -> None:
        if self._idle is not None:
            self._idle.close()
            self._idle = None


_active: ContentionWatch | None = None


@contextmanager
def watch_contention() -> Iterator[ContentionWatch]:
    """Run a ContentionWatch for the current thread, unless the user has set how threads wait.

    A nested call yields the watch of the outer call.
    """
    global _active
    watch = _active or ContentionWatch()
    if _active is not None or env.wait_variable() is not None:
        yield watch
        return
    thread = threading.Thread(target=watch.run, name="whet-contention", daemon=True)
    _active = watch
    thread.start()
    try:
        yield watch
    finally:
        _active = None
        watch.stop()
        thread.join()
