"""How is the machine right now, asked every few seconds while it trains? Counters and files; programs only rarely.

Unknown stays None. What is for macOS was written from public headers and manual pages and never ran on a Mac.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from whet.machine import apple, linux, linux_strain, nvml
from whet.machine import apple_parsers as parse
from whet.machine.facts import Conditions
from whet.machine.programs import Run, run_program

Reader = Callable[[], Conditions]
"""Answers how the machine is. It is called from a thread beside the training, and should wait rather than compute."""

RARE_SECONDS = 30.0
"""For how long a program's answer is believed before it is asked again."""
PROGRAM_SECONDS = 2.0
"""A program that takes longer is not waited for: a session that ends waits for the reading in progress."""


_run_briefly = partial(run_program, timeout_seconds=PROGRAM_SECONDS)


def read_vitals() -> Conditions:
    """One reading of this machine; who reads again and again keeps a `Vitals`."""
    return Vitals()()


class Vitals:
    """Reads this machine again and again: it remembers what is dear to ask, and counters to compare with."""

    def __init__(
        self,
        *,
        system: str = sys.platform,
        run: Run = _run_briefly,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        libc: Any = None,
        card: Callable[[], nvml.CardState] | None = None,
    ) -> None:
        self._read = {"darwin": self._macos, "linux": self._linux}.get(system, Conditions)
        self._run, self._clock, self._root, self._libc = run, clock, root, libc
        self._card = card or nvml.OnlyCard()
        self._rare = Conditions()
        self._asked_at: float | None = None
        self._throttle: tuple[float, linux_strain.Throttle] | None = None

    def __call__(self) -> Conditions:
        return self._read()

    def _macos(self) -> Conditions:
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= RARE_SECONDS:
            self._asked_at = now
            self._rare = Conditions(
                power_source=parse.parse_power_source(self._run(apple.BATTERY)),
                low_power_mode=parse.parse_low_power(self._run(apple.POWER)),
                gpu_busy_percent=parse.parse_ioreg(self._run(apple.IOREG)).busy_percent,
            )
        return self._rare.model_copy(
            update={
                "thermal": parse.thermal_name(apple.thermal_pressure(libc=self._libc)),
                "memory_pressure": parse.pressure_name(apple.memory_pressure(libc=self._libc)),
                "swap_used_bytes": apple.swap_used(libc=self._libc),
                "memory_available_bytes": _memory_available(),
            }
        )

    def _linux(self) -> Conditions:
        known = linux.read_conditions(root=self._root)
        card = self._card()
        before, now = self._throttle, (self._clock(), linux_strain.read_throttle(self._root))
        self._throttle = now
        thermal = None if before is None else linux_strain.throttling(before[1], now[1], seconds=now[0] - before[0])
        return known.model_copy(
            update={
                "thermal": linux_strain.hotter(thermal, card.thermal),
                "memory_pressure": linux_strain.pressure(
                    linux_strain.read_stalls(self._root),
                    available=known.memory_available_bytes,
                    total=linux.memory_bytes(root=self._root),
                ),
                "gpu_busy_percent": card.busy_percent,
            }
        )


def _memory_available() -> int | None:
    try:
        return int(psutil.virtual_memory().available)
    except (psutil.Error, OSError, ValueError):
        return None
