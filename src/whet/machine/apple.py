"""Facts about a Mac, parsed from the output of macOS programs that run without root.

Output may be truncated, localized or from another program, so a parser returns None for anything it cannot recognize.
The formats come from manual pages and public threads (tests/support/machine_samples/README.md); no Mac was available.
"""

import ctypes
import json
import plistlib
import re
import sys
from typing import Any, Literal, NamedTuple

from whet.base.units import GB
from whet.machine.chips import find_chip
from whet.machine.facts import (
    Accelerator,
    CpuFacts,
    Machine,
    MissingDevice,
    OperatingSystem,
    PressureLevel,
    ThermalLevel,
    TorchFacts,
)
from whet.machine.programs import ProgramRunner, clean_name, complete_lines, positive_number, run_program, whole_number

# Names of the levels in xnu's memorystatus_notify.md.
_PRESSURE_LEVELS: dict[int | None, PressureLevel] = {1: "normal", 2: "warn", 4: "critical"}
_THERMAL_LEVELS: tuple[ThermalLevel, ...] = ("nominal", "moderate", "heavy", "trapping", "sleeping")
# macOS does not report fans, so they are derived from the model name.
_WITH_FAN = ("MacBook Pro", "Mac mini", "iMac", "Mac Studio", "Mac Pro")
_WITHOUT_FAN = ("MacBook Air", "MacBook Neo")


def parse_sysctl(text: str | None) -> dict[str, str]:
    """Parse `name: value` lines. A name with two different values is dropped as unknown."""
    values: dict[str, str] = {}
    ambiguous: set[str] = set()
    for line in complete_lines(text):
        name, separator, value = line.partition(":")
        if not separator or not re.fullmatch(r"[A-Za-z0-9_.]+", name):
            continue
        if values.setdefault(name, value.strip()) != value.strip():
            ambiguous.add(name)
    return {name: value for name, value in values.items() if name not in ambiguous}


class CoreClusters(NamedTuple):
    fast: int | None
    slow: int | None


def core_clusters(sysctl: dict[str, str]) -> CoreClusters:
    """Return the number of cores at level 0, the fastest, and at all other levels together.

    The second number is None if a level is missing.
    """
    levels = positive_number(sysctl.get("hw.nperflevels"))
    fast = positive_number(sysctl.get("hw.perflevel0.physicalcpu"))
    if levels is None:
        return CoreClusters(fast, None)
    # Read at most 8 levels, because a wrong hw.nperflevels must not cause a long loop.
    rest = [positive_number(sysctl.get(f"hw.perflevel{level}.physicalcpu")) for level in range(1, min(levels, 8))]
    known = [cores for cores in rest if cores is not None]
    return CoreClusters(fast, sum(known) if len(known) == levels - 1 else None)


def parse_flag(sysctl: dict[str, str], name: str) -> bool | None:
    """Parse a flag of sysctl: "0" or "1"."""
    return {"0": False, "1": True}.get(sysctl.get(name, ""))


def memory_pressure_level(level: int | None) -> PressureLevel | None:
    """Return the name of the kernel's memory pressure level, or None if it is unknown."""
    return _PRESSURE_LEVELS.get(level)


def parse_wired_limit(sysctl: dict[str, str]) -> int | None:
    """Parse the GPU memory limit set by the user, in bytes. Return None for 0, the system default."""
    megabytes = positive_number(sysctl.get("iogpu.wired_limit_mb"))
    return megabytes * 1024**2 if megabytes else None


class AppleGpu(NamedTuple):
    name: str | None = None
    num_cores: int | None = None
    busy_percent: float | None = None


def parse_ioreg(text: str | None) -> AppleGpu:
    """Parse the Apple GPU in `ioreg -r -d 1 -w 0 -c IOAccelerator -a`: the first entry with a core count."""
    try:
        entries = plistlib.loads((text or "").encode("utf-8"), fmt=plistlib.FMT_XML)
    except Exception:  # plistlib raises errors of expat and struct besides its own; all mean "not a plist"
        return AppleGpu()
    for entry in entries if isinstance(entries, list) else ():
        cores = _plist_int(entry, "gpu-core-count", highest=10_000)
        if cores:
            statistics = entry.get("PerformanceStatistics")
            busy = _plist_int(statistics, "Device Utilization %", highest=100)
            return AppleGpu(clean_name(entry.get("model")), cores, None if busy is None else float(busy))
    return AppleGpu()


class MacHardware(NamedTuple):
    name: str | None = None
    """Marketing name, such as "MacBook Air"."""
    identifier: str | None = None
    """Model identifier, such as "Mac14,2"."""
    chip: str | None = None
    memory_bytes: int | None = None


