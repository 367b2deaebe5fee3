"""Restore a run from a checkpoint, and compare its environment with the saved one."""

import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from whet.base.errors import DataChangedError, UsageError, WhetError
from whet.base.version import VERSION
from whet.checkpoint.manifest import CheckpointInfo, EnvironmentValue
from whet.checkpoint.snapshot import Snapshot, restore_snapshot
from whet.device.abstract import AbstractDevice
from whet.plan.plan import Plan
from whet.run.event import INCIDENT_KINDS
from whet.run.events import History
from whet.run.folder import Run
from whet.training.building import TrainingParts
from whet.training.callback import State

_ROUNDING_SETTINGS = (
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


def run_environment(plan: Plan, device: AbstractDevice, *, world_size: int = 1) -> dict[str, EnvironmentValue]:
    """How it is here and now."""
    accelerator = plan.machine.accelerator(device.kind)
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    return {
        **{name: plan.settings[name].value for name in _ROUNDING_SETTINGS if name in plan.settings},
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


def environment_changes(saved: Mapping[str, EnvironmentValue], now: Mapping[str, EnvironmentValue]) -> list[str]:
    """What has changed, by name; what only one of the two knows counts too.

    >>> differences({"threads": 8, "torch": "2.13"}, {"threads": 2, "torch": "2.13"})
    ['threads 8 -> 2']
    """
    names = [*now, *(name for name in saved if name not in now)]
    return [f"{n} {saved.get(n)} -> {now.get(n)}" for n in names if saved.get(n) != now.get(n)]


def describe_exactness(reasons: list[str], device: AbstractDevice) -> str:
    """In a few words, how a resumed run compares with one that was never interrupted."""
    if reasons:
        return "not bit-exact: " + "; ".join(reasons)
    if device.kind == "cpu" or torch.are_deterministic_algorithms_enabled():
        return "bit-exact"
    return f"exact state; kernels of {device.kind} may round differently each time"


def with_earlier_inexactness(told: dict[str, Any], run: Run | None) -> dict[str, Any]:
    """What is told about a run that goes on, with what holds for it as a whole: since when it is not bit-exact."""
    events = () if run is None else History(run).events(kinds=INCIDENT_KINDS)
    changes = [event for event in events if event.get("exact") is False]
    if not changes or told.get("exact") is False:
        return told
    why = changes[-1].get("action") or changes[-1].get("reason")
    return {**told, "exactness": f"not bit-exact since step {min(event.step for event in changes):,}: {why}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredRun:
    """What a run goes on with, once its tensors are in place."""

    progress: State
    base_rates: list[float]
    reasons: list[str]
    """Why it is not bit-exact from here on."""
    told: dict[str, Any]
    """What the log should say."""


def restore_run(
    snapshot: Snapshot, parts: TrainingParts, *, step: int, plan: Plan, data: Mapping[str, Any], allow: Collection[str]
) -> RestoredRun:
    """Puts the state after `step` into the parts; `data` are the facts of what is trained on now."""
    reasons = _data_changes(snapshot.about, data, allow)
    if step > 0:
        now = run_environment(plan, parts.device, world_size=parts.group.world.size)
        reasons += environment_changes(snapshot.about.circumstances, now)
    saved = restore_snapshot(
        snapshot,
        parts.stepper.model,
        parts.stepper.optimizer,
        parts.device,
        scaler=parts.stepper.scaler,
        ema=parts.stepper.ema,
    )
    try:
        parts.schedule.load_state(saved["schedule"])
        parts.source.load_state(saved["source"])
        progress, rates = State.from_json(saved["progress"]), [float(rate) for rate in saved["base_rates"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        got = f"{type(error).__name__} {error}"
        raise WhetError("the checkpoint's progress has another structure", got=got, try_="an older one") from None
    length = parts.source.num_samples
    if length is not None and progress.position.samples >= length:
        # Other data, and shorter: what was left of the epoch is not there.
        progress.position = replace(progress.position, epoch=progress.position.epoch + 1, samples=0)
    if not parts.source.is_exact:
        reasons.append("a stream without a state")
    told: dict[str, Any] = {"exactness": describe_exactness(reasons, parts.device)}
    if snapshot.facts["device"] != parts.device.kind:
        told["moved_from"] = snapshot.facts["device"]
    if reasons:
        told |= {"exact": False, "reason": "; ".join(reasons)}
    return RestoredRun(progress=progress, base_rates=rates, reasons=reasons, told=told)


def _data_changes(saved: CheckpointInfo, now: Mapping[str, Any], allow: Collection[str]) -> list[str]:
    """Whether the data or the global batch are others; refused unless that was allowed."""
    then = {name: saved.data.get(name) for name in now}
    if then["global_batch_size"] != now["global_batch_size"] and "batch" not in allow:
        raise UsageError(
            "the global batch is not what the run was started with",
            got=f"{now['global_batch_size']}; the run has {then['global_batch_size']}",
            try_='the same global batch, or --allow batch (allow=("batch",)) to go on, not bit-exact',
        )
    prints = then["fingerprint"], now["fingerprint"]
    # Where one is unknown (a sample that differs each time, a worker that was killed) the length must do.
    is_other = then["num_samples"] != now["num_samples"] or (None not in prints and prints[0] != prints[1])
    if is_other and "data" not in allow:
        raise DataChangedError(
            "the data is not what the run was started with",
            got=f"{now['num_samples']} samples; the run has {then['num_samples']}"
            + (", of other content" if now["num_samples"] == then["num_samples"] else ""),
            try_='the same data, another run folder, or --allow data (allow=("data",)) to go on, not bit-exact',
        )
    batch = environment_changes(*({"global_batch_size": facts["global_batch_size"]} for facts in (then, now)))
    data = [f"other data ({then['num_samples']} -> {now['num_samples']} samples)"] if is_other else []
    return [*batch, *data]
