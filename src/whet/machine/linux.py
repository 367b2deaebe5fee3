"""Facts about a Linux machine, read from /proc and /sys, within the limits of this process's control group."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeVar

import psutil

from whet.machine.facts import CpuFacts, Machine, OperatingSystem, SystemState
from whet.machine.programs import clean_name, complete_lines, positive_number, whole_number

# The root of /proc and /sys. Tests pass a different one.
ROOT = Path("/")
NVIDIA_VENDOR = "0x10de"
# Flags in /proc/cpuinfo for native bf16: two on x86, two on Arm.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}

Number = TypeVar("Number", int, float)


def read_text(path: Path) -> str | None:
    """Return the content of a file, or None if it is missing, unreadable or not text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def linux_machine(*, root: Path = ROOT, architecture: str | None = None) -> Machine:
    """Return the part of the machine that this process may use, without accelerators and torch."""
    info = parse_cpuinfo(read_text(root / "proc/cpuinfo"))
    limits = read_cgroup_limits(root)
    physical, logical = usable_cores(cores=info.cores, allowed=_affinity(), quota=limits.processors)
    # Arm kernels do not list core ids, so let psutil count the cores.
    if physical is None and logical is not None and info.cores is None:
        counted = psutil.cpu_count(logical=False)
        physical = min(counted, logical) if counted else None
    return Machine(
        name="this machine",
        chip=info.name,
        os=OperatingSystem(
            name="Linux", version=parse_os_release(read_text(root / "etc/os-release")), architecture=architecture
        ),
        cpu=CpuFacts(name=info.name, physical_cores=physical, logical_cores=logical, has_bf16=info.has_bf16),
        memory_bytes=usable_memory_bytes(root=root),
    )


def usable_memory_bytes(*, root: Path = ROOT) -> int | None:
    """Return the total memory that this process may use, in bytes."""
    return min_known(
        parse_meminfo(read_text(root / "proc/meminfo")).get("MemTotal"), read_cgroup_limits(root).memory_bytes
    )


def linux_system_state(*, root: Path = ROOT) -> SystemState:
    """Return the current memory, swap and power source."""
    memory = parse_meminfo(read_text(root / "proc/meminfo"))
    swap_total, swap_free = memory.get("SwapTotal"), memory.get("SwapFree")
    return SystemState(
        memory_available_bytes=min_known(memory.get("MemAvailable"), read_cgroup_limits(root).memory_left_bytes),
        swap_used_bytes=None if swap_total is None or swap_free is None else max(0, swap_total - swap_free),
        power_source=power_source(_power_supplies(root / "sys/class/power_supply")),
    )


def has_nvidia_card(*, root: Path = ROOT) -> bool | None:
    """Return whether an NVIDIA display device is on the PCI bus, or None if the bus cannot be read."""
    # A container may hide the PCI bus, so an empty list does not mean that there is no card.
    devices = _entries(root / "sys/bus/pci/devices")
    if not devices:
        return None
    # PCI class 0x03 is "display controller". Check the class, because NVIDIA cards also have an audio function.
    displays = (d for d in devices if (read_text(d / "class") or "").startswith("0x03"))
    return any((read_text(d / "vendor") or "").strip() == NVIDIA_VENDOR for d in displays)


class CpuInfo(NamedTuple):
    """The parts of /proc/cpuinfo that are used."""

    name: str | None = None
    has_bf16: bool | None = None
    cores: dict[int, tuple[int, int]] | None = None
    """(package, core) of each logical processor, or None if the kernel does not list them (Arm)."""


def parse_cpuinfo(text: str | None) -> CpuInfo:
    """Parse /proc/cpuinfo: the first processor's name, the flags that all processors share, and the core of each."""
    blocks = _cpu_blocks(text)
    names = [block["model name"] for block in blocks if "model name" in block]
    flags = [set(block.get("flags", block.get("Features", "")).split()) for block in blocks]
    # A thread may run on any core, so count a feature only if all cores have it.
    shared = set.intersection(*flags) if flags else set()
    return CpuInfo(
        name=clean_name(names[0]) if names else None,
        has_bf16=bool(shared & _BF16_FLAGS) if shared else None,
        cores=_core_ids(blocks),
    )


