"""Decide whether a run starts or resumes, which plan it uses and which options may change."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.base.errors import UsageError, WhetError
from whet.checkpoint import store
from whet.device.open import current_machine
from whet.plan.plan import Plan, make_plan, read_plan
from whet.plan.setting import Scalar, Setting
from whet.plan.values import names_of
from whet.run.event import SESSION_START_KINDS, Event
from whet.run.events import History
from whet.run.folder import CHECKPOINTS, RUN_FILE, Run, foreign_files, open_run

if TYPE_CHECKING:
    from whet.training.run_config import RunConfig

GROWABLE_KEYS = ("epochs", "max_steps")
"""Options that may be increased when a run resumes; None counts as the largest value."""

_FREE_SETTINGS = names_of(lambda setting: setting.may_change)
FREE_KEYS = ("epochs_per_session", "verify_resume", *_FREE_SETTINGS)
"""Options that may change when a run resumes."""

ALLOWED_KEYS = {
    "data": ("data", "data_paths"),
    "batch": ("global_batch_size",),
    "lr": ("lr", "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay"),
}
"""Options that may change if `allow` contains the key. The run is then not bit-exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeDecision:
    """The plan of a session, and the run that it resumes."""

    plan: Plan
    run: Run | None
    """The run to resume; None for a new one."""
    replanned: str | None = None
    """The reason for making a new plan; None if the saved plan is used or the run is new."""


def run_exists(path: Path | None) -> bool:
    """Return whether the folder holds a run to resume. A run that ended before its first step starts over."""
    return path is not None and (path / RUN_FILE).exists() and not ended_before_first_step(path)


def ended_before_first_step(path: Path) -> bool:
    """Return whether a folder holds only an attempt that failed or was stopped before its first step.

    A corrected program does not need to match such an attempt.
    """
    if any(store.list_steps(path / CHECKPOINTS)) or foreign_files(path):
        return False
    try:
        history = History(path)
        last = history.last(*SESSION_START_KINDS, "end")
        has_trained = any(map(_has_trained, history.events(kinds=("step",))))
    except (WhetError, OSError):
        return False
    if last is None or has_trained:
        return False
    return last.get("state") == "failed" or (last.get("state") == "stopped" and last.step == 0)


def _has_trained(step: Event) -> bool:
    """Return whether a step counts as training: its loss is finite, or it is a manual step that logged no loss."""
    loss = step.number("loss")
    return "loss" not in step.fields or (loss is not None and math.isfinite(loss))


def decide_resume(requested: "RunConfig") -> ResumeDecision:
    """Return the saved plan if it fits this machine, otherwise a new plan. Nothing is written.

    A new run uses `requested.plan` if one is given. A plan for a different machine raises UsageError.
    """
    machine, system_state = current_machine()
    plan = make_plan(machine, requested.workload, overrides=requested.overrides, system_state=system_state)
    path = requested.path
    if path is None or not run_exists(path):
        if requested.plan is not None:
            check_plan_fits(requested.plan, plan)
        return ResumeDecision(plan=requested.plan or plan, run=None)
    run = open_run(path)
    check_unchanged(
        run.config, requested.config, where=path, free=[key for name in requested.allow for key in ALLOWED_KEYS[name]]
    )
    saved = read_plan(run.plan, where=f"{path}/plan.json")
    check_unchanged(_without_device(saved.overrides), _without_device(requested.overrides), where=path)
    changed = _plan_changes(saved, plan)
    before, now = saved.workload.global_batch_size, requested.workload.global_batch_size
    if before != now:
        changed = "; ".join(filter(None, (changed, f"global_batch_size {before} -> {now}")))
    if changed is not None:
        return ResumeDecision(plan=plan, run=run, replanned=changed)
    # Keep the saved plan, but take the free settings and the number of steps from the new one.
    overrides = {name: value for name, value in saved.overrides.items() if name not in _FREE_SETTINGS}
    overrides |= {name: value for name, value in plan.overrides.items() if name in _FREE_SETTINGS}
    kept = saved.model_copy(
        update={
            "workload": saved.workload.model_copy(update={"num_steps": requested.workload.num_steps}),
            "overrides": overrides,
            "settings": {
                **saved.settings,
                **{name: plan.settings[name] for name in _FREE_SETTINGS},
                **_forced_settings(saved, plan),
            },
            "system_state": saved.system_state.model_copy(update={"environment": plan.system_state.environment}),
        }
    )
    return ResumeDecision(plan=kept, run=run)


