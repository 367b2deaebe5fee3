"""Thermal and memory pressure, read every few seconds while training."""

import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import psutil

from whet.machine import apple, cgroup, linux, nvidia
from whet.machine import apple as parse
from whet.machine.facts import Conditions, PressureLevel, ThermalLevel
from whet.machine.programs import ProgramRunner, complete_lines, run_program, whole_number

STALLED_PERCENT = 10.0
"""Of the last ten seconds: so long some process waited for memory, and it can be felt."""
LOW_MEMORY_SHARE, CRITICAL_MEMORY_SHARE = 0.08, 0.03
"""Shares of the memory that are left. Without swap a kernel kills before stalls can warn."""
HEAVY_SHARE = 0.1
"""Of the time between two readings: so long a core ran slower because of heat."""

_THERMAL_ORDER: tuple[ThermalLevel, ...] = get_args(ThermalLevel)


class MemoryStalls(NamedTuple):
    """Percent of the last ten seconds spent waiting for memory."""

    some: float | None = None
    """Some process waited."""
    full: float | None = None
    """All that could have run waited."""


def parse_memory_stalls(text: str | None) -> MemoryStalls:
    """A file of pressure stall information: "some avg10=0.00 avg60=0.00 avg300=0.00 total=0", then "full ..."."""
    found: dict[str, float] = {}
    for line in complete_lines(text):
        match = re.fullmatch(r"(some|full) avg10=(\d{1,3}\.\d\d) avg60=.*", line, re.ASCII)
        if match and float(match[2]) <= 100:
            found[match[1]] = float(match[2])
    return MemoryStalls(found.get("some"), found.get("full"))


def read_memory_stalls(root: Path = Path("/")) -> MemoryStalls:
    """Those of our own control group where it counts them, else the whole machine's."""
    group = cgroup.parse_cgroup_membership(cgroup.read_text(root / "proc/self/cgroup")).get("")
    own = None
    if group is not None and ".." not in group:
        own = cgroup.read_text(root / "sys/fs/cgroup" / group.strip("/") / "memory.pressure")
    return parse_memory_stalls(own or cgroup.read_text(root / "proc/pressure/memory"))


def memory_pressure_level(stalls: MemoryStalls, *, available: int | None, total: int | None) -> PressureLevel | None:
    """Both signs of pressure together; None when neither can be read.

    >>> pressure(Stalls(12.0, 0.5), available=None, total=None), pressure(Stalls(), available=2, total=100)
    ('warn', 'critical')
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
    """How often, and for how long, cores ran slower because of heat since the machine started; Intel's count it."""

    times: int | None = None
    milliseconds: int | None = None
    """Of the core that was slowed longest; newer kernels only."""


def read_throttle_counters(root: Path = Path("/")) -> ThrottleCounters:
    """The counters of all cores; unknown where there are none (virtual machines, AMD, Arm)."""
    counts, times = [], []
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle"):
        for kind in ("core", "package"):
            counts.append(whole_number(cgroup.read_text(folder / f"{kind}_throttle_count")))
            times.append(whole_number(cgroup.read_text(folder / f"{kind}_throttle_total_time_ms")))
    known_counts = [count for count in counts if count is not None]
    known_times = [milliseconds for milliseconds in times if milliseconds is not None]
    return ThrottleCounters(sum(known_counts) if known_counts else None, max(known_times, default=None))


def thermal_level_between(before: ThrottleCounters, now: ThrottleCounters, *, seconds: float) -> ThermalLevel | None:
    """What happened between two readings: nothing, some throttling, or throttling for a good part of the time."""
    if before.times is None or now.times is None or seconds <= 0:
        return None
    if now.times <= before.times and now.milliseconds == before.milliseconds:
        return "nominal"
    if before.milliseconds is None or now.milliseconds is None:
        return "moderate"
    return "heavy" if now.milliseconds - before.milliseconds >= HEAVY_SHARE * 1000 * seconds else "moderate"


def hottest(one: ThermalLevel | None, other: ThermalLevel | None) -> ThermalLevel | None:
    """The worse of two levels, where None means that nothing is known."""
    known = [level for level in (one, other) if level is not None]
    return max(known, key=_THERMAL_ORDER.index, default=None)


ReadConditions = Callable[[], Conditions]
"""Answers how the machine is. It is called from a thread beside the training, and should wait rather than compute."""

PROGRAM_INTERVAL_SECONDS = 30.0
"""For how long a program's answer is believed before it is asked again."""
PROGRAM_TIMEOUT_SECONDS = 2.0
"""A program that takes longer is not waited for: a session that ends waits for the reading in progress."""


_run_with_timeout = partial(run_program, timeout_seconds=PROGRAM_TIMEOUT_SECONDS)


def read_conditions() -> Conditions:
    """One reading of this machine; who reads again and again keeps a `ConditionsReader`."""
    return ConditionsReader()()


class ConditionsReader:
    """Reads this machine again and again: it remembers what is dear to ask, and counters to compare with."""

    def __init__(
        self,
        *,
        system: str = sys.platform,
        run: ProgramRunner = _run_with_timeout,
        clock: Callable[[], float] = time.monotonic,
        root: Path = Path("/"),
        libc: Any = None,
        card: Callable[[], nvidia.GpuState] | None = None,
    ) -> None:
        self._read = {"darwin": self._macos, "linux": self._linux}.get(system, Conditions)
        self._run, self._clock, self._root, self._libc = run, clock, root, libc
        self._card = card or nvidia.SingleGpuReader()
        self._rare = Conditions()
        self._asked_at: float | None = None
        self._throttle: tuple[float, ThrottleCounters] | None = None

    def __call__(self) -> Conditions:
        return self._read()

    def _macos(self) -> Conditions:
        now = self._clock()
        if self._asked_at is None or now - self._asked_at >= PROGRAM_INTERVAL_SECONDS:
            self._asked_at = now
            self._rare = Conditions(
                power_source=parse.parse_power_source(self._run(apple.BATTERY)),
                low_power_mode=parse.parse_low_power(self._run(apple.POWER)),
                gpu_busy_percent=parse.parse_ioreg(self._run(apple.IOREG)).busy_percent,
            )
        return self._rare.model_copy(
            update={
                "thermal": parse.thermal_level(apple.thermal_pressure(libc=self._libc)),
                "memory_pressure": parse.memory_pressure_level(apple.memory_pressure(libc=self._libc)),
                "swap_used_bytes": apple.swap_used(libc=self._libc),
                "memory_available_bytes": _available_memory(),
            }
        )

    def _linux(self) -> Conditions:
        known = linux.linux_conditions(root=self._root)
        card = self._card()
        before, now = self._throttle, (self._clock(), read_throttle_counters(self._root))
        self._throttle = now
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


def _available_memory() -> int | None:
    try:
        return int(psutil.virtual_memory().available)
    except (psutil.Error, OSError, ValueError):
        return None
