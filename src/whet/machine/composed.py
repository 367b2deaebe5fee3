"""Compose Macs from the table of chips, and find the known Mac that is nearest to a real one."""

import math
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.base.units import GB
from whet.machine.apple import old_macos
from whet.machine.chips import CHIPS, FAMILY_SOURCE, Chip, find_chip
from whet.machine.facts import Accelerator, CpuFacts, Machine, MissingDevice, OperatingSystem, TorchFacts

ASSUMED_TORCH = "2.15.0"
ASSUMED_MACOS = "15.6"

# Metal's recommended working set is two thirds of 8 or 16 GB, and three quarters of 64 GB. Newer macOS allows more.
_SMALL_MEMORY_GB = 36
_SMALL_SHARE, _LARGE_SHARE = 2 / 3, 3 / 4
_OPTIONS = ("memory", "torch", "macos")
_NO_CUDA = MissingDevice(
    device="cuda",
    reason="there is no CUDA on macOS",
    fix="train on MPS here; the same run continues on a CUDA machine",
)


class MacModel(NamedTuple):
    """A Mac with one configuration of a chip, sold with several sizes of memory."""

    name: str
    chip: str
    model: str
    memory_gb: tuple[int, ...]
    cpu: tuple[int, int]
    """Numbers of (fast, slow) cores."""
    gpu_cores: int


# Configurations from Apple's technical specifications.
MACS: tuple[MacModel, ...] = (
    MacModel("m1-mini", "Apple M1", "Mac mini (M1, 2020)", (8, 16), (4, 4), 8),
    MacModel("m1-pro", "Apple M1 Pro", "MacBook Pro (14-inch, 2021)", (16, 32), (8, 2), 16),
    MacModel("m3-max", "Apple M3 Max", "MacBook Pro (16-inch, 2023)", (36, 96), (10, 4), 30),
    MacModel("m3-max", "Apple M3 Max", "MacBook Pro (16-inch, 2023)", (48, 128), (12, 4), 40),
    MacModel("m4", "Apple M4", "Mac mini (2024)", (16, 24, 32), (4, 6), 10),
    MacModel("m4-pro", "Apple M4 Pro", "Mac mini (2024)", (24, 48, 64), (10, 4), 20),
    MacModel("m4-max", "Apple M4 Max", "MacBook Pro (16-inch, 2024)", (36,), (10, 4), 32),
    MacModel("m4-max", "Apple M4 Max", "MacBook Pro (16-inch, 2024)", (48, 64, 128), (12, 4), 40),
    MacModel("m5", "Apple M5", "MacBook Pro (14-inch, 2025)", (16, 24, 32), (4, 6), 10),
    MacModel("m5-pro", "Apple M5 Pro", "MacBook Pro (2026)", (48, 64), (6, 12), 20),
    MacModel("m5-max", "Apple M5 Max", "MacBook Pro (2026)", (36,), (6, 12), 32),
    MacModel("m5-max", "Apple M5 Max", "MacBook Pro (2026)", (48, 64, 128), (6, 12), 40),
)


def mac_names() -> tuple[str, ...]:
    """Return the names of the composed Macs: a chip or model and its memory, such as "m1-mini-8gb"."""
    return tuple(f"{mac.name}-{memory}gb" for mac in MACS for memory in mac.memory_gb)


def is_chip_name(name: str) -> bool:
    """Return whether `name` is the name of a chip, written like "m4-pro"."""
    return _chip(name) is not None


def named_mac(name: str, options: list[str]) -> Machine:
    """Return the composed Mac with this name, or compose one from the name of a chip and the option `memory`."""
    for mac in MACS:
        for memory in mac.memory_gb:
            if name == f"{mac.name}-{memory}gb":
                chip = find_chip(mac.chip)
                assert chip is not None
                machine = compose_mac(chip, memory, name=name, model=mac.model, cpu=mac.cpu, gpu_cores=mac.gpu_cores)
                return change_machine(machine, options)
    chip = _chip(name)
    assert chip is not None
    size = _parse_options(options).get("memory")
    if size is None:
        raise UsageError(
            "a chip is sold with different sizes of memory", got=name, try_=f"{name},memory={chip.max_memory_gb}"
        )
    machine = compose_mac(chip, _memory_gb(size, chip), name=f"{name},memory={size}")
    return change_machine(machine, [option for option in options if not option.startswith("memory=")])


def change_machine(machine: Machine, options: list[str]) -> Machine:
    """Return the machine with a different torch, macOS or memory, such as "torch=2.15", "macos=14.6" or "memory=16"."""
    for key, value in _parse_options(options).items():
        if key == "torch":
            machine = machine.model_copy(update={"torch": machine.torch.model_copy(update={"version": value})})
        elif key == "macos":
            machine = machine.model_copy(update={"os": machine.os.model_copy(update={"version": value})})
        else:
            chip, gpu = find_chip(machine.chip), machine.accelerator("mps")
            if chip is None or gpu is None:
                raise UsageError("only a Mac can have other memory", got=machine.name, try_="a chip: m4-pro,memory=24")
            memory = _memory_gb(value, chip) * GB
            changed = gpu.model_copy(update={"memory_bytes": memory, "usable_bytes": _usable_bytes(memory)})
            machine = machine.model_copy(update={"memory_bytes": memory, "accelerators": (changed,)})
    too_old = old_macos(machine.os, machine.torch) if machine.accelerator("mps") else None
    if too_old is not None:
        machine = machine.model_copy(update={"accelerators": (), "absent": (*machine.absent, too_old)})
    return machine.model_copy(update={"name": ",".join([machine.name, *options])}) if options else machine