def _cpu_blocks(text: str | None) -> list[dict[str, str]]:
    blocks: list[dict[str, str]] = []
    for line in complete_lines(text):
        key, separator, value = (part.strip() for part in line.partition(":"))
        # Each block begins with its processor number.
        if key == "processor" and separator:
            blocks.append({})
        if separator and blocks:
            blocks[-1].setdefault(key, value)
    return blocks


def _core_ids(blocks: list[dict[str, str]]) -> dict[int, tuple[int, int]] | None:
    cores: dict[int, tuple[int, int]] = {}
    for block in blocks:
        processor, package, core = (whole_number(block.get(key)) for key in ("processor", "physical id", "core id"))
        if processor is None or package is None or core is None:
            return None
        cores[processor] = (package, core)
    return cores or None


def usable_cores(
    *, cores: dict[int, tuple[int, int]] | None, allowed: frozenset[int] | None, quota: float | None
) -> tuple[int | None, int | None]:
    """Return the numbers of (physical, logical) cores that this process may use.

    CPU affinity and the CPU quota of the control group both limit them. A quota of 2.5 processors counts as 2, because
    a third thread would be throttled half of the time, and the other threads would wait for it.
    """
    logical = len(allowed) if allowed else None
    physical = None
    if cores is not None and allowed and allowed <= cores.keys():
        physical = len({cores[processor] for processor in allowed})
    if quota is not None and logical is not None:
        logical = min(logical, max(1, math.floor(quota)))
    if physical is not None and logical is not None:
        physical = min(physical, logical)
    return physical, logical


def _affinity() -> frozenset[int] | None:
    try:
        return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    except OSError:
        return None


def parse_meminfo(text: str | None) -> dict[str, int]:
    """Parse /proc/meminfo. The values are in bytes."""
    values: dict[str, int] = {}
    for line in complete_lines(text):
        match = re.fullmatch(r"(\w+):\s+(\d{1,15}) kB", line, re.ASCII)
        if match:
            values[match[1]] = int(match[2]) * 1024
    return values


def parse_os_release(text: str | None) -> str | None:
    """Parse the name and version in /etc/os-release, such as "Debian GNU/Linux 12 (bookworm)"."""
    values = dict(line.split("=", 1) for line in complete_lines(text) if re.match(r"[A-Z_]+=", line))
    plain = {key: value.strip().strip("\"'") for key, value in values.items()}
    return clean_name(plain.get("PRETTY_NAME") or plain.get("NAME"))


class PowerSupply(NamedTuple):
    """One entry of /sys/class/power_supply."""

    kind: str | None = None
    online: str | None = None
    status: str | None = None
    scope: str | None = None


def power_source(supplies: Iterable[PowerSupply]) -> Literal["mains", "battery"] | None:
    """Return the power source. Batteries of a mouse or headset (scope "Device") are ignored."""
    own = [supply for supply in supplies if supply.scope != "Device"]
    batteries = {supply.status for supply in own if supply.kind == "Battery"}
    if any(supply.online == "1" for supply in own if supply.kind in ("Mains", "USB", "Wireless")):
        return "mains"
    if "Discharging" in batteries:
        return "battery"
    return "mains" if batteries & {"Charging", "Full", "Not charging"} else None


def _power_supplies(folder: Path) -> list[PowerSupply]:
    def value(entry: Path, name: str) -> str | None:
        text = read_text(entry / name)
        return text.strip() if text else None

    return [
        PowerSupply(value(entry, "type"), value(entry, "online"), value(entry, "status"), value(entry, "scope"))
        for entry in _entries(folder)
    ]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


class CgroupLimits(NamedTuple):
    """Limits of a control group, such as that of a container or service. None means no limit."""

    processors: float | None = None
    memory_bytes: int | None = None
    memory_left_bytes: int | None = None


