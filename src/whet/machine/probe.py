"""Probe this machine: system, driver and torch, and why a device is missing."""

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from whet.base import env
from whet.machine import apple, linux, nvidia
from whet.machine.apple import major_version
from whet.machine.facts import Accelerator, Conditions, DeviceKind, Machine, MissingDevice, OperatingSystem, ProbeResult
from whet.machine.load import complete_conditions
from whet.machine.nvidia import NO_DRIVER, NvidiaCards
from whet.machine.programs import ProgramRunner, run_program
from whet.machine.torch_info import TorchInfo, torch_query

OLDEST_MACOS = 14
"""torch asks for macOS 14.0 since 2.9 (pytorch/pytorch#159912)."""

_INSTALL_TORCH = "pip install 'torch>=2.11,<2.14'; https://pytorch.org names the command for other builds"


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """All that the answer depends on."""

    os: OperatingSystem
    """Its architecture is this Python's."""
    torch: TorchInfo
    has_apple_silicon: bool | None = None
    cards: NvidiaCards = NO_DRIVER
    has_card_on_bus: bool | None = None
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES as it is; None when unset."""


@dataclass(frozen=True)
class Cause:
    """One reason: the first of a list that applies is the answer."""

    applies: Callable[[DeviceFacts], bool]
    reason: str
    cure: str


def missing_devices(situation: DeviceFacts) -> tuple[MissingDevice, ...]:
    """The devices that torch cannot use here, each with the reason and the cure."""
    found = []
    if not situation.torch.mps_available:
        found.append(_explain("mps", _NO_MPS_CAUSES, situation))
    if not situation.torch.cuda_available:
        found.append(_explain("cuda", _NO_CUDA_CAUSES, situation))
    return tuple(found)


def hides_all_gpus(visible_devices: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES hides every card: empty, or a first entry that CUDA does not accept, like -1."""
    if visible_devices is None:
        return False
    first = visible_devices.split(",")[0].strip()
    return not first or first.startswith("-") or first == "NoDevFiles"


def _explain(device: DeviceKind, reasons: tuple[Cause, ...], situation: DeviceFacts) -> MissingDevice:
    why = next(why for why in reasons if why.applies(situation))
    words = {
        "version": situation.torch.version or "",
        "error": situation.torch.error or "",
        "macos": situation.os.version or "",
        "cards": ", ".join(sorted({card.name for card in situation.cards.cards if card.name})) or "an NVIDIA GPU",
        "driver": next((card.driver for card in situation.cards.cards if card.driver), "here"),
        "said": situation.torch.cuda_error or "torch gives no reason",
        "build": situation.torch.cuda_build or "",
    }
    return MissingDevice(device=device, reason=why.reason.format(**words), cure=why.cure.format(**words))


def _is_old_macos(situation: DeviceFacts) -> bool:
    major = major_version(situation.os.version)
    return major is not None and major < OLDEST_MACOS


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
    Cause(
        _is_old_macos,
        f"macOS {{macos}} is too old; torch's MPS needs macOS {OLDEST_MACOS}",
        f"update to macOS {OLDEST_MACOS} or newer",
    ),
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
        "no NVIDIA driver was found (nvidia-smi is missing or does not answer)",
        "install NVIDIA's driver; in a container pass the GPU through, for instance docker run --gpus all",
    ),
    Cause(
        lambda s: s.cards.driver == "not running",
        "NVIDIA's driver is installed but does not run",
        "see what nvidia-smi says; a restart after a kernel or driver update often helps",
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
        "torch {version} cannot start CUDA: {said}",
        "see what nvidia-smi says; a restart after a driver update often helps",
    ),
)


class SystemReadings(NamedTuple):
    """What the operating system and the driver say; torch was not asked."""

    machine: Machine
    conditions: Conditions
    mac: apple.MacReadings | None = None
    cards: nvidia.NvidiaCards = nvidia.NO_DRIVER
    has_card_on_bus: bool | None = None


def probe(*, folder: Path | None = None) -> ProbeResult:
    """All that can be found out about this machine in a few seconds; `folder` is where the data lies, else here."""
    with torch_query() as torch_answer:
        system = read_system()
        conditions = complete_conditions(system.conditions, folder=folder or Path.cwd())
        return ProbeResult(machine=assemble_machine(system, torch=torch_answer()), conditions=conditions)


def probe_machine() -> Machine:
    """The facts of this machine that stay, without a look at how it is now."""
    with torch_query() as torch_answer:
        system = read_system()
        return assemble_machine(system, torch=torch_answer())


def read_system(
    *, run: ProgramRunner = run_program, system: str = sys.platform, architecture: str | None = None
) -> SystemReadings:
    """The system's and the driver's answers; `architecture` is this Python's unless told."""
    architecture = architecture or _architecture(platform.machine())
    if system == "darwin":
        answers = apple.read_mac(run=run)
        machine = apple.mac_machine(answers, architecture=architecture)
        return SystemReadings(machine, apple.mac_conditions(answers), mac=answers)
    cards = nvidia.query_driver(run=run)
    busy = [card.busy_percent for card in cards.cards if card.busy_percent is not None]
    conditions = linux.linux_conditions().model_copy(update={"gpu_busy_percent": max(busy, default=None)})
    machine = linux.linux_machine(architecture=architecture)
    return SystemReadings(machine, conditions, cards=cards, has_card_on_bus=linux.has_nvidia_card())


def assemble_machine(system: SystemReadings, *, torch: TorchInfo) -> Machine:
    """The whole machine: accelerators are those that torch can use, the others are absent for a reason."""
    accelerators = (*_mps_accelerators(system, torch), *_cuda_accelerators(system, torch))
    situation = DeviceFacts(
        os=system.machine.os,
        torch=torch,
        has_apple_silicon=apple.has_apple_silicon(system.mac) if system.mac else None,
        cards=system.cards,
        has_card_on_bus=system.has_card_on_bus,
        visible_devices=env.child_environment().get("CUDA_VISIBLE_DEVICES"),
    )
    cards = [accelerator.name for accelerator in accelerators if accelerator.kind == "cuda"]
    return system.machine.model_copy(
        update={
            "chip": next((name for name in cards if name), system.machine.chip),
            "accelerators": accelerators,
            "absent": missing_devices(situation),
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