def compose_mac(
    chip: Chip,
    memory_gb: int,
    *,
    name: str,
    model: str | None = None,
    cpu: tuple[int, int] | None = None,
    gpu_cores: int | None = None,
) -> Machine:
    """Return a Mac with this chip and memory. By default, it has the most cores that the chip is sold with."""
    fast, slow = cpu or chip.cpu[-1]
    memory = memory_gb * GB
    has_bf16 = chip.generation.gpu_family not in ("apple7", None)
    return Machine(
        name=name,
        origin="composed",
        sources=(
            f"cores, memory: {chip.generation.specs_source}",
            "usable memory: two thirds up to 36 GB (exo-explore/exo#1672), else three quarters (llama.cpp#1870)",
            "bf16: CPU instructions from M2 on (LLVM, AArch64Processors.td)",
            f"GPU family: {FAMILY_SOURCE}",
            "torch threads: as many as there are fast cores (ATen/ParallelCommon.cpp, pytorch/pytorch#123038)",
            f"assumed, not seen: macOS {ASSUMED_MACOS} and torch {ASSUMED_TORCH}, a fan, default wired limit",
        ),
        model=model,
        chip=chip.name,
        is_fanless=False if model else None,
        os=OperatingSystem(name="macOS", version=ASSUMED_MACOS, architecture="arm64"),
        cpu=CpuFacts(
            name=chip.name,
            physical_cores=fast + slow,
            logical_cores=fast + slow,
            fast_cores=fast,
            slow_cores=slow,
            has_bf16=has_bf16,
        ),
        memory_bytes=memory,
        accelerators=(
            Accelerator(
                kind="mps",
                name=chip.name,
                num_cores=gpu_cores or chip.gpu_cores[-1],
                memory_bytes=memory,
                usable_bytes=_usable_bytes(memory),
                shares_memory=True,
                capability=chip.gpu_family,
            ),
        ),
        absent=(_NO_CUDA,),
        torch=TorchFacts(version=ASSUMED_TORCH, mps_built=True, num_threads=fast),
    )


def nearest_machine(machine: Machine, known: list[Machine]) -> tuple[Machine, str] | None:
    """Return the known Mac nearest to a machine, and how they differ, or None if it is not an Apple silicon Mac.

    A Mac with the same chip is nearest, because the chip determines bandwidth, throughput and known bugs. Otherwise
    memory counts more than GPU cores, except for a chip that is not in the table.
    """
    macs = [mac for mac in known if mac.accelerator("mps") is not None]
    if not (machine.chip or "").startswith("Apple ") or not macs:
        return None
    nearest = min(macs, key=lambda mac: _distance(machine, mac))
    return nearest, ", ".join(_differences(machine, nearest)) or "the same chip, cores and memory"


def _distance(machine: Machine, mac: Machine) -> tuple[float, ...]:
    cores = abs(_gpu_cores(machine) - _gpu_cores(mac))
    memory = abs(math.log2((machine.memory_bytes or GB) / (mac.memory_bytes or GB)))
    return (machine.chip != mac.chip, cores if find_chip(machine.chip) is None else 0, memory, cores)


def _differences(machine: Machine, mac: Machine) -> list[str]:
    pairs = (
        ("", machine.chip, mac.chip),
        ("memory", _memory_text(machine), _memory_text(mac)),
        ("GPU cores", _gpu_cores(machine), _gpu_cores(mac)),
        ("fast CPU cores", machine.cpu.fast_cores, mac.cpu.fast_cores),
    )
    different = [(what, given or "unknown", known) for what, given, known in pairs if given != known]
    return [f"{given} {what}".strip() + f" instead of {known}" for what, given, known in different]


def _gpu_cores(machine: Machine) -> int:
    gpu = machine.accelerator("mps")
    return (gpu.num_cores if gpu else None) or 0


def _memory_text(machine: Machine) -> str:
    return f"{(machine.memory_bytes or 0) / GB:.0f} GB"


def _chip(name: str) -> Chip | None:
    chip = find_chip(name.replace("-", " "))
    return chip if chip is not None and chip in CHIPS and name == name.casefold() and " " not in name else None


def _usable_bytes(memory: int) -> int:
    return int(memory * (_SMALL_SHARE if memory <= _SMALL_MEMORY_GB * GB else _LARGE_SHARE))


def _memory_gb(text: str, chip: Chip) -> int:
    gigabytes = text.casefold().removesuffix("gb")
    if not gigabytes.isdecimal() or not 1 <= int(gigabytes) <= chip.max_memory_gb:
        raise UsageError(
            f"{chip.name} has up to {chip.max_memory_gb} GB", got=f"memory={text}", try_=f"memory={chip.max_memory_gb}"
        )
    return int(gigabytes)


def _parse_options(options: list[str]) -> dict[str, str]:
    parsed = dict(option.partition("=")[::2] for option in options)
    for key, value in parsed.items():
        if key not in _OPTIONS or not value:
            raise UsageError(
                "unknown option of a machine", got=f"{key}={value}", try_="memory=16, torch=2.15 or macos=15.1"
            )
    return parsed
