"""Restore a run from a checkpoint and compare the current environment with the saved one."""

import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from whet.base import env
from whet.base.errors import DataChangedError, UsageError, WhetError
from whet.base.units import format_list
from whet.base.version import VERSION
from whet.checkpoint.manifest import CheckpointInfo, EnvironmentValue
from whet.checkpoint.model_state import InitialState
from whet.checkpoint.snapshot import OMITTED, Snapshot
from whet.checkpoint.snapshot_restore import MOVE_CHECKPOINT, restore_registered, restore_snapshot
from whet.device.abstract import AbstractDevice
from whet.plan.plan import Plan
from whet.plan.values import names_of
from whet.run.event import INCIDENT_KINDS
from whet.run.events import History
from whet.run.folder import Run
from whet.training.state_check import restored_differences

if TYPE_CHECKING:
    from whet.training.run_context import RunContext


def run_environment(plan: Plan, device: AbstractDevice, *, world_size: int = 1) -> dict[str, EnvironmentValue]:
    """Return everything, apart from the training options, that affects the last bits of the result."""
    accelerator = plan.machine.accelerator(device.kind)
    system = f"macOS {platform.mac_ver()[0]}" if platform.system() == "Darwin" else platform.system()
    return {
        **{name: plan.settings[name].value for name in names_of(lambda setting: setting.is_rounding)},
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
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        **{name: env.read(name) for name in device.rounding_variables},
    }


def environment_changes(saved: Mapping[str, EnvironmentValue], now: Mapping[str, EnvironmentValue]) -> list[str]:
    """Return the changes by name. A name that only one side has counts as a change.

    >>> environment_changes({"threads": 8, "torch": "2.13"}, {"threads": 2, "torch": "2.13"})
    ['threads 8 -> 2']
    """
    names = [*now, *(name for name in saved if name not in now)]
    return [f"{n} {saved.get(n)} -> {now.get(n)}" for n in names if saved.get(n) != now.get(n)]


_RESTORED = "session state restored exactly"
CUSTOM_LOOP = f"{_RESTORED}; your own variables only if registered"
"""The claim for a resumed `Session`: variables of the user's loop may hold state that a session cannot see."""


def missing_state(info: CheckpointInfo, *, is_custom_loop: bool) -> list[str]:
    """Return descriptions of state that a checkpoint lacks and that may influence training.

    A variable that was not saved may also be irrelevant to training, such as a log.
    """
    missing = [f"{variables} and is not saved" for variables in info.unregistered]
    if missing and not is_custom_loop:
        missing[-1] += " (register={name: object}, if training reads it)"
    if info.interruption is not None:
        missing.append(f"{info.interruption}: what it had still to do is missing")
    return missing


def describe_exactness(reasons: list[str], missing: list[str], device: AbstractDevice, *, is_custom_loop: bool) -> str:
    """Describe how exactly a resumed run reproduces an uninterrupted one.

    `reasons` explain why it does not. `missing` names variables that have changed and were not saved. Most are logs,
    but whether training reads one is unknown, so `whet.train` then claims no more than a user-written loop does.
    """
    if reasons:
        return "not bit-exact: " + "; ".join([*reasons, *missing])
    is_deterministic = device.is_cpu or torch.are_deterministic_algorithms_enabled()
    kernels = [] if is_deterministic else [f"kernels of {device.kind} may round differently each time"]
    if is_custom_loop:
        return "; ".join([CUSTOM_LOOP, *missing, *kernels])
    if missing:
        return "; ".join([_RESTORED, *missing, *kernels])
    return "; ".join(["exact state", *kernels]) if kernels else "bit-exact"


