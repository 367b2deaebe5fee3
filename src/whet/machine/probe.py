"""What is this machine, and how is it now? The answers of the system, the driver and torch, put together.

Nothing that names the owner is kept: no host name, no user, no serial number, no path.
"""

import platform
import sys
from pathlib import Path
from typing import NamedTuple

from whet.base import env
from whet.machine import apple, cuda, linux
from whet.machine.absent import Situation, why_absent
from whet.machine.conditions import complete
from whet.machine.facts import Accelerator, Conditions, Machine, Probe
from whet.machine.programs import Run, run_program
from whet.machine.torch_child import TorchAnswer, asking_torch


class System(NamedTuple):
    """What the operating system and the driver say; torch was not asked."""

    machine: Machine
    conditions: Conditions
    mac: apple.Answers | None = None
    cards: cuda.Cards = cuda.NO_DRIVER
    has_card_on_bus: bool | None = None


def probe(*, folder: Path | None = None) -> Probe:
    """All that can be found out about this machine in a few seconds; `folder` is where the data lies, else here."""
    with asking_torch() as torch_answer:
        system = ask_system()
        conditions = complete(system.conditions, folder=folder or Path.cwd())
        return Probe(machine=assemble(system, torch=torch_answer()), conditions=conditions)


def machine_here() -> Machine:
    """The facts of this machine that stay, without a look at how it is now."""
    with asking_torch() as torch_answer:
        system = ask_system()
        return assemble(system, torch=torch_answer())


def ask_system(*, run: Run = run_program, system: str = sys.platform, architecture: str | None = None) -> System:
    """The system's and the driver's answers; `architecture` is this Python's unless told."""
    architecture = architecture or _architecture(platform.machine())
    if system == "darwin":
        answers = apple.ask_macos(run=run)
        machine = apple.machine_of(answers, architecture=architecture)
        return System(machine, apple.conditions_of(answers), mac=answers)
    cards = cuda.ask_driver(run=run)
    busy = [card.busy_percent for card in cards.cards if card.busy_percent is not None]
    conditions = linux.read_conditions().model_copy(update={"gpu_busy_percent": max(busy, default=None)})
    machine = linux.read_machine(architecture=architecture)
    return System(machine, conditions, cards=cards, has_card_on_bus=linux.has_nvidia_card())


def assemble(system: System, *, torch: TorchAnswer) -> Machine:
    """The whole machine: accelerators are those that torch can use, the others are absent for a reason."""
    accelerators = (*_mps(system, torch), *_cuda(system, torch))
    situation = Situation(
        os=system.machine.os,
        torch=torch,
        has_apple_silicon=apple.has_apple_silicon(system.mac) if system.mac else None,
        cards=system.cards,
        has_card_on_bus=system.has_card_on_bus,
        visible_devices=env.for_child().get("CUDA_VISIBLE_DEVICES"),
    )
    cards = [accelerator.name for accelerator in accelerators if accelerator.kind == "cuda"]
    return system.machine.model_copy(
        update={
            "chip": next((name for name in cards if name), system.machine.chip),
            "accelerators": accelerators,
            "absent": why_absent(situation),
            "torch": torch.facts(),
            "python": platform.python_version(),
        }
    )


def _mps(system: System, torch: TorchAnswer) -> tuple[Accelerator, ...]:
    if system.mac is None or not torch.mps_available:
        return ()
    return (
        apple.accelerator_of(
            system.mac,
            machine=system.machine,
            recommended_bytes=torch.mps_recommended_bytes,
            num_cores=torch.mps_num_cores,
        ),
    )


def _cuda(system: System, torch: TorchAnswer) -> tuple[Accelerator, ...]:
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
