"""The status of a run at one moment, for lists and live views."""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from whet.base.errors import WhetError
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_seconds
from whet.report.run_report import Incident, resume_command
from whet.report.timeline import incident_text
from whet.run.curve import Curve, downsample_curve
from whet.run.event import INCIDENT_KINDS, SESSION_START_KINDS, Event, as_number
from whet.run.events import History
from whet.run.folder import Run
from whet.run.prune import RunState, goal_name, run_state, total_steps

_SPEED_SECONDS = 15.0
"""Speed is taken over this much of the end: steps are written down in bulk, up to a second late."""
_MAX_SPEED_STEPS = 2_000
_MAX_RECENT = 12
_RECENT_KINDS = ("start", "plan", "eval", "epoch", "checkpoint", *INCIDENT_KINDS, "end")


class RecentEvent(FrozenModel):
    """Something that happened, in words."""

    step: int
    time: float
    text: str
    is_bad: bool = False


class MachineLoad(FrozenModel):
    """What the machine bears while the run trains; None is unknown."""

    used_bytes: float | None = None
    """On the device, or of the process where that is all one can know."""
    limit_bytes: float | None = None
    system_bytes: float | None = None
    system_limit_bytes: float | None = None
    swap_bytes: float | None = None
    gpu: float | None = None
    cpu: float | None = None
    """In use, from 0 to 1."""
    heat: str | None = None
    pressure: str | None = None
    """Of memory, where it is not normal."""


class LiveStatus(FrozenModel):
    """A run at one moment."""

    path: Path
    state: RunState
    recipe: str = ""
    device: str = ""
    step: int = 0
    total_steps: int | None = None
    epoch: int | None = None
    loss: float | None = None
    curve: Curve | None = None
    goal: str | None = None
    goal_value: float | None = None
    samples_per_second: float | None = None
    seconds_left: float | None = None
    vitals: MachineLoad = MachineLoad()
    told: tuple[RecentEvent, ...] = ()
    """The newest first."""
    changed: float = 0.0
    """When its last event was written, in unix seconds."""
    resume: str | None = None
    """The command that goes on with it, where one is needed."""
    problem: str | None = None


def live_status(run: Run, history: History, *, points: int) -> LiveStatus:
    """The run as its folder tells it now, its loss in at most `points` points."""
    state = run_state(run, history=history)
    step, newest = history.last("step"), next(history.backwards(), None)
    total, goal = total_steps(run, history=history), goal_name(history)
    values = (event.number(goal) for event in history.backwards(kinds=("eval",))) if goal else iter(())
    samples, steps = _speeds(history) if state == "running" else (None, None)
    left = total - step.step if total is not None and step is not None else None
    epoch = step.get("epoch") if step else None
    return LiveStatus(
        path=run.path,
        state=state,
        recipe=run.header.recipe,
        device=_device(run.plan),
        step=step.step if step else 0,
        total_steps=total,
        epoch=epoch + 1 if isinstance(epoch, int) else None,
        loss=step.number("loss") if step else None,
        curve=downsample_curve(history, field="loss", points=points),
        goal=goal,
        goal_value=next((value for value in values if value is not None), None),
        samples_per_second=samples,
        seconds_left=left / steps if left and steps else None,
        vitals=machine_load(history, is_running=state == "running"),
        told=_recent_events(history, is_running=state == "running"),
        changed=newest.time if newest else run.header.created,
        resume=resume_command(run) if state in ("stopped", "failed") else None,
    )


def unreadable_status(path: Path, problem: WhetError | OSError, *, changed: float) -> LiveStatus:
    """A folder that cannot be read as a run, with the reason."""
    reason = problem.what if isinstance(problem, WhetError) else str(problem)
    return LiveStatus(path=path, state="unreadable", problem=reason, changed=changed)


