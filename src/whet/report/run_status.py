"""The status of a run: the part of its report that is cheap enough for lists and live views."""

import contextlib
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.config.goal import GoalMode
from whet.report.timeline import TIMELINE_KINDS, TimelineEntry, TrainingClock, session_spans, timeline_entry
from whet.run import lock
from whet.run.curve import Curve, downsample_curve
from whet.run.event import SESSION_START_KINDS, Event, as_number
from whet.run.events import History
from whet.run.folder import Run, open_run, resume_command, run_folder, run_folders
from whet.run.strict_json import StrictModel

RunState = Literal["running", "done", "stopped", "failed", "never started", "unreadable"]

# Measure speed over the last seconds of a run. Steps are written in batches, up to a second late.
_SPEED_SECONDS = 15.0
_MAX_SPEED_STEPS = 2_000
_MAX_RECENT = 12
_SPARKLINE_POINTS = 32
_MAX_LOSS_STEPS = 1_000
_RECENT_KINDS = ("eval", "epoch", *TIMELINE_KINDS)


class RunStatus(StrictModel):
    """The progress of a run. `RunReport` and `LiveStatus` extend it."""

    path: Path
    state: RunState
    recipe: str = ""
    """The recipe, or the Python file that trained."""
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    """Newest training loss. With several optimizers it is a sum; use `losses` instead."""
    losses: dict[str, float | None] = Field(default_factory=dict)
    """Newest loss of each optimizer, by its name in the log ("loss_d"). Empty for a single optimizer."""
    sparkline: tuple[float | None, ...] = ()
    """A few values of the training loss from start to end, for display in lists."""
    goal: str | None = None
    """Name of the metric that selects the best checkpoint."""
    goal_value: float | None = None
    """Newest value of the goal metric."""
    goal_mode: GoalMode = "max"
    """Whether a lower or a higher value of the goal is better."""
    updated: float = 0.0
    """Unix time of the newest event, or of the creation of the run."""
    size_bytes: int | None = None
    """Disk usage of the folder in bytes, or None if it was not measured."""
    problem: str | None = None
    """Reason why the run is unreadable, or None."""


class MachineLoad(FrozenModel):
    """Memory, utilization and heat of the machine during a run. None means unknown."""

    used_bytes: float | None = None
    """Memory used on the device, or by the process if the device has no such counter."""
    limit_bytes: float | None = None
    system_bytes: float | None = None
    system_limit_bytes: float | None = None
    swap_bytes: float | None = None
    gpu: float | None = None
    cpu: float | None = None
    """CPU utilization from 0 to 1."""
    heat: str | None = None
    pressure: str | None = None
    """Memory pressure, or None if it is normal."""


class LiveStatus(RunStatus):
    """The status of a run in the live terminal view."""

    device: str = ""
    epoch: int | None = None
    curve: Curve | None = None
    """Curve of the training loss. If there are several optimizers, that of the first."""
    samples_per_second: float | None = None
    seconds_left: float | None = None
    load: MachineLoad = MachineLoad()
    recent: tuple[TimelineEntry, ...] = ()
    """Recent events, newest first."""
    resume: str | None = None
    """Command that resumes the run, or None if it was not stopped."""


def list_runs(root: Path) -> tuple[RunStatus, ...]:
    """Return the status of the runs in a folder, sorted by name."""
    statuses = (_list_entry(path) for path in run_folders(root))
    # A run that was removed while it was read is not damaged, so skip it.
    return tuple(run for run in statuses if run.state != "unreadable" or run.path.exists())


def read_status(run: Run | Path | str, *, history: History | None = None) -> RunStatus:
    """Return the current status of a run. Pass `history` to avoid reading the log again."""
    run = run if isinstance(run, Run) else open_run(run)
    history = history if history is not None else History(run)
    step, newest, goal = history.last("step"), next(history.backwards(), None), goal_name(history)
    values = (event.number(goal) for event in history.backwards(kinds=("eval",))) if goal else iter(())
    return RunStatus(
        path=run.path,
        state=run_state(run, history=history),
        recipe=run.header.title,
        step=step.step if step else 0,
        total_steps=total_steps(run, history=history),
        loss=step.number("loss") if step else None,
        losses=_losses(history),
        goal=goal,
        goal_value=next((value for value in values if value is not None), None),
        goal_mode=goal_mode(history) if goal else "max",
        updated=newest.time if newest else run.header.created,
    )


