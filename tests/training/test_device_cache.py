"""The callback that empties the cache of the device, with a clock and counters that the test sets."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from whet.base.units import GB
from whet.device.abstract import MemoryUsage
from whet.training.callbacks.device_cache import DeviceCache

pytestmark = pytest.mark.torch


class Device:
    """Memory of a driver that grows by half a GB with every step, beside a few bytes of tensors."""

    def __init__(self) -> None:
        self.reserved = 0
        self.num_emptied = 0
        self.memory = self

    def usage(self) -> MemoryUsage:
        return MemoryUsage(allocated=1_000, peak=1_000, reserved=self.reserved)

    def empty_cache(self) -> None:
        self.reserved = 0
        self.num_emptied += 1


def run_steps(num: int) -> tuple[Device, list[tuple[int, str]]]:
    """Return the device and the warnings after so many steps of a second each."""
    device, warnings = Device(), list[tuple[int, str]]()
    log = SimpleNamespace(event=lambda _, *, step, reason, **__: warnings.append((step, reason)))
    plan = SimpleNamespace(empty_cache="on")
    executor = SimpleNamespace(splitting=SimpleNamespace(shapes=()))
    now = 0.0
    callback = DeviceCache(clock=lambda: now)
    callback.on_start(cast(Any, SimpleNamespace(device=device, log=log, plan=plan, executor=executor)))
    for step in range(1, num + 1):
        now += 1.0
        device.reserved += GB // 2
        callback.after_step(cast(Any, SimpleNamespace(step=step)), cast(Any, None))
    return device, warnings


def test_growing_memory_is_returned_within_a_few_steps() -> None:
    device, warnings = run_steps(5)
    assert device.num_emptied == 1
    assert device.reserved < GB
    ((step, reason),) = warnings
    assert step == 5
    assert "the GPU's driver held 2 GB beside 1000 B" in reason
    assert "times so far" not in reason


def test_memory_that_keeps_growing_is_reported_ever_more_rarely() -> None:
    device, warnings = run_steps(400)
    assert device.num_emptied == 100
    counts = ["", *(f"({count} times so far)" for count in (2, 4, 8, 16, 32, 64))]
    assert len(warnings) == len(counts)
    assert all(count in reason for count, (_, reason) in zip(counts, warnings, strict=True))