def parse_hardware(text: str | None) -> MacHardware:
    """Parse `system_profiler SPHardwareDataType -json`, ignoring serial numbers and identifiers of the owner."""
    try:
        entry = json.loads(text or "")["SPHardwareDataType"][0]
        memory = entry.get("physical_memory")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return MacHardware()
    match = re.fullmatch(r"(\d{1,5}) (GB|TB)", memory, re.ASCII) if isinstance(memory, str) else None
    return MacHardware(
        name=clean_name(entry.get("machine_name")),
        identifier=clean_name(entry.get("machine_model")),
        chip=clean_name(entry.get("chip_type")),
        memory_bytes=(int(match[1]) * (GB if match[2] == "GB" else 1024 * GB) or None) if match else None,
    )


def parse_power_source(text: str | None) -> Literal["mains", "battery"] | None:
    """Parse the first line of `pmset -g batt`: "Now drawing from 'AC Power'", formerly "Currently drawing from"."""
    for line in complete_lines(text):
        match = re.search(r"drawing from '(AC|Battery|UPS) Power'", line)
        if match:
            return "mains" if match[1] == "AC" else "battery"
    return None


def parse_low_power(text: str | None) -> bool | None:
    """Parse `lowpowermode` or, on newer systems, `powermode` in `pmset -g`: 0 automatic, 1 low power, 2 high power."""
    seen: set[str] = set()
    for line in complete_lines(text):
        match = re.fullmatch(r"\s*(?:lowpowermode|powermode)\s+([012])\s*", line, re.ASCII)
        if match:
            seen.add(match[1])
    return None if len(seen) != 1 else seen == {"1"}


def parse_sw_vers(text: str | None) -> str | None:
    """Parse the version of macOS in `sw_vers`, such as "15.1"."""
    for line in complete_lines(text):
        match = re.fullmatch(r"ProductVersion:\s+(\d{1,3}(?:\.\d{1,4}){0,3})\s*", line, re.ASCII)
        if match:
            return match[1]
    return None


def thermal_level(level: int | None) -> ThermalLevel | None:
    """Return the name of a thermal level of OSThermalNotification.h (0 to 4 on macOS)."""
    return _THERMAL_LEVELS[level] if level is not None and 0 <= level < len(_THERMAL_LEVELS) else None


def is_fanless(*, name: str | None, chip: str | None) -> bool | None:
    """Return whether the Mac has no fan: a MacBook Air has one with an Intel chip, but none with Apple silicon."""
    if name in _WITH_FAN:
        return False
    if name in _WITHOUT_FAN and chip is not None:
        return chip.startswith("Apple ")
    return None


def major_version(version: str | None) -> int | None:
    """Return the major number of a macOS version: 15 for "15.1"."""
    return whole_number((version or "").split(".")[0])


def oldest_macos(torch: TorchFacts) -> int:
    """Return the oldest macOS on which this torch supports MPS, from the tag of its wheel; 14 for an unknown version.

    >>> oldest_macos(TorchFacts(version="2.14.1")), oldest_macos(TorchFacts(version="2.15.0"))
    (14, 15)
    """
    return 15 if torch.is_before(2, 15) is False else 14


def old_macos(system: OperatingSystem, torch: TorchFacts) -> MissingDevice | None:
    """Return why this torch has no MPS on this macOS, or None if it has MPS or the version of macOS is unknown."""
    major, oldest = major_version(system.version), oldest_macos(torch)
    if major is None or major >= oldest:
        return None
    # macOS 14 can still be used with an older torch.
    or_older_torch = ", or install 'torch<2.15'" if major == 14 else ""
    version = torch.version or "of any version"
    return MissingDevice(
        device="mps",
        reason=f"macOS {system.version} is too old; MPS of torch {version} needs macOS {oldest}",
        fix=f"update to macOS {oldest} or newer{or_older_torch}",
    )


def _plist_int(entry: Any, key: str, *, highest: int) -> int | None:
    value = entry.get(key) if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= highest else None


# Use full paths, because /usr/sbin is not on every user's PATH.
SYSCTL = (
    "/usr/sbin/sysctl",
    "-i",
    "machdep.cpu.brand_string",
    "hw.model",
    "hw.memsize",
    "hw.physicalcpu",
    "hw.logicalcpu",
    "hw.nperflevels",
    "hw.perflevel0.physicalcpu",
    "hw.perflevel1.physicalcpu",
    "hw.perflevel2.physicalcpu",
    "hw.optional.arm64",
    "hw.optional.arm.FEAT_BF16",
    "sysctl.proc_translated",
    "iogpu.wired_limit_mb",
)
IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator", "-a")
HARDWARE = ("/usr/sbin/system_profiler", "SPHardwareDataType", "-json")
BATTERY = ("/usr/bin/pmset", "-g", "batt")
POWER = ("/usr/bin/pmset", "-g")
SW_VERS = ("/usr/bin/sw_vers",)

_THERMAL_KEY = b"com.apple.system.thermalpressurelevel"


class MacReadings(NamedTuple):
    """The parsed output of the programs that describe a Mac. Every field may be unknown."""

    sysctl: dict[str, str]
    gpu: AppleGpu = AppleGpu()
    hardware: MacHardware = MacHardware()
    version: str | None = None