def read_live_status(run: Run, history: History, *, points: int) -> LiveStatus:
    """Return the status of a run for the live view. The loss curve has at most `points` points."""
    status = read_status(run, history=history)
    is_running = status.state == "running"
    step = history.last("step")
    samples, _ = _speeds(history) if is_running else (None, None)
    epoch = step.get("epoch") if step else None
    return LiveStatus(
        **dict(status),
        device=_device(run.plan),
        epoch=epoch + 1 if isinstance(epoch, int) else None,
        curve=downsample_curve(history, field=next(iter(status.losses), "loss"), points=points),
        samples_per_second=samples,
        seconds_left=estimate_seconds_left(history, status),
        load=machine_load(history, is_running=is_running),
        recent=_recent_events(history, is_running=is_running),
        resume=resume_command(run) if status.state in ("stopped", "failed") else None,
    )


def estimate_seconds_left(history: History, status: RunStatus) -> float | None:
    """Return how long a running training still takes at its recent speed, or None if that is unknown."""
    if status.state != "running" or status.total_steps is None or not status.step:
        return None
    _, steps_per_second = _speeds(history)
    left = status.total_steps - status.step
    return left / steps_per_second if left and steps_per_second else None


def loss_text(status: RunStatus) -> str:
    """Format the newest loss, or that of each optimizer with its name. Return an empty text before the first step.

    >>> loss_text(RunStatus(path=Path("run"), state="done", loss=2.0, losses={"loss_d": 0.5, "loss_g": 1.5}))
    'd 0.5, g 1.5'
    """
    if not status.losses:
        return "" if status.loss is None else f"{status.loss:.4g}"
    named = {name.removeprefix("loss_"): loss for name, loss in status.losses.items()}
    return ", ".join(f"{name} {loss:.4g}" for name, loss in named.items() if loss is not None)


def describe_problem(error: WhetError | OSError) -> str:
    """Return the reason why a folder cannot be read as a run."""
    return error.what if isinstance(error, WhetError) else str(error)


def run_state(run: Run | Path, *, history: History) -> RunState:
    """Return whether a run is running, or else how it ended."""
    if lock.is_locked(run_folder(run)):
        return "running"
    last = history.last(*SESSION_START_KINDS, "end")
    if last is None:
        return "stopped" if history.last("step") is not None else "never started"
    if last.kind != "end":
        return "stopped"  # The process died without writing an end event.
    state = last.get("state")
    return state if state in ("done", "stopped", "failed") else "done"


def total_steps(run: Run, *, history: History) -> int | None:
    """Return the planned number of steps from the newest start event or the configuration, or None if unknown."""
    for event in history.backwards(kinds=SESSION_START_KINDS):
        total = event.get("total_steps")
        if type(total) is int:
            return total
    max_steps = run.config.get("max_steps")
    return max_steps if type(max_steps) is int else None


def _losses(history: History) -> dict[str, float | None]:
    """Return the newest loss of each optimizer, from several steps, because not all optimizers run in each step."""
    begun = history.last(*SESSION_START_KINDS)
    names = begun.get("optimizers") if begun is not None else None
    losses: dict[str, float | None] = {f"loss_{name}": None for name in names or () if isinstance(name, str)}
    recent = itertools.islice(history.backwards(kinds=("step",)), _MAX_LOSS_STEPS if losses else 0)
    for event in recent:
        losses |= {name: event.number(name) for name, value in losses.items() if value is None}
        if None not in losses.values():
            break
    return losses


def loss_sparkline(history: History, losses: Mapping[str, float | None]) -> tuple[float | None, ...]:
    """Return a few values of the training loss. If there are several optimizers, use that of the first."""
    curve = downsample_curve(history, field=next(iter(losses), "loss"), points=_SPARKLINE_POINTS)
    return tuple(None if point.mean is None else float(f"{point.mean:.4g}") for point in curve.points)


def goal_name(history: History) -> str | None:
    """Return the name of the goal metric from the newest start event that has one, or None."""
    names = (event.get("goal") for event in history.backwards(kinds=SESSION_START_KINDS))
    return next((name for name in names if isinstance(name, str)), None)


def goal_mode(history: History) -> GoalMode:
    """Return the direction of the goal metric from the newest start event that has one, or "max"."""
    modes = (event.get("mode") for event in history.backwards(kinds=SESSION_START_KINDS))
    return next((mode for mode in modes if mode in ("max", "min")), "max")


