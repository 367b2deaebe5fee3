"""From a user's wishes to a run that can start: the machine, the plan, the run folder, the device."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whet.base.errors import UsageError
from whet.device.abstract import AbstractDevice
from whet.device.machine_here import machine_here
from whet.device.open import open_device
from whet.machine.facts import Machine
from whet.plan.plan import Plan, make_plan, read_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run.folder import Run, create_run, open_run, versions

GROWING_KEYS = ("epochs", "max_steps", "epochs_per_sitting")
"""What may change when a run goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a sitting starts from."""

    plan: Plan
    run: Run | None
    is_new: bool
    replanned: str | None
    """Why the plan is another than the saved one."""


def start_run(
    path: Path | None,
    workload: Workload,
    *,
    wishes: Mapping[str, Scalar],
    recipe: str,
    config: Mapping[str, Any],
    command: list[str],
) -> Start:
    """Opens the run folder if there is one, with the plan saved there; else makes both."""
    machine, conditions = machine_here()
    if path is not None and (path / "run.json").exists():
        run = open_run(path)
        refuse_changes(run.config, config, where=path)
        plan = read_plan(run.plan, where=f"{path}/plan.json")
        changed = _what_changed(plan.machine, machine)
        if changed is None:
            return Start(plan=plan, run=run, is_new=False, replanned=None)
        plan = make_plan(machine, workload, wishes=wishes, conditions=conditions)
        return Start(plan=plan, run=run, is_new=False, replanned=changed)
    plan = make_plan(machine, workload, wishes=wishes, conditions=conditions)
    if path is None:
        return Start(plan=plan, run=None, is_new=True, replanned=None)
    run = create_run(
        path,
        recipe=recipe,
        config=config,
        plan=plan.as_json(),
        machine=machine.as_json(),
        versions=versions(),
        command=command,
    )
    return Start(plan=plan, run=run, is_new=True, replanned=None)


def use_device(plan: Plan) -> tuple[AbstractDevice, str | None]:
    """Opens the planned device and sets what holds for the whole process; why it is another one, or None."""
    threads = plan.value("threads")
    if isinstance(threads, int):
        torch.set_num_threads(threads)
    opened = open_device(
        str(plan.value("device")),
        on_failure=str(plan.value("on_device_failure")),
        overlaps_copies=plan.value("copies") == "overlapped",
    )
    opened.device.use_precision(str(plan.value("precision")))
    return opened.device, opened.fell_back


def refuse_changes(saved: Mapping[str, Any], asked: Mapping[str, Any], *, where: Path) -> None:
    """A run goes on with what it was started with; a changed key is refused by name."""
    for key in sorted({*saved, *asked}):
        before, now = saved.get(key), asked.get(key)
        if before != now and key not in GROWING_KEYS:
            raise UsageError(
                f"{where} was started with another {key}",
                got=f"{key}={now}; the run has {key}={before}",
                try_=f"{key}={before} to go on, or another --run for a new run",
            )


def _what_changed(saved: Machine, here: Machine) -> str | None:
    """In one line, what makes the saved plan unfit for this machine."""
    pairs = {
        "chip": (saved.chip, here.chip),
        "accelerators": (
            [(a.kind, a.name) for a in saved.accelerators],
            [(a.kind, a.name) for a in here.accelerators],
        ),
        "torch": (saved.torch.version, here.torch.version),
    }
    changes = [f"{name} {before} -> {now}" for name, (before, now) in pairs.items() if before != now]
    return "; ".join(changes) or None
