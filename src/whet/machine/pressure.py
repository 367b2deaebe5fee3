"""Thermal and memory pressure, read every few seconds while training.

Unknown values stay None. The macOS part was written from public headers and manual pages, and has never run on a Mac.
"""

import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import psutil

from whet.machine import apple, linux, nvidia
from whet.machine.facts import PressureLevel, SystemState, ThermalLevel
from whet.machine.programs import ProgramRunner, complete_lines, run_program, whole_number

# Percentage of the last ten seconds that processes waited for memory, above which users notice the stalls.
STALLED_PERCENT = 10.0
# Available memory as a share of all memory, below which the pressure is "warn" or "critical". Without swap, the kernel
# kills processes before they stall, so stalls alone are not enough.
LOW_MEMORY_SHARE, CRITICAL_MEMORY_SHARE = 0.08, 0.03
# Throttling for at least this share of the time between two readings counts as heavy.
HEAVY_SHARE = 0.1

# Interval between runs of the same program. In between, its last output is used.
PROGRAM_INTERVAL_SECONDS = 30.0
# The timeout is short, because the end of a session waits for the reading in progress.
PROGRAM_TIMEOUT_SECONDS = 2.0

ReadSystemState = Callable[[], SystemState]
"""Reads the current system state. A thread calls it during training, so it must use little CPU time."""

_THERMAL_ORDER: tuple[ThermalLevel, ...] = get_args(ThermalLevel)
_run_with_timeout = partial(run_program, timeout_seconds=PROGRAM_TIMEOUT_SECONDS)


def read_system_state() -> SystemState:
    """Read the state of this machine once. To read it repeatedly, use a `SystemStateReader`."""
    return SystemStateReader()()


class SystemStateReader:
    """Reads the state of this machine repeatedly. Caches the output of slow programs, and compares counters."""

    def __init__(
        self,
        *,
        system: str = sys.platform,
        run: ProgramRunner = _run_with_timeout,
        clock: Callable[[], float] = time.monotonic,
        root: Path = linux.ROOT,
        libc: Any = None,
        card: Callable[[], nvidia.GpuState] | None = None,
    ) -> None:
        # No sensors are known for other systems, so every value stays unknown.
        self._read = {"darwin": self._macos, "linux": self._linux}.get(system, SystemState)
        self._run, self._clock, self._root, self._libc = run, clock, root, libc
        self._card = card or nvidia.SingleGpuReader()
        self._from_programs = SystemState()
        self._programs_ran_at: float | None = None
        self._throttle: tuple[float, ThrottleCounters] | None = None

    def __call__(self) -> SystemState:
        return self._read()

    def _macos(self) -> SystemState:
        now = self._clock()
        if self._programs_ran_at is None or now - self._programs_ran_at >= PROGRAM_INTERVAL_SECONDS:
            self._programs_ran_at = now
            self._from_programs = SystemState(
                power_source=apple.parse_power_source(self._run(apple.BATTERY)),
                low_power_mode=apple.parse_low_power(self._run(apple.POWER)),
                gpu_busy_percent=apple.parse_ioreg(self._run(apple.IOREG)).busy_percent,
            )
        return self._from_programs.model_copy(
            update={
                "thermal": apple.thermal_level(apple.thermal_pressure(libc=self._libc)),
                "memory_pressure": apple.memory_pressure_level(apple.memory_pressure(libc=self._libc)),
                "swap_used_bytes": apple.swap_used(libc=self._libc),
                "memory_available_bytes": _available_memory(),
            }
        )

    def _linux(self) -> SystemState:
        known = linux.linux_system_state(root=self._root)
        card = self._card()
        before, now = self._throttle, (self._clock(), read_throttle_counters(self._root))
        self._throttle = now
        # Throttling is the difference of two readings, so the first reading gives no result.
        thermal = None if before is None else thermal_level_between(before[1], now[1], seconds=now[0] - before[0])
        return known.model_copy(
            update={
                "thermal": hottest(thermal, card.thermal),
                "memory_pressure": memory_pressure_level(
                    read_memory_stalls(self._root),
                    available=known.memory_available_bytes,
                    total=linux.usable_memory_bytes(root=self._root),
                ),
                "gpu_busy_percent": card.busy_percent,
            }
        )