def machine_load(history: History, *, is_running: bool) -> MachineLoad:
    """Return the newest memory reading, with utilization and heat if the run is training."""
    event = history.last("health") or history.last("epoch")
    if event is None:
        return MachineLoad()
    memory, busy = _finite_numbers(event.get("memory")), _finite_numbers(event.get("utilization"))
    system, available = memory.get("used"), memory.get("available")
    used = (memory.get(name) for name in ("reserved", "allocated", "process"))
    pressure = event.get("pressure")
    return MachineLoad(
        used_bytes=next((value for value in used if value), None),
        limit_bytes=memory.get("limit"),
        system_bytes=system,
        system_limit_bytes=system + available if system is not None and available is not None else None,
        swap_bytes=memory.get("swap"),
        gpu=busy["gpu"] / 100 if is_running and "gpu" in busy else None,
        cpu=busy["cpu"] / 100 if is_running and "cpu" in busy else None,
        heat=_heat(history, event) if is_running else None,
        pressure=pressure if is_running and isinstance(pressure, str) and pressure != "normal" else None,
    )


def _list_entry(path: Path) -> RunStatus:
    size, changed = _disk_usage(path)
    try:
        history = History(run := open_run(path))
        status = read_status(run, history=history)
        curve = loss_sparkline(history, status.losses)
        return status.model_copy(update={"path": path, "size_bytes": size, "sparkline": curve})
    except (WhetError, OSError) as error:
        problem = describe_problem(error)
        return RunStatus(path=path, state="unreadable", updated=changed, size_bytes=size, problem=problem)


def _disk_usage(path: Path) -> tuple[int, float]:
    """Return the disk usage of a run in bytes, and the unix time of its newest change. Do not follow links."""
    size, newest = 0, 0.0
    # Another process may remove files in the meantime.
    for place in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            stat = place.lstat()
            size, newest = size + stat.st_blocks * 512, max(newest, stat.st_mtime)
    return size, newest


def _finite_numbers(value: object) -> dict[str, float]:
    numbers = {str(name): as_number(item) for name, item in value.items()} if isinstance(value, Mapping) else {}
    return {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _heat(history: History, event: Event) -> str | None:
    """Return the thermal state as text. Without a sensor, return only the slowdown of the steps."""
    thermal = event.get("thermal")
    levels = () if thermal is None else (event.get("heat"), thermal)
    parts = list(dict.fromkeys(str(level) for level in levels if isinstance(level, str | int) and level is not False))
    throttle = next((e for e in history.backwards(kinds=("throttle",)) if e.get("cause") == "heat"), None)
    is_slow = throttle is not None and throttle.get("state") != "cool" and event.get("heat") != "cool"
    factor = throttle.number("factor") if throttle is not None and is_slow else None
    parts += [f"{factor:.1f}x slower"] if factor else []
    parts += ["no heat sensor"] if factor and thermal is None else []
    return ", ".join(parts) or None


def _device(plan: Mapping[str, object]) -> str:
    settings = plan.get("settings")
    device = settings.get("device") if isinstance(settings, Mapping) else None
    return str(device.get("value") or "") if isinstance(device, Mapping) else ""


def _speeds(history: History) -> tuple[float | None, float | None]:
    """Return samples and steps per second over the last few seconds, or None if there are too few steps."""
    recent = itertools.islice(history.backwards(kinds=("step", *SESSION_START_KINDS)), _MAX_SPEED_STEPS)
    last = first = next(recent, None)
    if last is None or first is None:
        return None, None
    for event in recent:
        if event.kind != "step" or last.time - event.time > _SPEED_SECONDS:
            break
        first = event
    seconds = last.time - first.time
    if seconds < 0.2 or last.kind != "step":
        return None, None
    samples = (last.number("samples") or 0.0) - (first.number("samples") or 0.0)
    return samples / seconds or None, (last.step - first.step) / seconds or None


def _recent_events(history: History, *, is_running: bool) -> tuple[TimelineEntry, ...]:
    clock = TrainingClock(session_spans(history))
    events = itertools.islice(history.backwards(kinds=_RECENT_KINDS), _MAX_RECENT)
    recent = [timeline_entry(event, clock) for event in events]
    turn, newest = history.last(*SESSION_START_KINDS, "end"), next(history.backwards(), None)
    if newest is not None and not is_running and turn is not None and turn.kind != "end":
        died = timeline_entry(newest, clock).model_copy(
            update={"kind": "died", "tone": "bad", "text": "the training process died without a message"}
        )
        recent.insert(0, died)
    return tuple(recent)
