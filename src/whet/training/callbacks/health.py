"""Log memory, load and speed every few seconds."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from torch import Tensor

from whet.device.abstract import AbstractDevice
from whet.machine.load import ProcessUsage, Usage
from whet.step.ema import named_tensors
from whet.step.step import Stepper
from whet.training.callback import State
from whet.training.callbacks.event_log import Recorder
from whet.training.callbacks.thermal import ThermalCare

FIRST_AFTER_SECONDS, INTERVAL_SECONDS = 1.0, 5.0


class Health:
    """Writes `health` events; `memory_bytes` is what the machine has."""

    def __init__(
        self,
        recorder: Recorder,
        device: AbstractDevice,
        governor: ThermalCare,
        *,
        memory_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
        use: Callable[[], Usage] | None = None,
    ) -> None:
        self._recorder, self._device, self._governor = recorder, device, governor
        self._memory_bytes = memory_bytes
        self._clock = clock
        self._use = use or ProcessUsage()
        self._due_at = clock() + FIRST_AFTER_SECONDS
        self._last: tuple[float, int] | None = None

    def between_steps(self, progress: State) -> None:
        """Writes one if it is time; a comparison if not."""
        now = self._clock()
        if now < self._due_at:
            return
        self._due_at = now + INTERVAL_SECONDS
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
            **asdict(self._device.memory.usage()),
            "process": use.process_bytes,
            "used": used,
            "available": left,
            "swap": seen.swap_used_bytes,
        }
        busy = {"cpu": use.cpu_percent, "process": use.process_percent, "gpu": seen.gpu_busy_percent}
        states = {"heat": self._governor.heat, "thermal": seen.thermal, "pressure": seen.memory_pressure}
        return {"memory": _without_none(memory), "utilization": _without_none(busy), **_without_none(states)}


def _without_none(readings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in readings.items() if value is not None}


def held_memory(stepper: Stepper) -> dict[str, int]:
    """Bytes of weights, gradients, optimizer state and average, after a step; what is frozen has weights alone.

    Of a model in parts, what lies in this process.
    """

    def count(tensors: Iterable[Tensor]) -> int:
        here = (stepper.strategy.local(tensor) for tensor in tensors)
        return sum(tensor.numel() * tensor.element_size() for tensor in here)

    state = (value for slot in stepper.optimizer.state.values() for value in slot.values() if isinstance(value, Tensor))
    gradients = (parameter.grad for parameter in stepper.model.parameters() if parameter.grad is not None)
    held = {
        "weights": count(tensor for _, tensor in named_tensors(stepper.model)),
        "gradients": count(gradients),
        "optimizer": count(state),
    }
    return held if stepper.ema is None else {**held, "ema": count(stepper.ema.average.values())}
