"""How are machine and run, every few seconds between two steps? Counters alone: nothing waits for a device.

Nothing here touches a tensor or a generator, so a run is the same with and without it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from whet.device.abstract import AbstractDevice
from whet.engine.governor import Governor
from whet.engine.progress import Progress
from whet.engine.recorder import Recorder
from whet.machine.own_use import OwnUse, Use

FIRST_SECONDS, EVERY_SECONDS = 1.0, 5.0


class Health:
    """Writes `health` events; `memory_bytes` is what the machine has."""

    def __init__(
        self,
        recorder: Recorder,
        device: AbstractDevice,
        governor: Governor,
        *,
        memory_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        use: Callable[[], Use] | None = None,
    ) -> None:
        self._recorder, self._device, self._governor = recorder, device, governor
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._use = use or OwnUse()
        self._due_at = clock() + FIRST_SECONDS
        self._last: tuple[float, int] | None = None

    def between_steps(self, progress: Progress) -> None:
        """Writes one if it is time; a comparison if not."""
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + EVERY_SECONDS
        # Work alone: an evaluation would look like a slow training.
        worked = now - self._recorder.aside_seconds
        speed: dict[str, float] = {}
        if self._last is not None and worked > self._last[0] and progress.samples >= self._last[1]:
            speed["samples_per_second"] = (progress.samples - self._last[1]) / (worked - self._last[0])
        self._last = worked, progress.samples
        self._recorder.later("health", step=progress.step, samples=progress.samples, **speed, **self._readings())

    def _readings(self) -> dict[str, Any]:
        seen, use = self._governor.conditions, self._use()
        left = seen.memory_available_bytes
        used = None if left is None or self._memory_bytes is None else max(0, self._memory_bytes - left)
        memory = {
            **asdict(self._device.memory()),
            "process": use.process_bytes,
            "used": used,
            "available": left,
            "swap": seen.swap_used_bytes,
        }
        busy = {"cpu": use.cpu_percent, "process": use.process_percent, "gpu": seen.gpu_busy_percent}
        states = {"heat": self._governor.heat, "thermal": seen.thermal, "pressure": seen.memory_pressure}
        return {"memory": _known(memory), "use": _known(busy), **_known(states)}


def _known(readings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in readings.items() if value is not None}