def read_cgroup_limits(root: Path = ROOT) -> CgroupLimits:
    """Return the tightest limits of this process's control group and its parents, for cgroup versions 1 and 2."""
    groups = parse_cgroup_membership(read_text(root / "proc/self/cgroup"))
    mounted = root / "sys/fs/cgroup"
    limits = CgroupLimits()
    for folder in _cgroup_folders(mounted, groups.get("")):
        limits = tightest(limits, read_cgroup_v2(folder))
    for folder in _cgroup_folders(mounted / "memory", groups.get("memory")):
        limits = tightest(limits, CgroupLimits(None, *_memory_v1(folder)))
    # Version 1 mounts the CPU controller under one of two names.
    for name in ("cpu", "cpu,cpuacct"):
        for folder in _cgroup_folders(mounted / name, groups.get("cpu")):
            limits = tightest(limits, CgroupLimits(_processors_v1(folder)))
    return limits


def parse_cgroup_membership(text: str | None) -> dict[str, str]:
    """Parse /proc/self/cgroup into the path of the group for each controller. The key is empty for version 2."""
    groups: dict[str, str] = {}
    for line in complete_lines(text):
        number, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator and number.isdigit() and path.startswith("/"):
            for name in controllers.split(","):
                groups[name] = path
    return groups


def parse_cpu_max(text: str | None) -> float | None:
    """Parse the CPU quota: 2.0 processors for "200000 100000", None for "max"."""
    quota, _, period = (text or "").strip().partition(" ")
    return _cpu_quota(whole_number(quota), whole_number(period))


def parse_memory_limit(text: str | None) -> int | None:
    """Parse a number of bytes, or return None if there is no limit.

    If there is none, version 2 writes "max", and version 1 a number near 2**63. That has 19 digits, and
    `positive_number` accepts at most 18.
    """
    return positive_number(text)


def parse_memory_stat(text: str | None, key: str) -> int | None:
    """Parse the value of one key in memory.stat."""
    for line in complete_lines(text):
        name, _, value = line.partition(" ")
        if name == key:
            return whole_number(value)
    return None


def read_cgroup_v2(folder: Path) -> CgroupLimits:
    """Return the limits in one folder of cgroup version 2."""
    limit = parse_memory_limit(read_text(folder / "memory.max"))
    used = whole_number(read_text(folder / "memory.current"))
    cached = parse_memory_stat(read_text(folder / "memory.stat"), "inactive_file")
    return CgroupLimits(parse_cpu_max(read_text(folder / "cpu.max")), limit, _memory_left(limit, used, cached))


def tightest(one: CgroupLimits, other: CgroupLimits) -> CgroupLimits:
    """Combine two sets of limits: return the lower value of each limit."""
    return CgroupLimits(
        min_known(one.processors, other.processors),
        min_known(one.memory_bytes, other.memory_bytes),
        min_known(one.memory_left_bytes, other.memory_left_bytes),
    )


def min_known(one: Number | None, other: Number | None) -> Number | None:
    """Return the smaller of two numbers, ignoring an unknown one."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _memory_v1(folder: Path) -> tuple[int | None, int | None]:
    limit = parse_memory_limit(read_text(folder / "memory.limit_in_bytes"))
    used = whole_number(read_text(folder / "memory.usage_in_bytes"))
    cached = parse_memory_stat(read_text(folder / "memory.stat"), "total_inactive_file")
    return limit, _memory_left(limit, used, cached)


def _processors_v1(folder: Path) -> float | None:
    quota = whole_number(read_text(folder / "cpu.cfs_quota_us"))
    return _cpu_quota(quota, whole_number(read_text(folder / "cpu.cfs_period_us")))


def _cpu_quota(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period else None


def _memory_left(limit: int | None, used: int | None, cached: int | None) -> int | None:
    """Return the bytes that can still be allocated. Inactive file pages count as free: the kernel reclaims them."""
    if limit is None or used is None:
        return None
    return max(0, limit - max(0, used - (cached or 0)))


def _cgroup_folders(mounted: Path, group: str | None) -> list[Path]:
    """Return the folders of the group and its parents, each of which may set a limit."""
    # Inside a container, the kernel may report a path of the host, which lies outside the mount.
    if group is None or ".." in group:
        return []
    steps = PurePosixPath(group.strip("/"))
    return [mounted / step for step in (steps, *steps.parents)]
