"""How long should a page rest after work? So that it takes a small share of the machine, and never for minutes.

What counts is the time that a core worked. Beside a training most of the time is waiting for a turn: counted in full,
it let a page rest for half a minute after one look.
"""

import time

_SHARE_OF_TIME = 0.2
"""With all waiting at most: a slow disk is not to be kept busy."""
_LONGEST_REST = 30.0
"""Seconds: one slow moment leaves no page behind for longer."""


class Work:
    """Some work of this thread, from now on."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._begun_core = time.thread_time()

    @property
    def seconds(self) -> float:
        """How long it took so far, with all waiting."""
        return time.monotonic() - self._begun

    def rest(self, *, share: float) -> float:
        """Seconds to rest after it, so that at most this share of a core is taken."""
        core = time.thread_time() - self._begun_core
        return min(max(core / share, self.seconds / _SHARE_OF_TIME), _LONGEST_REST)