def with_earlier_inexactness(fields: dict[str, Any], run: Run | None) -> dict[str, Any]:
    """Add to the fields of a resume event the step since which the run has not been bit-exact, if there is one."""
    events = () if run is None else History(run).events(kinds=INCIDENT_KINDS)
    changes = [event for event in events if event.get("exact") is False]
    if not changes or fields.get("exact") is False:
        return fields
    why = changes[-1].get("action") or changes[-1].get("reason")
    return {**fields, "exactness": f"not bit-exact since step {min(event.step for event in changes):,}: {why}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredRun:
    """The report of a resume: why it is not bit-exact, missing state, changed code and its event fields."""

    reasons: list[str]
    """The reasons why the run is not bit-exact from here on; empty if it is."""
    missing: list[str]
    """Descriptions of state that the checkpoint lacks and that may influence training."""
    fields: dict[str, Any]
    """Fields of the resume event."""
    changed_code: list[str]
    """Functions and classes whose source code has changed."""


def restore_run(
    snapshot: Snapshot,
    run: "RunContext",
    *,
    step: int,
    data: Mapping[str, Any],
    initial_state: InitialState | None = None,
) -> RestoredRun:
    """Restore the state after `step`.

    `data` describes the current data, and `initial_state` the model at the start of this session.
    """
    stepper, state = run.stepper, run.state
    reasons = _data_changes(snapshot.info, data, run.config.allow)
    initial, changes = _hyperparameter_changes(snapshot, run)
    reasons += changes
    # Nothing was computed before step 1, so a different environment does not make the run inexact.
    if step > 0:
        now = run_environment(run.plan, run.device, world_size=run.group.ranks.size)
        reasons += environment_changes(snapshot.info.environment, now)
    saved, model_changes = restore_snapshot(
        snapshot,
        stepper.model,
        stepper.optimizer,
        run.device,
        rng=run.rng,
        scaler=stepper.scaler,
        ema=stepper.ema,
        others=run.other_optimizers,
        initial=initial_state,
    )
    reasons += model_changes
    try:
        run.rates.load_state_dict(saved["schedule"], initial=initial, is_changed=bool(changes))
        run.has_users_gradients = bool(snapshot.facts["gradients"])
        run.sources.load_state_dict(saved["code"])
        run.source.load_state(saved["source"])
        state.load_state_dict(saved["progress"])
        callbacks = {str(name): dict(values) for name, values in saved["callbacks"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _structure_error(error) from None
    restore_one = partial(restore_registered, snapshot, model=run.model, device=run.device)
    run.registered.restore(snapshot.facts["registered"], restore_one)
    changed_code = run.observe_code()
    reasons += changed_code
    unmatched = run.callbacks.load_state_dict(callbacks)
    if unmatched:
        reasons.append(f"other callbacks with state ({', '.join(unmatched)})")
    length = run.source.num_samples
    is_other_length = snapshot.info.data.get("num_samples") != length
    if length is not None and is_other_length and state.position.samples >= length:
        # An epoch may also be longer than the first one, if the user's sampler grows. Here, the data has become shorter
        # and the epoch has no samples left: continue with the next epoch.
        state.position = replace(state.position, epoch=state.position.epoch + 1, samples=0)
    if (reason := run.source.inexact_reason()) is not None:
        reasons.append(reason)
    if not reasons and run.group.is_single_process:
        # Compare the state with the checkpoint, so that only a complete restore is called exact.
        is_pending = not snapshot.facts["registered"].keys() <= run.registered.objects.keys()
        names = restored_differences(snapshot, run)
        # A gap of the checkpoint names each object that it does not hold.
        omitted = [name for name, encoded in snapshot.facts["registered"].items() if encoded == OMITTED]
        unsaved = tuple(start + name for name in omitted for start in ("registered.", "registered state "))
        names = [name for name in names if not (is_pending and name.startswith("registered"))]
        names = [name for name in names if not name.startswith(unsaved)]
        reasons += [f"not restored: {format_list(names, separator='; ')}"] if names else []
    reasons += snapshot.info.gaps
    missing = missing_state(snapshot.info, is_custom_loop=run.config.is_custom_loop)
    exactness = describe_exactness(reasons, missing, run.device, is_custom_loop=run.config.is_custom_loop)
    fields: dict[str, Any] = {"exactness": exactness}
    if snapshot.facts["device"] != run.device.kind:
        fields["moved_from"] = snapshot.facts["device"]
    if reasons:
        fields |= {"exact": False, "reason": "; ".join(reasons)}
    return RestoredRun(reasons=reasons, missing=missing, fields=fields, changed_code=changed_code)


def _hyperparameter_changes(snapshot: Snapshot, run: "RunContext") -> tuple[Mapping[str, Any], list[str]]:
    """Return the hyperparameters with which the run was started, and those that have changed since.

    Raise UsageError for a change that is not allowed, because the user would not notice that the old value stays in
    effect.
    """
    try:
        initial = snapshot.progress["initial"]
        changes = run.rates.changes(initial)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _structure_error(error) from None
    if changes and "lr" not in run.config.allow:
        raise UsageError(
            f"the {changes[0].split(' ')[0]} is not what the run was started with",
            got=f"{format_list(changes, most=4, separator='; ')} (the run's value -> yours)",
            try_='the same values, another run folder, or --allow lr (allow=("lr",)) for yours, not bit-exact',
        )
    return initial, changes


def _structure_error(error: Exception) -> WhetError:
    got = f"{type(error).__name__} {error}"
    return WhetError("the checkpoint's progress has an unknown structure", got=got, try_=MOVE_CHECKPOINT)


def _data_changes(saved: CheckpointInfo, now: Mapping[str, Any], allow: Collection[str]) -> list[str]:
    """Return the changes of the data and the global batch size. Raise UsageError unless `allow` permits them."""
    then = {name: saved.data.get(name) for name in now}
    if then["global_batch_size"] != now["global_batch_size"] and "batch" not in allow:
        raise UsageError(
            "the global batch size is not what the run was started with",
            got=f"{now['global_batch_size']}; the run has {then['global_batch_size']}",
            try_='the same global batch size, or --allow batch (allow=("batch",)) to resume, not bit-exact',
        )
    prints = then["fingerprint"], now["fingerprint"]
    # A fingerprint is unknown if samples differ on each read or a worker was killed. In that case, compare only
    # lengths.
    is_other = then["num_samples"] != now["num_samples"] or (None not in prints and prints[0] != prints[1])
    if is_other and "data" not in allow:
        raise DataChangedError(
            "the data is not what the run was started with",
            got=f"{now['num_samples']} samples; the run has {then['num_samples']}"
            + (", with other content" if now["num_samples"] == then["num_samples"] else ""),
            try_='the same data, another run folder, or --allow data (allow=("data",)) to resume, not bit-exact',
        )
    batch = environment_changes(*({"global_batch_size": facts["global_batch_size"]} for facts in (then, now)))
    data = [f"other data ({then['num_samples']} -> {now['num_samples']} samples)"] if is_other else []
    return [*batch, *data]
