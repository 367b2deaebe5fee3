"""Facts about a Linux machine, read from /proc and /sys, within the limits of its control group."""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from whet.machine import cgroup
from whet.machine.facts import Conditions, CpuFacts, Machine, OperatingSystem
from whet.machine.programs import clean_name, complete_lines, whole_number

NVIDIA_VENDOR = "0x10de"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""x86's two and Arm's two names, as /proc/cpuinfo spells them."""


class CpuInfo(NamedTuple):
    name: str | None = None
    has_bf16: bool | None = None
    cores: dict[int, tuple[int, int]] | None = None
    """The (package, core) behind each logical processor; None where the kernel does not say (Arm)."""


def parse_cpuinfo(text: str | None) -> CpuInfo:
    """/proc/cpuinfo: the first name, the flags that all processors share, and which core each belongs to."""
    blocks = _cpu_blocks(text)
    names = [block["model name"] for block in blocks if "model name" in block]
    flags = [set(block.get("flags", block.get("Features", "")).split()) for block in blocks]
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


def parse_meminfo(text: str | None) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found: dict[str, int] = {}
    for line in complete_lines(text):
        match = re.fullmatch(r"(\w+):\s+(\d{1,15}) kB", line, re.ASCII)
        if match:
            found[match[1]] = int(match[2]) * 1024
    return found


def parse_os_release(text: str | None) -> str | None:
    """The name and version in /etc/os-release, "Debian GNU/Linux 12 (bookworm)"."""
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
    """Where the power comes from; the batteries of a mouse or a headset (scope "Device") do not count."""
    own = [supply for supply in supplies if supply.scope != "Device"]
    batteries = {supply.status for supply in own if supply.kind == "Battery"}
    if any(supply.online == "1" for supply in own if supply.kind in ("Mains", "USB", "Wireless")):
        return "mains"
    if "Discharging" in batteries:
        return "battery"
    return "mains" if batteries & {"Charging", "Full", "Not charging"} else None


def usable_cores(
    *, cores: dict[int, tuple[int, int]] | None, allowed: frozenset[int] | None, quota: float | None
) -> tuple[int | None, int | None]:
    """(physical, logical) cores this process may use: its affinity, then its cgroup's share of time.

    A share of 2.5 processors counts as 2: a third thread would be stopped half of the time, and all wait for it.
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


def linux_machine(*, root: Path = Path("/"), architecture: str | None = None) -> Machine:
    """The machine without its accelerators and torch, as far as this process may use it."""
    info = parse_cpuinfo(_read_text(root / "proc/cpuinfo"))
    limits = cgroup.read_cgroup_limits(root)
    physical, logical = usable_cores(cores=info.cores, allowed=_affinity(), quota=limits.processors)
    if physical is None and logical is not None and info.cores is None:
        counted = psutil.cpu_count(logical=False)
        physical = min(counted, logical) if counted else None
    return Machine(
        name="this machine",
        chip=info.name,
        os=OperatingSystem(
            name="Linux", version=parse_os_release(_read_text(root / "etc/os-release")), architecture=architecture
        ),
        cpu=CpuFacts(name=info.name, physical_cores=physical, logical_cores=logical, has_bf16=info.has_bf16),
        memory_bytes=usable_memory_bytes(root=root),
    )


def usable_memory_bytes(*, root: Path = Path("/")) -> int | None:
    """All memory that this process may use."""
    return cgroup.min_known(
        parse_meminfo(_read_text(root / "proc/meminfo")).get("MemTotal"), cgroup.read_cgroup_limits(root).memory_bytes
    )


def linux_conditions(*, root: Path = Path("/")) -> Conditions:
    """Memory, swap and power as they are now."""
    memory = parse_meminfo(_read_text(root / "proc/meminfo"))
    swap_total, swap_free = memory.get("SwapTotal"), memory.get("SwapFree")
    return Conditions(
        memory_available_bytes=cgroup.min_known(
            memory.get("MemAvailable"), cgroup.read_cgroup_limits(root).memory_left_bytes
        ),
        swap_used_bytes=None if swap_total is None or swap_free is None else max(0, swap_total - swap_free),
        power_source=power_source(_power_supplies(root / "sys/class/power_supply")),
    )


def has_nvidia_card(*, root: Path = Path("/")) -> bool | None:
    """Whether a display device of NVIDIA sits on the PCI bus; None where the bus cannot be seen."""
    devices = _folders(root / "sys/bus/pci/devices")
    if not devices:
        return None
    display = (d for d in devices if (_read_text(d / "class") or "").startswith("0x03"))
    return any((_read_text(d / "vendor") or "").strip() == NVIDIA_VENDOR for d in display)


def _power_supplies(folder: Path) -> list[PowerSupply]:
    def word(entry: Path, name: str) -> str | None:
        text = _read_text(entry / name)
        return text.strip() if text else None

    return [
        PowerSupply(word(entry, "type"), word(entry, "online"), word(entry, "status"), word(entry, "scope"))
        for entry in _folders(folder)
    ]


def _affinity() -> frozenset[int] | None:
    try:
        return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    except OSError:
        return None


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_text(path: Path) -> str | None:
    return cgroup.read_text(path)
