"""Does Linux wait for memory, or slow its cores because of heat? Stall times and throttle counters of the kernel."""

import re
from pathlib import Path
from typing import NamedTuple, get_args

from whet.machine import cgroup
from whet.machine.facts import PressureLevel, ThermalLevel
from whet.machine.programs import complete_lines, whole_number

STALLED_PERCENT = 10.0
"""Of the last ten seconds: so long some process waited for memory, and it can be felt."""
LITTLE_LEFT, NOTHING_LEFT = 0.08, 0.03
"""Shares of the memory that are left. Without swap a kernel kills before stalls can warn."""
HEAVY_SHARE = 0.1
"""Of the time between two readings: so long a core ran slower because of heat."""

_LEVELS: tuple[ThermalLevel, ...] = get_args(ThermalLevel)


class Stalls(NamedTuple):
    """Percent of the last ten seconds spent waiting for memory."""

    some: float | None = None
    """Some process waited."""
    full: float | None = None
    """All that could have run waited."""


def parse_stalls(text: str | None) -> Stalls:
    """A file of pressure stall information: "some avg10=0.00 avg60=0.00 avg300=0.00 total=0", then "full ..."."""
    found: dict[str, float] = {}
    for line in complete_lines(text):
        match = re.fullmatch(r"(some|full) avg10=(\d{1,3}\.\d\d) avg60=.*", line, re.ASCII)
        if match and float(match[2]) <= 100:
            found[match[1]] = float(match[2])
    return Stalls(found.get("some"), found.get("full"))


def read_stalls(root: Path = Path("/")) -> Stalls:
    """Those of our own control group where it counts them, else the whole machine's."""
    group = cgroup.parse_membership(cgroup.read_text(root / "proc/self/cgroup")).get("")
    own = None
    if group is not None and ".." not in group:
        own = cgroup.read_text(root / "sys/fs/cgroup" / group.strip("/") / "memory.pressure")
    return parse_stalls(own or cgroup.read_text(root / "proc/pressure/memory"))


def pressure(stalls: Stalls, *, available: int | None, total: int | None) -> PressureLevel | None:
    """Both signs of pressure together; None when neither can be read.

    >>> pressure(Stalls(12.0, 0.5), available=None, total=None), pressure(Stalls(), available=2, total=100)
    ('warn', 'critical')
    """
    left = None if available is None or not total else available / total
    if stalls.some is None and left is None:
        return None
    if (stalls.full or 0.0) >= STALLED_PERCENT or (left is not None and left < NOTHING_LEFT):
        return "critical"
    if (stalls.some or 0.0) >= STALLED_PERCENT or (left is not None and left < LITTLE_LEFT):
        return "warn"
    return "normal"


class Throttle(NamedTuple):
    """How often, and for how long, cores ran slower because of heat since the machine started; Intel's count it."""

    times: int | None = None
    milliseconds: int | None = None
    """Of the core that was slowed longest; newer kernels only."""


def read_throttle(root: Path = Path("/")) -> Throttle:
    """The counters of all cores; unknown where there are none (virtual machines, AMD, Arm)."""
    counts, times = [], []
    for folder in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle"):
        for kind in ("core", "package"):
            counts.append(whole_number(cgroup.read_text(folder / f"{kind}_throttle_count")))
            times.append(whole_number(cgroup.read_text(folder / f"{kind}_throttle_total_time_ms")))
    known_counts = [count for count in counts if count is not None]
    known_times = [milliseconds for milliseconds in times if milliseconds is not None]
    return Throttle(sum(known_counts) if known_counts else None, max(known_times, default=None))


def throttling(before: Throttle, now: Throttle, *, seconds: float) -> ThermalLevel | None:
    """What happened between two readings: nothing, some throttling, or throttling for a good part of the time."""
    if before.times is None or now.times is None or seconds <= 0:
        return None
    if now.times <= before.times and now.milliseconds == before.milliseconds:
        return "nominal"
    if before.milliseconds is None or now.milliseconds is None:
        return "moderate"
    return "heavy" if now.milliseconds - before.milliseconds >= HEAVY_SHARE * 1000 * seconds else "moderate"


def hotter(one: ThermalLevel | None, other: ThermalLevel | None) -> ThermalLevel | None:
    """The worse of two levels, where None means that nothing is known."""
    known = [level for level in (one, other) if level is not None]
    return max(known, key=_LEVELS.index, default=None)
