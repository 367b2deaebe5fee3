"""What decides the last bits of a training, besides what is trained? Saved with every checkpoint and compared later."""

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from whet.base.version import VERSION
from whet.checkpoint.about import Circumstance
from whet.device.abstract import AbstractDevice
from whet.plan.plan import Plan
from whet.run.event import HAPPENINGS
from whet.run.events import History
from whet.run.folder import Run

_SETTINGS = (
    "precision",
    "loss_scaling",
    "micro_batch",
    "lengths",
    "optimizer_kernels",
    "compile",
    "graph",
    "layout",
    "attention",
    "norms",
    "causal_mask",
)
"""Settings of the plan that change how sums are rounded, or what a sum is taken over."""


def circumstances(plan: Plan, device: AbstractDevice, *, world_size: int = 1) -> dict[str, Circumstance]:
    """How it is here and now."""
    accelerator = plan.machine.accelerator(device.kind)
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    return {
        **{name: plan.value(name) for name in _SETTINGS if name in plan.settings},
        "whet": VERSION,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{system} {platform.machine()}",
        "device": device.kind,
        "device_name": (accelerator and accelerator.name) or plan.machine.chip,
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "world_size": world_size,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def differences(saved: Mapping[str, Circumstance], now: Mapping[str, Circumstance]) -> list[str]:
    """What has changed, by name; what only one of the two knows counts too.

    >>> differences({"threads": 8, "torch": "2.13"}, {"threads": 2, "torch": "2.13"})
    ['threads 8 -> 2']
    """
    names = [*now, *(name for name in saved if name not in now)]
    return [f"{n} {saved.get(n)} -> {now.get(n)}" for n in names if saved.get(n) != now.get(n)]


def what_holds(reasons: list[str], device: AbstractDevice) -> str:
    """In a few words, how a resumed run compares with one that was never interrupted."""
    if reasons:
        return "not bit-exact: " + "; ".join(reasons)
    if device.kind == "cpu" or torch.are_deterministic_algorithms_enabled():
        return "bit-exact"
    return f"exact state; kernels of {device.kind} may round differently each time"


def with_earlier_changes(told: dict[str, Any], run: Run | None) -> dict[str, Any]:
    """What is told about a run that goes on, with what holds for it as a whole: since when it is not bit-exact."""
    events = () if run is None else History(run).events(kinds=HAPPENINGS)
    changes = [event for event in events if event.get("exact") is False]
    if not changes or told.get("exact") is False:
        return told
    why = changes[-1].get("cure") or changes[-1].get("reason")
    return {**told, "exactness": f"not bit-exact since step {min(event.step for event in changes):,}: {why}"}