def _forced_settings(saved: Plan, plan: Plan) -> dict[str, Setting]:
    """Return the current values of settings that the environment determines now, or did when the plan was made."""
    now = {name: plan.settings[name] for name in names_of(lambda setting: setting.is_final)}
    return {
        name: setting
        for name, setting in now.items()
        if name in saved.settings and "environment" in (setting.source, saved.settings[name].source)
    }


def check_plan_fits(given: Plan, ours: Plan) -> None:
    """Raise UsageError if a plan was made for a different machine or training run."""
    changed = _plan_changes(given, ours)
    if given.workload.global_batch_size != ours.workload.global_batch_size:
        batches = f"global_batch_size {given.workload.global_batch_size}"
        changed = f"{batches}; this run has {ours.workload.global_batch_size}"
    if changed is not None:
        raise UsageError(
            "the plan was made for a different workload or machine", got=changed, try_="whet.tune(...) here, or no plan"
        )


def check_unchanged(
    saved: Mapping[str, Any], requested: Mapping[str, Any], *, where: Path, free: Collection[str] = ()
) -> None:
    """Raise UsageError for the first option that differs from the saved one and may not change."""
    for key in sorted({*saved, *requested}):
        before, now = saved.get(key), requested.get(key)
        # An option that a later version of whet has added is missing from older runs.
        is_new_default = key not in saved and now in (None, "auto")
        if before == now or is_new_default or key in (*FREE_KEYS, *free):
            continue
        if key not in GROWABLE_KEYS:
            requested_text, saved_text = _differences(key, now, before)
            raise UsageError(
                f"{where} was started with a different {key}",
                got=f"{requested_text}; the run has {saved_text}",
                try_=f"{saved_text} to resume, or another run folder for a new run" + _allow_hint(key),
            )
        if not _has_grown(before, now):
            raise UsageError(
                f"{key} may only be increased",
                got=f"{key}={now}; {where} has {key}={before}",
                try_="another run folder",
            )


def _differences(key: str, now: Any, before: Any) -> tuple[str, str]:
    """Return both values of an option in the form of arguments. For a group, include only the keys that differ."""
    if not (isinstance(now, Mapping) and isinstance(before, Mapping)):
        return f"{key}={now}", f"{key}={before}"
    names = [name for name in {**before, **now} if now.get(name) != before.get(name)]
    texts = [_differences(f"{key}.{name}", now.get(name), before.get(name)) for name in names]
    return " ".join(text for text, _ in texts), " ".join(text for _, text in texts)


def _allow_hint(key: str) -> str:
    names = [name for name, keys in ALLOWED_KEYS.items() if key in keys]
    return f"; --allow {names[0]} resumes anyway, not bit-exact" if names else ""


def _has_grown(before: Any, now: Any) -> bool:
    return now is None or (before is not None and now > before)


def _without_device(overrides: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the overrides without the device. A run may move to another device, which requires a new plan."""
    return {name: value for name, value in overrides.items() if name != "device"}


def _plan_changes(old: Plan, new: Plan) -> str | None:
    """Describe in one line why the saved plan does not fit this machine; None if it does."""
    saved, current = old.machine, new.machine
    pairs = {
        "device": (old.overrides.get("device", "auto"), new.overrides.get("device", "auto")),
        "processes": (old.workload.world_size, new.workload.world_size),
        "chip": (saved.chip, current.chip),
        "accelerators": (
            [(a.kind, a.name) for a in saved.accelerators],
            [(a.kind, a.name) for a in current.accelerators],
        ),
        "torch": (saved.torch.version, current.torch.version),
    }
    changes = [f"{name} {before} -> {now}" for name, (before, now) in pairs.items() if before != now]
    return "; ".join(changes) or None