def machine_load(history: History, *, is_running: bool) -> MachineLoad:
    """Memory as read last, load and heat of a run at work; an older run knows memory at the end of epochs only."""
    event = history.last("health") or history.last("epoch")
    if event is None:
        return MachineLoad()
    memory, use = _numbers(event.get("memory")), _numbers(event.get("use")) if is_running else {}
    taken, available = memory.get("used"), memory.get("available")
    used = (memory.get(name) for name in ("reserved", "allocated", "process"))
    pressure = event.get("pressure")
    return MachineLoad(
        used_bytes=next((value for value in used if value), None),
        limit_bytes=memory.get("limit"),
        system_bytes=taken,
        system_limit_bytes=taken + available if taken is not None and available is not None else None,
        swap_bytes=memory.get("swap"),
        gpu=_fraction(use.get("gpu")),
        cpu=_fraction(use.get("cpu")),
        heat=_heat(history, event) if is_running else None,
        pressure=pressure if is_running and isinstance(pressure, str) and pressure != "normal" else None,
    )


def _numbers(said: object) -> dict[str, float]:
    """The finite numbers of a map."""
    numbers = {str(name): as_number(value) for name, value in said.items()} if isinstance(said, Mapping) else {}
    return {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _fraction(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _heat(history: History, event: Event) -> str | None:
    """Without a sensor steps that became slower are no heat, only slower."""
    thermal = event.get("thermal")
    said = () if thermal is None else (event.get("heat"), thermal)
    words = list(dict.fromkeys(str(word) for word in said if isinstance(word, str | int) and word is not False))
    told = next((e for e in history.backwards(kinds=("throttle",)) if e.get("about") == "heat"), None)
    factor = told.number("factor") if told and told.get("state") != "cool" and event.get("heat") != "cool" else None
    words += [f"{factor:.1f}x slower"] if factor else []
    words += ["no heat sensor"] if factor and thermal is None else []
    return ", ".join(words) or None


def _device(plan: Mapping[str, object]) -> str:
    settings = plan.get("settings")
    device = settings.get("device") if isinstance(settings, Mapping) else None
    return str(device.get("value") or "") if isinstance(device, Mapping) else ""


def _speeds(history: History) -> tuple[float | None, float | None]:
    """Samples and steps a second over the last seconds; unknown until two readings lie apart."""
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


def _recent_events(history: History, *, is_running: bool) -> tuple[RecentEvent, ...]:
    events = list(itertools.islice(history.backwards(kinds=_RECENT_KINDS), _MAX_RECENT))
    told = [RecentEvent(step=e.step, time=e.time, text=event_text(e), is_bad=_is_problem(e)) for e in events]
    turn = history.last(*SESSION_START_KINDS, "end")
    newest = next(history.backwards(), None)
    if newest is not None and not is_running and turn is not None and turn.kind != "end":
        text = "the process that trained has died without a word"
        told.insert(0, RecentEvent(step=newest.step, time=newest.time, text=text, is_bad=True))
    return tuple(told)


def _is_problem(event: Event) -> bool:
    if event.kind == "end":
        return str(event.get("state")) == "failed"
    is_good_news = event.kind == "resume" or str(event.get("state")) == "cool" or str(event.get("level")) == "normal"
    return event.kind in INCIDENT_KINDS and not is_good_news


def event_text(event: Event) -> str:
    """An event as a person would tell it; every kind has words."""
    numbers = {name: as_number(value) for name, value in event.fields.items()}
    if event.kind == "eval":
        return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)
    if event.kind == "epoch":
        return f"epoch {event.get('epoch')} took {format_seconds(numbers.get('epoch_seconds') or 0.0)}"
    if event.kind == "checkpoint":
        return f"saved {event.get('name')} ({format_bytes(numbers.get('bytes') or 0.0)})"
    if event.kind == "start":
        return "started"
    if event.kind == "end":
        reason = event.get("reason")
        return str(event.get("state") or "ended") + (f": {reason}" if reason else "")
    if event.kind == "plan":
        return f"plan: {event.get('changed')}"
    return incident_text(Incident(kind=event.kind, time=event.time, step=event.step, details=dict(event.fields)))
