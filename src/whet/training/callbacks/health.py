"""Log memory, load and speed every few seconds.

Only counters are read. Nothing waits for the device, and no tensor or random generator is used, so a run computes the
same results with and without this callback.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from whet.device.abstract import AbstractDevice
from whet.machine.load import ProcessUsage, Usage
from whet.step.step import Outcome
from whet.training.callback import Action, Callback
from whet.training.callbacks.event_log import Recorder
from whet.training.callbacks.thermal import ThermalPolicy
from whet.training.progress import State


class Health(Callback):
    """A callback that logs `health` events. `memory_bytes` is the memory of the machine."""

    every_seconds = 5.0

    def __init__(
        self,
        log: Recorder,
        device: AbstractDevice,
        thermal: ThermalPolicy,
        *,
        memory_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        self._log, self._device, self._thermal = log, device, thermal
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._usage = usage or ProcessUsage()
        self._last: tuple[float, int] | None = None

    def after_step(self, state: State, outcome: Outcome) -> Action:  # noqa: ARG002
        # Count only training time: an evaluation or a save must not look like slow training.
        worked = self._clock() - self._log.overhead_seconds
        speed: dict[str, float] = {}
        if self._last is not None and worked > self._last[0] and state.samples >= self._last[1]:
            speed["samples_per_second"] = (state.samples - self._last[1]) / (worked - self._last[0])
        self._last = worked, state.samples
        self._log.defer("health", step=state.step, samples=state.samples, **speed, **self._readings())
        return Action.NONE

    def _readings(self) -> dict[str, Any]:
        system_state, usage = self._thermal.system_state, self._usage()
        total, available = self._memory_bytes, system_state.memory_available_bytes
        memory = {
            **asdict(self._device.memory.usage()),
            "process": usage.process_bytes,
            "used": None if total is None or available is None else max(0, total - available),
            "available": available,
            "swap": system_state.swap_used_bytes,
        }
        busy = {"cpu": usage.cpu_percent, "process": usage.process_percent, "gpu": system_state.gpu_busy_percent}
        levels = {"heat": self._thermal.heat, "thermal": system_state.thermal, "pressure": system_state.memory_pressure}
        return {"memory": _without_none(memory), "utilization": _without_none(busy), **_without_none(levels)}


def _without_none(readings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in readings.items() if value is not None}
