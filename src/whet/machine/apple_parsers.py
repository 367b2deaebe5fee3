"""What do the answers of macOS's own programs say? Pure functions: text in, facts or None out.

No answer is trusted to be whole, in English, or the expected program's. The forms were read in manual pages and
public threads (tests/null/samples/README.md), not on a Mac.
"""

import json
import plistlib
import re
from typing import Any, Literal, NamedTuple

from whet.base.units import GB
from whet.machine.facts import PressureLevel, ThermalLevel
from whet.machine.programs import clean_name, complete_lines, positive_number, whole_number

_BYTE_UNITS = {"B": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_PRESSURE: dict[str, PressureLevel] = {"1": "normal", "2": "warn", "4": "critical"}
_THERMAL: tuple[ThermalLevel, ...] = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_WITH_FAN = ("MacBook Pro", "Mac mini", "iMac", "Mac Studio", "Mac Pro")
_WITHOUT_FAN = ("MacBook Air", "MacBook Neo")


def parse_sysctl(text: str | None) -> dict[str, str]:
    """`name: value` lines as a dictionary; a name given twice with two values is unknown."""
    found: dict[str, str] = {}
    doubtful: set[str] = set()
    for line in complete_lines(text):
        name, separator, value = line.partition(":")
        if not separator or not re.fullmatch(r"[A-Za-z0-9_.]+", name):
            continue
        if found.setdefault(name, value.strip()) != value.strip():
            doubtful.add(name)
    return {name: value for name, value in found.items() if name not in doubtful}


class Clusters(NamedTuple):
    fast: int | None
    slow: int | None


def clusters_of(sysctl: dict[str, str]) -> Clusters:
    """Cores of level 0, the fastest, and of all other levels together; a missing level makes the sum unknown."""
    levels = positive_number(sysctl.get("hw.nperflevels"))
    fast = positive_number(sysctl.get("hw.perflevel0.physicalcpu"))
    if levels is None:
        return Clusters(fast, None)
    rest = [positive_number(sysctl.get(f"hw.perflevel{level}.physicalcpu")) for level in range(1, min(levels, 8))]
    known = [cores for cores in rest if cores is not None]
    return Clusters(fast, sum(known) if len(known) == levels - 1 else None)


def flag_of(sysctl: dict[str, str], name: str) -> bool | None:
    """A 0/1 value as a claim."""
    return {"0": False, "1": True}.get(sysctl.get(name, ""))


def pressure_of(sysctl: dict[str, str]) -> PressureLevel | None:
    """Memory pressure in the kernel's own verdict: 1 normal, 2 warn, 4 critical (xnu, memorystatus_notify.md)."""
    return _PRESSURE.get(sysctl.get("kern.memorystatus_vm_pressure_level", ""))


def pressure_name(level: int | None) -> PressureLevel | None:
    """The same verdict from its number."""
    return _PRESSURE.get(str(level))


def swap_used_of(sysctl: dict[str, str]) -> int | None:
    """Bytes in use of `total = 2048.00M  used = 1117.25M  free = 930.75M  (encrypted)`; a comma is a point too."""
    found = re.search(r"\bused = (\d{1,9})(?:[.,](\d{1,4}))?([BKMGT])\b", sysctl.get("vm.swapusage", ""), re.ASCII)
    if found is None:
        return None
    return int(float(f"{found[1]}.{found[2] or 0}") * _BYTE_UNITS[found[3]])


def wired_limit_of(sysctl: dict[str, str]) -> int | None:
    """The GPU memory limit somebody set by hand, in bytes; None for 0, the system's own choice."""
    megabytes = positive_number(sysctl.get("iogpu.wired_limit_mb"))
    return megabytes * 1024**2 if megabytes else None


class AppleGpu(NamedTuple):
    name: str | None = None
    num_cores: int | None = None
    busy_percent: float | None = None


def parse_ioreg(text: str | None) -> AppleGpu:
    """The Apple GPU in `ioreg -r -d 1 -w 0 -c IOAccelerator -a`: the first entry that counts its cores."""
    try:
        entries = plistlib.loads((text or "").encode("utf-8"), fmt=plistlib.FMT_XML)
    except Exception:  # plistlib lets expat's, struct's and its own errors through: each means "not a plist"
        return AppleGpu()
    for entry in entries if isinstance(entries, list) else ():
        cores = _int_of(entry, "gpu-core-count", highest=10_000)
        if cores:
            statistics = entry.get("PerformanceStatistics")
            busy = _int_of(statistics, "Device Utilization %", highest=100)
            return AppleGpu(clean_name(entry.get("model")), cores, None if busy is None else float(busy))
    return AppleGpu()


class Hardware(NamedTuple):
    name: str | None = None
    """What people call it: "MacBook Air"."""
    identifier: str | None = None
    """"Mac14,2"."""
    chip: str | None = None
    memory_bytes: int | None = None


def parse_hardware(text: str | None) -> Hardware:
    """`system_profiler SPHardwareDataType -json`: serial numbers and identifiers of the owner are left there."""
    try:
        entry = json.loads(text or "")["SPHardwareDataType"][0]
        memory = entry.get("physical_memory")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return Hardware()
    found = re.fullmatch(r"(\d{1,5}) (GB|TB)", memory, re.ASCII) if isinstance(memory, str) else None
    return Hardware(
        name=clean_name(entry.get("machine_name")),
        identifier=clean_name(entry.get("machine_model")),
        chip=clean_name(entry.get("chip_type")),
        memory_bytes=(int(found[1]) * (GB if found[2] == "GB" else 1024 * GB) or None) if found else None,
    )


def parse_power_source(text: str | None) -> Literal["mains", "battery"] | None:
    """First line of `pmset -g batt`: "Now drawing from 'AC Power'"; older systems say "Currently drawing from"."""
    for line in complete_lines(text):
        found = re.search(r"drawing from '(AC|Battery|UPS) Power'", line)
        if found:
            return "mains" if found[1] == "AC" else "battery"
    return None


def parse_thermal_warning(text: str | None) -> ThermalLevel | None:
    """`pmset -g therm`, which says something on Intel only: a speed limit below 100 is real throttling.

    "No thermal warning level has been recorded" is printed by hot Apple silicon too, so it means nothing.
    """
    for line in complete_lines(text):
        found = re.fullmatch(r"\s*CPU_Speed_Limit\s*=\s*(\d{1,3})\s*", line, re.ASCII)
        if found:
            return "nominal" if int(found[1]) >= 100 else "heavy"
    return None


def parse_low_power(text: str | None) -> bool | None:
    """`lowpowermode` or, on newer systems, `powermode` in `pmset -g`: 0 automatic, 1 low power, 2 high power."""
    seen: set[str] = set()
    for line in complete_lines(text):
        found = re.fullmatch(r"\s*(?:lowpowermode|powermode)\s+([012])\s*", line, re.ASCII)
        if found:
            seen.add(found[1])
    return None if len(seen) != 1 else seen == {"1"}


def parse_sw_vers(text: str | None) -> str | None:
    """The version of macOS in `sw_vers`, "15.1"."""
    for line in complete_lines(text):
        found = re.fullmatch(r"ProductVersion:\s+(\d{1,3}(?:\.\d{1,4}){0,3})\s*", line, re.ASCII)
        if found:
            return found[1]
    return None


def thermal_name(level: int | None) -> ThermalLevel | None:
    """The five levels of OSThermalNotification.h for macOS by their names."""
    return _THERMAL[level] if level is not None and 0 <= level < len(_THERMAL) else None


def is_fanless(*, name: str | None, chip: str | None) -> bool | None:
    """Whether the Mac cools without a fan. A MacBook Air does since it has Apple silicon; before, it had a fan."""
    if name in _WITH_FAN:
        return False
    if name in _WITHOUT_FAN and chip is not None:
        return chip.startswith("Apple ")
    return None


def major_version(version: str | None) -> int | None:
    """The 15 of "15.1"."""
    return whole_number((version or "").split(".")[0])


def _int_of(entry: Any, key: str, *, highest: int) -> int | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= highest else None
