"""How is a checkpoint written while the training goes on? By one thread of low priority, one checkpoint at a time."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from whet.base.errors import WhetError

Job = Callable[["Write"], None]
"""Writes one checkpoint and fills in what it found; what it raises is why there is none."""

_NICENESS = 10


@dataclass(kw_only=True, slots=True)
class Write:
    """One write, under way or ended."""

    step: int
    is_beside: bool
    """In a thread, while the training goes on."""
    num_bytes: int = 0
    tidying: WhetError | None = None
    """Why old checkpoints could not be removed; the new one is safe all the same."""
    seconds: float = 0.0
    """Until it was safe, or had failed, the copying before it included."""
    error: BaseException | None = None


class Writer:
    """Runs one job at a time, here or in a thread; whoever began it collects how it ended.

    The thread is not a daemon: a process that ends by itself waits for it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._write: Write | None = None

    @property
    def step(self) -> int | None:
        """The step that is being written, or was and is not collected yet."""
        return None if self._write is None else self._write.step

    @property
    def is_busy(self) -> bool:
        """Whether a thread writes at this moment."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int, job: Job, *, in_background: bool, start: float) -> None:
        """Runs `job`; counts from `start`. The last one must have been collected."""
        assert self._write is None, "one write at a time"
        write = self._write = Write(step=step, is_beside=in_background)
        if not in_background:
            _run(write, job, start)
            return
        arguments = (write, job, start)
        self._thread = threading.Thread(target=_run_quietly, args=arguments, name="whet-checkpoint", daemon=False)
        self._thread.start()

    def collect(self, *, wait: bool) -> Write | None:
        """How the last write ended, once; None when there is none, or it is still under way and `wait` is off."""
        if self._write is None or (self.is_busy and not wait):
            return None
        if self._thread is not None:
            self._thread.join()
        write, self._write, self._thread = self._write, None, None
        return write


def _run_quietly(write: Write, job: Job, start: float) -> None:
    # Linux gives threads a priority of their own; elsewhere this is refused, or means the thread's process: left alone.
    if os.uname().sysname == "Linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    _run(write, job, start)


def _run(write: Write, job: Job, start: float) -> None:
    try:
        job(write)
    except Exception as error:
        write.error = error
    finally:
        write.seconds = time.perf_counter() - start
