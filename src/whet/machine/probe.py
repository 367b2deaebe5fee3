"""Probe this machine: system, driver, torch, and the reasons for missing devices.

The result contains no host name, user, serial number or path, so that it can be published.
"""

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from whet.base import env
from whet.machine import apple, linux, nvidia
from whet.machine.apple import old_macos
from whet.machine.environment import read_environment
from whet.machine.facts import (
    Accelerator,
    DeviceKind,
    Machine,
    MissingDevice,
    OperatingSystem,
    ProbeResult,
)
from whet.machine.load import busy_processes
from whet.machine.nvidia import NO_DRIVER, NvidiaCards
from whet.machine.pressure import read_system_state
from whet.machine.programs import ProgramRunner, run_program
from whet.machine.torch_info import TorchInfo, torch_query

_INSTALL_TORCH = "pip install 'torch>=2.11'; https://pytorch.org names the command for other builds"


class SystemReadings(NamedTuple):
    """Facts from the operating system and the driver, without torch."""

    machine: Machine
    mac: apple.MacReadings | None = None
    cards: nvidia.NvidiaCards = nvidia.NO_DRIVER
    has_card_on_bus: bool | None = None


def probe() -> ProbeResult:
    """Return the facts about this machine and its current state. This takes a few seconds.

    >>> whet.probe().machine.cpu.logical_cores  # doctest: +SKIP
    8
    """
    # Importing torch in the child takes seconds, so read the system in the meantime.
    with torch_query() as torch_info:
        system = read_system()
        now = {"busy": busy_processes(memory_bytes=system.machine.memory_bytes), "environment": read_environment()}
        system_state = read_system_state().model_copy(update=now)
        return ProbeResult(machine=assemble_machine(system, torch=torch_info()), system_state=system_state)


def probe_machine() -> Machine:
    """Return the constant facts about this machine, without its current state."""
    with torch_query() as torch_info:
        system = read_system()
        return assemble_machine(system, torch=torch_info())


def read_system(
    *, run: ProgramRunner = run_program, system: str = sys.platform, architecture: str | None = None
) -> SystemReadings:
    """Read facts from the operating system and the driver. `architecture` defaults to that of this Python."""
    architecture = architecture or _architecture(platform.machine())
    if system == "darwin":
        readings = apple.read_mac(run=run)
        return SystemReadings(apple.mac_machine(readings, architecture=architecture), mac=readings)
    cards = nvidia.query_driver(run=run)
    machine = linux.linux_machine(architecture=architecture)
    return SystemReadings(machine, cards=cards, has_card_on_bus=linux.has_nvidia_card())


def assemble_machine(system: SystemReadings, *, torch: TorchInfo) -> Machine:
    """Return the machine with the accelerators that torch can use, and a reason for each missing device."""
    accelerators = (*_mps_accelerators(system, torch), *_cuda_accelerators(system, torch))
    facts = DeviceFacts(
        os=system.machine.os,
        torch=torch,
        has_apple_silicon=apple.has_apple_silicon(system.mac) if system.mac else None,
        cards=system.cards,
        has_card_on_bus=system.has_card_on_bus,
        visible_devices=env.child_environment().get("CUDA_VISIBLE_DEVICES"),
    )
    # On a machine with a CUDA GPU, `chip` is the name of the GPU.
    cards = [accelerator.name for accelerator in accelerators if accelerator.kind == "cuda"]
    return system.machine.model_copy(
        update={
            "chip": next((name for name in cards if name), system.machine.chip),
            "accelerators": accelerators,
            "absent": missing_devices(facts),
            "torch": torch.facts(),
            "python": platform.python_version(),
        }
    )


def _mps_accelerators(system: SystemReadings, torch: TorchInfo) -> tuple[Accelerator, ...]:
    if system.mac is None or not torch.mps_available:
        return ()
    return (
        apple.mac_accelerator(
            system.mac,
            machine=system.machine,
            recommended_bytes=torch.mps_recommended_bytes,
            num_cores=torch.mps_num_cores,
        ),
    )


def _cuda_accelerators(system: SystemReadings, torch: TorchInfo) -> tuple[Accelerator, ...]:
    if not torch.cuda_available:
        return ()
    # torch does not report the driver version, so take it from nvidia-smi. All cards share one driver.
    driver = next((card.driver for card in system.cards.cards if card.driver), None)
    return tuple(
        Accelerator(
            kind="cuda",
            name=device.name,
            num_cores=device.num_multiprocessors,
            memory_bytes=device.memory_bytes,
            usable_bytes=device.memory_bytes,
            capability=device.capability,
            driver=driver,
        )
        for device in torch.cuda_devices
    )


def _architecture(name: str) -> str | None:
    return {"aarch64": "arm64", "amd64": "x86_64", "AMD64": "x86_64"}.get(name, name) or None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """The facts that decide whether torch can use a device."""

    os: OperatingSystem
    """Operating system, with the architecture of this Python."""
    torch: TorchInfo
    has_apple_silicon: bool | None = None
    cards: NvidiaCards = NO_DRIVER
    has_card_on_bus: bool | None = None
    visible_devices: str | None = None
    """Value of CUDA_VISIBLE_DEVICES, or None if it is unset."""


@dataclass(frozen=True)
class Cause:
    """One possible reason why a device is missing. The first one in a list that applies is reported."""

    applies: Callable[[DeviceFacts], bool]
    reason: str
    fix: str


def missing_devices(facts: DeviceFacts) -> tuple[MissingDevice, ...]:
    """Return the devices that torch cannot use on this machine, each with the reason and a fix."""
    missing = []
    if not facts.torch.mps_available:
        missing.append(_explain("mps", _NO_MPS_CAUSES, facts))
    if not facts.torch.cuda_available:
        missing.append(_explain("cuda", _NO_CUDA_CAUSES, facts))
    return tuple(missing)