class MemoryStalls(NamedTuple):
    """Percentages of the last ten seconds spent waiting for memory (Linux pressure stall information)."""

    some: float | None = None
    """Percent of the time in which at least one process waited."""
    full: float | None = None
    """Percent of the time in which all runnable processes waited."""


def parse_memory_stalls(text: str | None) -> MemoryStalls:
    """Parse pressure stall information: "some avg10=0.00 avg60=0.00 avg300=0.00 total=0", then "full ..."."""
    percent: dict[str, float] = {}
    for line in complete_lines(text):
        match = re.fullmatch(r"(some|full) avg10=(\d{1,3}\.\d\d) avg60=.*", line, re.ASCII)
        if match and float(match[2]) <= 100:
            percent[match[1]] = float(match[2])
    return MemoryStalls(percent.get("some"), percent.get("full"))


def read_memory_stalls(root: Path = linux.ROOT) -> MemoryStalls:
    """Read the stalls of the control group, or those of the whole machine if the group does not count them."""
    group = linux.parse_cgroup_membership(linux.read_text(root / "proc/self/cgroup")).get("")
    own = None
    # Prefer the control group: in a container, stalls of the machine do not reflect the container's memory limit.
    if group is not None and ".." not in group:
        own = linux.read_text(root / "sys/fs/cgroup" / group.strip("/") / "memory.pressure")
    return parse_memory_stalls(own or linux.read_text(root / "proc/pressure/memory"))


def memory_pressure_level(stalls: MemoryStalls, *, available: int | None, total: int | None) -> PressureLevel | None:
    """Return the memory pressure derived from stalls and available memory, or None if both are unknown.

    >>> memory_pressure_level(MemoryStalls(12.0, 0.5), available=None, total=None)
    'warn'
    >>> memory_pressure_level(MemoryStalls(), available=2, total=100)
    'critical'
    """
    left = None if available is None or not total else available / total
    if stalls.some is None and left is None:
        return None
    if (stalls.full or 0.0) >= STALLED_PERCENT or (left is not None and left < CRITICAL_MEMORY_SHARE):
        return "critical"
    if (stalls.some or 0.0) >= STALLED_PERCENT or (left is not None and left < LOW_MEMORY_SHARE):
        return "warn"
    return "normal"


class ThrottleCounters(NamedTuple):
    """Number and duration of thermal throttling events of the cores since boot. Only Intel processors count them."""

    times: int | None = None
    milliseconds: int | None = None
    """Milliseconds of throttling of the core that was throttled longest, or None on older kernels."""


def read_throttle_counters(root: Path = linux.ROOT) -> ThrottleCounters:
    """Read the counters of all cores. They are unknown on virtual machines, AMD and Arm."""
    counts, times = [], []
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle"):
        for kind in ("core", "package"):
            counts.append(whole_number(linux.read_text(folder / f"{kind}_throttle_count")))
            times.append(whole_number(linux.read_text(folder / f"{kind}_throttle_total_time_ms")))
    known_counts = [count for count in counts if count is not None]
    known_times = [milliseconds for milliseconds in times if milliseconds is not None]
    return ThrottleCounters(sum(known_counts) if known_counts else None, max(known_times, default=None))


def thermal_level_between(before: ThrottleCounters, now: ThrottleCounters, *, seconds: float) -> ThermalLevel | None:
    """Return the thermal level between two readings: nominal, moderate or heavy throttling, or None if unknown."""
    if before.times is None or now.times is None or seconds <= 0:
        return None
    if now.times <= before.times and now.milliseconds == before.milliseconds:
        return "nominal"
    # Older kernels count throttling events but not their duration.
    if before.milliseconds is None or now.milliseconds is None:
        return "moderate"
    return "heavy" if now.milliseconds - before.milliseconds >= HEAVY_SHARE * 1000 * seconds else "moderate"


def hottest(one: ThermalLevel | None, other: ThermalLevel | None) -> ThermalLevel | None:
    """Return the worse of two levels, ignoring an unknown one."""
    known = [level for level in (one, other) if level is not None]
    return max(known, key=_THERMAL_ORDER.index, default=None)


def _available_memory() -> int | None:
    try:
        return int(psutil.virtual_memory().available)
    except (psutil.Error, OSError, ValueError):
        return None
