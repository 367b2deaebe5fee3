"""How busy are the cores, and how much does this process take? Counters of the system, asked again and again."""

from typing import NamedTuple

import psutil


class Use(NamedTuple):
    """Since the last time; None where the system does not say."""

    cpu_percent: float | None = None
    """Of all cores, by all programs."""
    process_percent: float | None = None
    """Of one core, by this process: two busy cores are 200."""
    process_bytes: int | None = None
    """What this process holds in memory."""


class OwnUse:
    """Asks in the thread that made it; a tenth of a millisecond each time."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # Both tell what happened since they were last asked.
        self()

    def __call__(self) -> Use:
        try:
            with self._process.oneshot():
                return Use(
                    cpu_percent=float(psutil.cpu_percent(interval=None)),
                    process_percent=float(self._process.cpu_percent(interval=None)),
                    process_bytes=int(self._process.memory_info().rss),
                )
        except (psutil.Error, OSError, ValueError):
            return Use()
