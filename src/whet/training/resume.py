"""Decide whether a run is new or resumed, with which plan, and which options may have changed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.device.open import current_machine
from whet.plan.plan import Plan, make_plan, read_plan
from whet.plan.setting import Scalar
from whet.plan.workload import Workload
from whet.run.folder import RUN_FILE, Run, open_run

GROWABLE_KEYS = ("epochs", "max_steps")
"""What may grow when a run goes on; None is without end."""

_FREE_SETTINGS = ("on_heat", "verify", "freed_memory")
FREE_KEYS = ("epochs_per_session", *_FREE_SETTINGS)
"""What may change when a run goes on."""

ALLOWED_KEYS = {"data": ("data", "data_paths"), "batch": ("global_batch_size",)}
"""What may change when it is allowed by these words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """What a sitting starts from."""

    plan: Plan
    run: Run | None
    """The run that goes on; None for a new one."""
    replanned: str | None = None
    """Why the plan is another than the saved one."""


def run_exists(path: Path | None) -> bool:
    """Whether there is a run to go on with."""
    return path is not None and (path / RUN_FILE).exists()


def find_starting_point(
    path: Path | None,
    workload: Workload,
    *,
    overrides: Mapping[str, Scalar],
    config: Mapping[str, Any],
    plan: Plan | None = None,
    allow: Collection[str] = (),
) -> StartingPoint:
    """The plan saved in the run folder if there is one and it fits this machine; else a new plan. Writes nothing.

    `plan` is taken for a new run, if it was made for this machine.
    """
    machine, conditions = current_machine()
    given, plan = plan, make_plan(machine, workload, overrides=overrides, conditions=conditions)
    if path is None or not run_exists(path):
        if given is not None:
            check_plan_fits(given, plan)
        return StartingPoint(plan=given or plan, run=None)
    run = open_run(path)
    check_unchanged(run.config, config, where=path, free=[key for word in allow for key in ALLOWED_KEYS[word]])
    saved = read_plan(run.plan, where=f"{path}/plan.json")
    check_unchanged(_without_device(saved.overrides), _without_device(overrides), where=path)
    changed = _plan_changes(saved, plan)
    if saved.workload.global_batch_size != workload.global_batch_size:
        batches = f"global_batch_size {saved.workload.global_batch_size} -> {workload.global_batch_size}"
        changed = f"{changed}; {batches}" if changed else batches
    if changed is not None:
        return StartingPoint(plan=plan, run=run, replanned=changed)
    grown = saved.workload.model_copy(update={"num_steps": workload.num_steps})
    overrides = {name: value for name, value in saved.overrides.items() if name not in _FREE_SETTINGS}
    overrides |= {name: value for name, value in plan.overrides.items() if name in _FREE_SETTINGS}
    free = {name: plan.settings[name] for name in _FREE_SETTINGS}
    changed_only = {"workload": grown, "wishes": overrides, "settings": {**saved.settings, **free}}
    return StartingPoint(plan=saved.model_copy(update=changed_only), run=run)


def check_plan_fits(given: Plan, ours: Plan) -> None:
    """A plan holds for the machine and the training that it was made for."""
    changed = _plan_changes(given, ours)
    if given.workload.global_batch_size != ours.workload.global_batch_size:
        batches = f"global_batch_size {given.workload.global_batch_size}"
        changed = f"{batches}; this training has {ours.workload.global_batch_size}"
    if changed is not None:
        raise UsageError("the plan was made for something else", got=changed, try_="whet.tune(...) here, or no plan")


def check_unchanged(
    saved: Mapping[str, Any], asked: Mapping[str, Any], *, where: Path, free: Collection[str] = ()
) -> None:
    """A run goes on with what it was started with; a changed key is refused by name."""
    for key in sorted({*saved, *asked}):
        before, now = saved.get(key), asked.get(key)
        is_newer = key not in saved and now in (None, "auto")
        if (
            before == now
            or is_newer
            or key in (*FREE_KEYS, *free)
            or (key in GROWABLE_KEYS and _has_grown(before, now))
        ):
            continue
        if key in GROWABLE_KEYS:
            raise UsageError(
                f"{key} may only grow", got=f"{key}={now}; {where} has {key}={before}", try_="another run folder"
            )
        raise UsageError(
            f"{where} was started with another {key}",
            got=f"{key}={now}; the run has {key}={before}",
            try_=f"{key}={before} to go on, or another run folder for a new run" + _allow_hint(key),
        )


def _allow_hint(key: str) -> str:
    words = [word for word, keys in ALLOWED_KEYS.items() if key in keys]
    return f"; --allow {words[0]} goes on all the same, not bit-exact" if words else ""


def _has_grown(before: Any, now: Any) -> bool:
    return now is None or (before is not None and now > before)


def _without_device(overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """A run may move to another device; it is planned anew and says so."""
    return {name: value for name, value in overrides.items() if name != "device"}


def _plan_changes(old: Plan, new: Plan) -> str | None:
    """In one line, what makes the saved plan unfit for this machine."""
    saved, here = old.machine, new.machine
    pairs = {
        "device": (old.overrides.get("device", "auto"), new.overrides.get("device", "auto")),
        "processes": (old.workload.world_size, new.workload.world_size),
        "chip": (saved.chip, here.chip),
        "accelerators": (
            [(a.kind, a.name) for a in saved.accelerators],
            [(a.kind, a.name) for a in here.accelerators],
        ),
        "torch": (saved.torch.version, here.torch.version),
    }
    changes = [f"{name} {before} -> {now}" for name, (before, now) in pairs.items() if before != now]
    return "; ".join(changes) or None
