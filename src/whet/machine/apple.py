"""What is this Mac, and how is it now? Asks macOS's own programs, without root, and puts the facts together."""

import ctypes
import sys
from typing import Any, Literal, NamedTuple

from whet.machine import apple_parsers as parse
from whet.machine.chips import find_chip
from whet.machine.facts import Accelerator, Conditions, Cpu, Machine, OperatingSystem, ThermalLevel
from whet.machine.programs import Run, clean_name, positive_number, run_program

# By full path: /usr/sbin is not on every user's PATH.
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
    "kern.memorystatus_vm_pressure_level",
    "vm.swapusage",
)
IOREG = ("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator", "-a")
HARDWARE = ("/usr/sbin/system_profiler", "SPHardwareDataType", "-json")
BATTERY = ("/usr/bin/pmset", "-g", "batt")
THERMAL = ("/usr/bin/pmset", "-g", "therm")
POWER = ("/usr/bin/pmset", "-g")
SW_VERS = ("/usr/bin/sw_vers",)

_THERMAL_KEY = b"com.apple.system.thermalpressurelevel"


class Answers(NamedTuple):
    """What the programs said, parsed; every field may be unknown."""

    sysctl: dict[str, str]
    gpu: parse.AppleGpu = parse.AppleGpu()
    hardware: parse.Hardware = parse.Hardware()
    version: str | None = None
    power_source: Literal["mains", "battery"] | None = None
    low_power: bool | None = None
    thermal: ThermalLevel | None = None


def ask_macos(*, run: Run = run_program) -> Answers:
    """Every answer of this Mac, each program asked once."""
    return Answers(
        sysctl=parse.parse_sysctl(run(SYSCTL, any_exit=True)),
        gpu=parse.parse_ioreg(run(IOREG)),
        hardware=parse.parse_hardware(run(HARDWARE)),
        version=parse.parse_sw_vers(run(SW_VERS)),
        power_source=parse.parse_power_source(run(BATTERY)),
        low_power=parse.parse_low_power(run(POWER)),
        thermal=parse.thermal_name(thermal_pressure()) or parse.parse_thermal_warning(run(THERMAL)),
    )


def thermal_pressure(*, libc: Any = None) -> int | None:
    """macOS's thermal pressure, 0 to 4, through notify(3); None elsewhere or when it cannot be read.

    The key is in the private header OSThermalNotification.h; reading it needs no root.
    """
    if libc is None:
        if sys.platform != "darwin":
            return None
        libc = ctypes.CDLL(None)
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
    """The kernel's verdict on memory, 1, 2 or 4, without starting a program; None elsewhere."""
    raw = _sysctl(b"kern.memorystatus_vm_pressure_level", 8, libc=libc)
    return None if raw is None else int.from_bytes(raw, "little")


def swap_used(*, libc: Any = None) -> int | None:
    """Bytes of swap in use: the third number of `struct xsw_usage` (sys/sysctl.h); None elsewhere."""
    raw = _sysctl(b"vm.swapusage", 32, libc=libc)
    return None if raw is None or len(raw) < 24 else int.from_bytes(raw[16:24], "little")


def _sysctl(name: bytes, most_bytes: int, *, libc: Any) -> bytes | None:
    if libc is None:
        if sys.platform != "darwin":
            return None
        libc = ctypes.CDLL(None)
    value, size = ctypes.create_string_buffer(most_bytes), ctypes.c_size_t(most_bytes)
    try:
        if libc.sysctlbyname(name, value, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
            return None
    except (AttributeError, OSError, ctypes.ArgumentError):
        return None
    return value.raw[: size.value]


def has_apple_silicon(answers: Answers) -> bool | None:
    """Whether the Mac itself is Apple silicon, whatever this Python was built for."""
    if parse.flag_of(answers.sysctl, "sysctl.proc_translated"):
        return True
    if (answers.hardware.chip or "").startswith("Apple "):
        return True
    return parse.flag_of(answers.sysctl, "hw.optional.arm64")


def machine_of(answers: Answers, *, architecture: str | None) -> Machine:
    """The Mac without its accelerator and torch. `architecture` is what this Python was built for."""
    sysctl, hardware = answers.sysctl, answers.hardware
    clusters = parse.clusters_of(sysctl)
    # Under Rosetta brand_string names a made-up processor, so system_profiler is believed first.
    chip = hardware.chip or clean_name(sysctl.get("machdep.cpu.brand_string"))
    return Machine(
        name="this machine",
        model=_model(hardware.name, hardware.identifier or clean_name(sysctl.get("hw.model"))),
        chip=chip,
        is_fanless=parse.is_fanless(name=hardware.name, chip=chip),
        os=OperatingSystem(name="macOS", version=answers.version, architecture=architecture),
        cpu=Cpu(
            name=chip,
            physical_cores=positive_number(sysctl.get("hw.physicalcpu")),
            logical_cores=positive_number(sysctl.get("hw.logicalcpu")),
            fast_cores=clusters.fast,
            slow_cores=clusters.slow,
            has_bf16=parse.flag_of(sysctl, "hw.optional.arm.FEAT_BF16"),
        ),
        memory_bytes=positive_number(sysctl.get("hw.memsize")) or hardware.memory_bytes,
    )


def accelerator_of(
    answers: Answers, *, machine: Machine, recommended_bytes: int | None, num_cores: int | None
) -> Accelerator:
    """The GPU that torch can use here; torch's own numbers come before ours."""
    chip = find_chip(machine.chip)
    return Accelerator(
        kind="mps",
        name=answers.gpu.name or machine.chip,
        num_cores=num_cores or answers.gpu.num_cores,
        memory_bytes=machine.memory_bytes,
        # Metal reports exactly a limit set by hand (AlexsJones/llmfit#754).
        usable_bytes=recommended_bytes or parse.wired_limit_of(answers.sysctl),
        shares_memory=True,
        capability=chip.gpu_family if chip else None,
    )


def conditions_of(answers: Answers) -> Conditions:
    """How the Mac is now, as far as its own programs tell."""
    return Conditions(
        swap_used_bytes=parse.swap_used_of(answers.sysctl),
        power_source=answers.power_source,
        low_power_mode=answers.low_power,
        thermal=answers.thermal,
        memory_pressure=parse.pressure_of(answers.sysctl),
        gpu_busy_percent=answers.gpu.busy_percent,
    )


def _model(name: str | None, identifier: str | None) -> str | None:
    if name and identifier:
        return f"{name} ({identifier})"
    return name or identifier
