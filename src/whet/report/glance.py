"""How is a run doing, in the few figures that a person beside the training looks at?"""

import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from whet.base.errors import WhetError
from whet.base.record import Record
from whet.base.units import show_bytes, show_seconds
from whet.report.sentences import sentence
from whet.report.summary import Happening, resume_command
from whet.run.event import HAPPENINGS, SITTINGS, Event, as_number
from whet.run.events import History
from whet.run.folder import Run
from whet.run.runs import State, goal_name, run_state, total_steps
from whet.run.thin import Curve, thin_curve

_SPEED_SECONDS = 15.0
"""Speed is taken over this much of the end: steps are written down in bulk, up to a second late."""
_MOST_STEPS = 2_000
_MOST_TOLD = 12
_TOLD = ("start", "plan", "eval", "epoch", "checkpoint", *HAPPENINGS, "end")


class Told(Record):
    """Something that happened, in words."""

    step: int
    time: float
    text: str
    is_bad: bool = False


class Vitals(Record):
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


class Glance(Record):
    """A run at one moment."""

    path: Path
    state: State
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
    vitals: Vitals = Vitals()
    told: tuple[Told, ...] = ()
    """The newest first."""
    changed: float = 0.0
    """When its last event was written, in unix seconds."""
    resume: str | None = None
    """The command that goes on with it, where one is needed."""
    problem: str | None = None


def glance(run: Run, history: History, *, points: int) -> Glance:
    """The run as its folder tells it now, its loss in at most `points` points."""
    state = run_state(run, history=history)
    step, newest = history.last("step"), next(history.backwards(), None)
    total, goal = total_steps(run, history=history), goal_name(history)
    values = (event.number(goal) for event in history.backwards(kinds=("eval",))) if goal else iter(())
    samples, steps = _speeds(history) if state == "running" else (None, None)
    left = total - step.step if total is not None and step is not None else None
    epoch = step.get("epoch") if step else None
    return Glance(
        path=run.path,
        state=state,
        recipe=run.header.recipe,
        device=_device(run.plan),
        step=step.step if step else 0,
        total_steps=total,
        epoch=epoch + 1 if isinstance(epoch, int) else None,
        loss=step.number("loss") if step else None,
        curve=thin_curve(history, field="loss", points=points),
        goal=goal,
        goal_value=next((value for value in values if value is not None), None),
        samples_per_second=samples,
        seconds_left=left / steps if left and steps else None,
        vitals=vitals_of(history, is_running=state == "running"),
        told=_told(history, is_running=state == "running"),
        changed=newest.time if newest else run.header.created,
        resume=resume_command(run) if state in ("stopped", "failed") else None,
    )


def unreadable(path: Path, problem: WhetError | OSError, *, changed: float) -> Glance:
    """A folder that cannot be read as a run, with the reason."""
    reason = problem.what if isinstance(problem, WhetError) else str(problem)
    return Glance(path=path, state="unreadable", problem=reason, changed=changed)


def vitals_of(history: History, *, is_running: bool) -> Vitals:
    """Memory as read last, load and heat of a run at work; an older run knows memory at the end of epochs only."""
    event = history.last("health") or history.last("epoch")
    if event is None:
        return Vitals()
    memory, use = _numbers(event.get("memory")), _numbers(event.get("use")) if is_running else {}
    taken, available = memory.get("used"), memory.get("available")
    used = (memory.get(name) for name in ("reserved", "allocated", "process"))
    pressure = event.get("pressure")
    return Vitals(
        used_bytes=next((value for value in used if value), None),
        limit_bytes=memory.get("limit"),
        system_bytes=taken,
        system_limit_bytes=taken + available if taken is not None and available is not None else None,
        swap_bytes=memory.get("swap"),
        gpu=_share(use.get("gpu")),
        cpu=_share(use.get("cpu")),
        heat=_heat(history, event) if is_running else None,
        pressure=pressure if is_running and isinstance(pressure, str) and pressure != "normal" else None,
    )


def _numbers(said: object) -> dict[str, float]:
    """The finite numbers of a map."""
    numbers = {str(name): as_number(value) for name, value in said.items()} if isinstance(said, Mapping) else {}
    return {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}


def _share(percent: float | None) -> float | None:
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
    recent = itertools.islice(history.backwards(kinds=("step", *SITTINGS)), _MOST_STEPS)
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


def _told(history: History, *, is_running: bool) -> tuple[Told, ...]:
    events = list(itertools.islice(history.backwards(kinds=_TOLD), _MOST_TOLD))
    told = [Told(step=e.step, time=e.time, text=in_words(e), is_bad=_is_bad(e)) for e in events]
    turn = history.last(*SITTINGS, "end")
    newest = next(history.backwards(), None)
    if newest is not None and not is_running and turn is not None and turn.kind != "end":
        text = "the process that trained has died without a word"
        told.insert(0, Told(step=newest.step, time=newest.time, text=text, is_bad=True))
    return tuple(told)


def _is_bad(event: Event) -> bool:
    if event.kind == "end":
        return str(event.get("state")) == "failed"
    is_good_news = event.kind == "resume" or str(event.get("state")) == "cool" or str(event.get("level")) == "normal"
    return event.kind in HAPPENINGS and not is_good_news


def in_words(event: Event) -> str:
    """An event as a person would tell it; every kind has words."""
    numbers = {name: as_number(value) for name, value in event.fields.items()}
    if event.kind == "eval":
        return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)
    if event.kind == "epoch":
        return f"epoch {event.get('epoch')} took {show_seconds(numbers.get('epoch_seconds') or 0.0)}"
    if event.kind == "checkpoint":
        return f"saved {event.get('name')} ({show_bytes(numbers.get('bytes') or 0.0)})"
    if event.kind == "start":
        return "started"
    if event.kind == "end":
        reason = event.get("reason")
        return str(event.get("state") or "ended") + (f": {reason}" if reason else "")
    if event.kind == "plan":
        return f"plan: {event.get('changed')}"
    return sentence(Happening(kind=event.kind, time=event.time, step=event.step, details=dict(event.fields)))