def read_mac(*, run: ProgramRunner = run_program) -> MacReadings:
    """Run each program that describes a Mac once, and parse its output."""
    return MacReadings(
        sysctl=parse_sysctl(run(SYSCTL, any_exit=True)),
        gpu=parse_ioreg(run(IOREG)),
        hardware=parse_hardware(run(HARDWARE)),
        version=parse_sw_vers(run(SW_VERS)),
    )


def thermal_pressure(*, libc: Any = None) -> int | None:
    """Return the thermal pressure of macOS, 0 to 4, from notify(3), or None if it cannot be read.

    The key is in the private header OSThermalNotification.h. Reading it needs no root.
    """
    if libc is None:
        if sys.platform != "darwin":
            return None
        libc = ctypes.CDLL(None)
    # notify(3): register a token for the key, read its state, and cancel the token.
    token, state = ctypes.c_int(), ctypes.c_uint64()
    try:
        if libc.notify_register_check(_THERMAL_KEY, ctypes.byref(token)) != 0:
            return None
        try:
            failed = libc.notify_get_state(token, ctypes.byref(state)) != 0
        finally:
            libc.notify_cancel(token)
    except (AttributeError, OSError, ctypes.ArgumentError):
        return None
    return None if failed else state.value


def memory_pressure(*, libc: Any = None) -> int | None:
    """Return the kernel's memory pressure level (1, 2 or 4) without starting a process, or None if not on macOS."""
    # The value may be an int or a long. Either fits into 8 bytes, which are read as little-endian like all of macOS.
    raw = _sysctl(b"kern.memorystatus_vm_pressure_level", 8, libc=libc)
    return None if raw is None else int.from_bytes(raw, "little")


def swap_used(*, libc: Any = None) -> int | None:
    """Return the bytes of swap in use, from `struct xsw_usage` (sys/sysctl.h), or None on other systems."""
    raw = _sysctl(b"vm.swapusage", 32, libc=libc)
    return None if raw is None or len(raw) < 24 else int.from_bytes(raw[16:24], "little")


def _sysctl(name: bytes, max_bytes: int, *, libc: Any) -> bytes | None:
    if libc is None:
        if sys.platform != "darwin":
            return None
        libc = ctypes.CDLL(None)
    value, size = ctypes.create_string_buffer(max_bytes), ctypes.c_size_t(max_bytes)
    try:
        if libc.sysctlbyname(name, value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
            return None
    except (AttributeError, OSError, ctypes.ArgumentError):
        return None
    return value.raw[: size.value]


def has_apple_silicon(answers: MacReadings) -> bool | None:
    """Return whether the Mac is Apple silicon, even if this Python runs under Rosetta."""
    # proc_translated is 1 only under Rosetta, which only Apple silicon has.
    if parse_flag(answers.sysctl, "sysctl.proc_translated"):
        return True
    if (answers.hardware.chip or "").startswith("Apple "):
        return True
    return parse_flag(answers.sysctl, "hw.optional.arm64")


def mac_machine(answers: MacReadings, *, architecture: str | None) -> Machine:
    """Return the facts about the Mac, without its accelerator and torch. `architecture` is that of this Python."""
    sysctl, hardware = answers.sysctl, answers.hardware
    clusters = core_clusters(sysctl)
    # Under Rosetta brand_string names a virtual processor, so system_profiler takes precedence.
    chip = hardware.chip or clean_name(sysctl.get("machdep.cpu.brand_string"))
    return Machine(
        name="this machine",
        model=_model_name(hardware.name, hardware.identifier or clean_name(sysctl.get("hw.model"))),
        chip=chip,
        is_fanless=is_fanless(name=hardware.name, chip=chip),
        os=OperatingSystem(name="macOS", version=answers.version, architecture=architecture),
        cpu=CpuFacts(
            name=chip,
            physical_cores=positive_number(sysctl.get("hw.physicalcpu")),
            logical_cores=positive_number(sysctl.get("hw.logicalcpu")),
            fast_cores=clusters.fast,
            slow_cores=clusters.slow,
            has_bf16=parse_flag(sysctl, "hw.optional.arm.FEAT_BF16"),
        ),
        memory_bytes=positive_number(sysctl.get("hw.memsize")) or hardware.memory_bytes,
    )


def mac_accelerator(
    answers: MacReadings, *, machine: Machine, recommended_bytes: int | None, num_cores: int | None
) -> Accelerator:
    """Return the GPU that torch can use. Values reported by torch take precedence."""
    chip = find_chip(machine.chip)
    return Accelerator(
        kind="mps",
        name=answers.gpu.name or machine.chip,
        num_cores=num_cores or answers.gpu.num_cores,
        memory_bytes=machine.memory_bytes,
        # Metal reports exactly the limit that the user has set (AlexsJones/llmfit#754).
        usable_bytes=recommended_bytes or parse_wired_limit(answers.sysctl),
        shares_memory=True,
        capability=chip.gpu_family if chip else None,
    )


def _model_name(name: str | None, identifier: str | None) -> str | None:
    if name and identifier:
        return f"{name} ({identifier})"
    return name or identifier