def hides_all_gpus(visible_devices: str | None) -> bool:
    """Return whether CUDA_VISIBLE_DEVICES hides every GPU: it is empty, or CUDA rejects its first entry, such as -1."""
    if visible_devices is None:
        return False
    first = visible_devices.split(",")[0].strip()
    return not first or first.startswith("-") or first == "NoDevFiles"


def _explain(device: DeviceKind, causes: tuple[Cause, ...], facts: DeviceFacts) -> MissingDevice:
    cause = next(cause for cause in causes if cause.applies(facts))
    too_old = old_macos(facts.os, facts.torch.facts())
    values = {
        "old_macos": too_old.reason if too_old else "",
        "newer_macos": too_old.fix if too_old else "",
        "version": facts.torch.version or "of any version",
        "error": facts.torch.error or "",
        "cards": ", ".join(sorted({card.name for card in facts.cards.cards if card.name})) or "an NVIDIA GPU",
        "driver": next((card.driver for card in facts.cards.cards if card.driver), "here"),
        "cuda_error": facts.torch.cuda_error or "torch gives no reason",
        "build": facts.torch.cuda_build or "",
    }
    return MissingDevice(device=device, reason=cause.reason.format(**values), fix=cause.fix.format(**values))


# The order matters: causes that rule out MPS on this machine come before causes that an installation can fix.
_NO_MPS_CAUSES = (
    Cause(
        lambda s: s.os.name != "macOS",
        "MPS is Apple's; this machine does not run macOS",
        "train on another device here; to plan for a Mac use --machine, for instance --machine m2-air-8gb",
    ),
    Cause(
        lambda s: s.has_apple_silicon is False,
        "this Mac has an Intel processor; torch's MPS needs Apple silicon",
        "train on the CPU here, or use a Mac with an M-series chip",
    ),
    Cause(
        lambda s: s.os.architecture == "x86_64" and s.has_apple_silicon is True,
        "this Python is built for Intel and runs under Rosetta, where there is no MPS",
        "install a Python for arm64 (python.org, Homebrew in /opt/homebrew, or uv) and make a new environment",
    ),
    Cause(lambda s: old_macos(s.os, s.torch.facts()) is not None, "{old_macos}", "{newer_macos}"),
    Cause(lambda s: s.torch.error == "torch is not installed", "torch is not installed", _INSTALL_TORCH),
    Cause(
        lambda s: s.torch.error is not None,
        "{error}",
        "make `python -c 'import torch'` work first; a new environment with a fresh install often does",
    ),
    Cause(
        lambda s: s.torch.mps_built is False,
        "torch {version} was built without MPS",
        "install PyPI's build, which has MPS: pip install --force-reinstall torch",
    ),
    Cause(
        lambda _: True,
        "torch {version} has MPS but finds no Metal device",
        "leave a virtual machine or a remote login without a graphics session, or restart the Mac",
    ),
)

# Causes in the driver come before those in torch, because no build of torch can use the GPU without a driver.
_NO_CUDA_CAUSES = (
    Cause(
        lambda s: s.os.name == "macOS",
        "there is no CUDA on macOS",
        "train on MPS here; the same run continues on a CUDA machine",
    ),
    Cause(
        lambda s: s.cards.driver == "missing" and s.has_card_on_bus is True,
        "an NVIDIA GPU is in this machine, but its driver is not installed (no nvidia-smi)",
        "install NVIDIA's driver and restart",
    ),
    Cause(
        lambda s: s.cards.driver == "missing" and s.has_card_on_bus is False,
        "this machine has no NVIDIA GPU",
        "train on the CPU here, or use a machine with an NVIDIA GPU",
    ),
    Cause(
        lambda s: s.cards.driver == "missing",
        "there is no NVIDIA driver (nvidia-smi is missing or does not respond)",
        "install NVIDIA's driver; in a container pass the GPU through, for instance docker run --gpus all",
    ),
    Cause(
        lambda s: s.cards.driver == "not running",
        "NVIDIA's driver is installed but does not run",
        "see the output of nvidia-smi; a restart after a kernel or driver update often helps",
    ),
    Cause(
        lambda s: s.cards.driver == "no card",
        "NVIDIA's driver runs but finds no GPU",
        "check that the GPU is seated, powered and passed through to this machine or container",
    ),
    Cause(
        lambda s: s.torch.error == "torch is not installed",
        "{cards} is here, but torch is not installed",
        _INSTALL_TORCH,
    ),
    Cause(
        lambda s: s.torch.error is not None,
        "{cards} is here, but {error}",
        "make `python -c 'import torch'` work first; a new environment with a fresh install often does",
    ),
    Cause(
        lambda s: s.torch.cuda_build is None,
        "{cards} is here, but torch {version} was built without CUDA",
        "install a CUDA build of torch: https://pytorch.org names the command for your driver",
    ),
    Cause(
        lambda s: hides_all_gpus(s.visible_devices),
        "{cards} is here, but CUDA_VISIBLE_DEVICES hides every GPU",
        "unset CUDA_VISIBLE_DEVICES, or name a GPU in it, for instance CUDA_VISIBLE_DEVICES=0",
    ),
    Cause(
        lambda s: "too old" in (s.torch.cuda_error or ""),
        "driver {driver} is too old for torch {version} (built for CUDA {build})",
        "update NVIDIA's driver, or install a torch built for an older CUDA",
    ),
    Cause(
        lambda _: True,
        "torch {version} cannot start CUDA: {cuda_error}",
        "see the output of nvidia-smi; a restart after a driver update often helps",
    ),
)
