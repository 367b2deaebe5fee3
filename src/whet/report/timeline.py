"""What happened in a run over time: sessions, slow periods and notable events."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

from whet.base.model import FrozenModel
from whet.base.units import format_bytes
from whet.plan.render import format_value
from whet.report.run_report import Incident
from whet.run.event import INCIDENT_KINDS, SESSION_START_KINDS, Event
from whet.run.events import History


class SessionSpan(FrozenModel):
    """One process at work without a break."""

    started: float
    """Unix seconds."""
    ended: float
    step: int
    """The step it went on from."""
    begins_at: float
    """Seconds of work done before it."""


class TrainingClock:
    """Turns unix seconds into seconds of work."""

    def __init__(self, sittings: Sequence[SessionSpan]) -> None:
        self._sittings = sittings
        self._starts = [sitting.started for sitting in sittings]

    def at(self, time: float) -> float:
        """The seconds of work done at that time; between two sittings: all of the earlier one."""
        if not self._sittings:
            return 0.0
        sitting = self._sittings[max(0, bisect_right(self._starts, time) - 1)]
        return sitting.begins_at + min(max(0.0, time - sitting.started), max(0.0, sitting.ended - sitting.started))


def session_spans(history: History) -> tuple[SessionSpan, ...]:
    """The sittings of a run in their order, from the places where its log says that one began."""
    found: list[list[float]] = []
    for block in history.layout.blocks:
        if not block.kinds:
            continue
        if not found or not SESSION_START_KINDS.isdisjoint(block.kinds):
            found.append([block.first_time, block.last_time, block.first_step])
        found[-1][1] = block.last_time
    made: list[SessionSpan] = []
    work = 0.0
    for started, ended, step in found:
        made.append(SessionSpan(started=started, ended=ended, step=int(step), begins_at=work))
        work += max(0.0, ended - started)
    return tuple(made)


_INCIDENT_TITLES = {
    "oom": "out of memory",
    "resume": "went on",
    "throttle": "",
    "pressure": "",
    "restart": "started again",
    "skip": "a step was left out",
    "spike": "a loss far above the usual",
    "fallback": "",
    "warning": "",
}
_SHOWN_ELSEWHERE = {
    "resume": ("total_steps", "goal", "mode", "refused", "exactness", "rollback_reason", "moved_from"),
    "oom": ("cure",),
    "restart": ("cure",),
    "throttle": ("about", "state", "factor", "since_step", "thermal", "cooldown_seconds"),
    "pressure": ("level",),
    "fallback": ("operators",),
    "skip": ("verdict", "samples"),
    "spike": ("samples",),
    "warning": ("path", "errno", "free_bytes", "again"),
}
"""Details that are said by the sentence, or belong elsewhere."""


def incident_text(happening: Incident) -> str:
    """What happened, why, and what else was written down; of a kind that is not known here, everything."""
    kind, details = happening.kind, happening.details
    told = ("reason", "exact", *_SHOWN_ELSEWHERE.get(kind, ()))
    rest = ", ".join(f"{name} {format_value(value)}" for name, value in details.items() if name not in told)
    parts = [
        "a fault of the moment" if details.get("verdict") == "transient" else _INCIDENT_TITLES.get(kind, kind),
        details.get("reason"),
        details.get("cure"),
        details.get("exactness"),
        details.get("rollback_reason"),
        _rejected_checkpoints(details.get("refused")),
        rest,
    ]
    return "; ".join(str(part) for part in parts if part) or kind


def _rejected_checkpoints(problems: object) -> str:
    """Checkpoints that could not be trusted when the run went on."""
    if not isinstance(problems, list | tuple) or not problems:
        return ""
    return f"{len(problems)} checkpoint{'s' if len(problems) > 1 else ''} refused: {'; '.join(map(str, problems))}"


MAX_TIMELINE = 300
"""The first and the last ones; a page has its limits, and a run of five million steps may have many."""

Tone = Literal["good", "plain", "warn", "bad"]

_TONES: dict[str, Tone] = {
    "oom": "bad",
    "restart": "bad",
    "skip": "warn",
    "spike": "warn",
    "throttle": "warn",
    "pressure": "warn",
    "fallback": "warn",
    "warning": "warn",
    "resume": "plain",
}
_ROUTINE_KINDS = ("start", "plan", "end", "checkpoint")


class TimelineEntry(FrozenModel):
    """One happening."""

    kind: str
    step: int
    time: float
    """Unix seconds."""
    seconds: float
    """Of work until then."""
    tone: Tone
    words: str


def timeline(history: History, clock: TrainingClock) -> tuple[tuple[TimelineEntry, ...], int]:
    """The moments of a run in their order, and how many in the middle were left out."""
    kinds = {kind for block in history.layout.blocks for kind in block.kinds} & {*INCIDENT_KINDS, *_ROUTINE_KINDS}
    first: list[TimelineEntry] = []
    for event in history.events(kinds=kinds):
        if len(first) >= MAX_TIMELINE // 2:
            break
        first.append(_timeline_entry(event, clock))
    total = sum(block.kinds.get(kind, 0) for block in history.layout.blocks for kind in kinds)
    last: list[TimelineEntry] = []
    for event in history.backwards(kinds=kinds):
        if len(last) >= min(MAX_TIMELINE // 2, total - len(first)):
            break
        last.append(_timeline_entry(event, clock))
    return (*first, *reversed(last)), max(0, total - len(first) - len(last))


def _timeline_entry(event: Event, clock: TrainingClock) -> TimelineEntry:
    tone, words = _tone_and_text(event)
    return TimelineEntry(
        kind=event.kind, step=event.step, time=event.time, seconds=clock.at(event.time), tone=tone, words=words[:2000]
    )


def _tone_and_text(event: Event) -> tuple[Tone, str]:
    if event.kind == "start":
        return "plain", "training began"
    if event.kind == "plan":
        return "plain", str(event.get("changed") or "the plan was made")
    if event.kind == "checkpoint":
        size = event.number("bytes")
        return "good", f"saved {event.get('name') or ''}" + (f", {format_bytes(size)}" if size else "")
    if event.kind == "end":
        state, reason = str(event.get("state") or "done"), event.get("reason")
        tone: Tone = "good" if state == "done" else "bad" if state == "failed" else "plain"
        return tone, f"{state}: {reason}" if reason else state
    tone = _TONES.get(event.kind, "plain")
    if event.kind == "throttle" and event.get("state") == "cool":
        tone = "good"
    if event.kind == "pressure" and event.get("level") in ("normal", "critical"):
        tone = "good" if event.get("level") == "normal" else "bad"
    happening = Incident(kind=event.kind, time=event.time, step=event.step, details=dict(event.fields))
    return tone, incident_text(happening)


_NORMAL_LEVELS = {"heat": ("cool", "normal", "nominal"), "power": ("normal", "mains", "off"), "pressure": ("normal",)}
MAX_SLOW_PERIODS = 200


class SlowPeriod(FrozenModel):
    """A stretch of a run in which something was not as it should be."""

    about: str
    """heat, power or pressure."""
    level: str
    reason: str
    from_step: int
    to_step: int
    from_seconds: float
    """Of work."""
    to_seconds: float


def slow_periods(history: History, clock: TrainingClock) -> tuple[SlowPeriod, ...]:
    """The stretches between an event that says so and the one that takes it back, or the end of the sitting."""
    found: list[SlowPeriod] = []
    open_ones: dict[str, Event] = {}
    for event in history.events(kinds=("throttle", "pressure", "end", *SESSION_START_KINDS)):
        if event.kind in ("throttle", "pressure"):
            about, _ = _cause(event)
            if about in open_ones:
                found.append(_slow_period(open_ones.pop(about), event, clock))
            if _is_abnormal(event):
                open_ones[about] = event
        else:
            found += [_slow_period(begun, event, clock) for begun in open_ones.values()]
            open_ones = {}
    last = history.last("step")
    if last is not None:
        found += [_slow_period(begun, last, clock) for begun in open_ones.values()]
    return tuple(found[:MAX_SLOW_PERIODS])


def _cause(event: Event) -> tuple[str, str]:
    if event.kind == "pressure":
        return "pressure", str(event.get("level") or "")
    return str(event.get("about") or "heat"), str(event.get("state") or "")


def _is_abnormal(event: Event) -> bool:
    about, level = _cause(event)
    return level not in _NORMAL_LEVELS.get(about, ())


def _slow_period(begun: Event, ended: Event, clock: TrainingClock) -> SlowPeriod:
    about, level = _cause(begun)
    since = begun.get("since_step")
    first = since if isinstance(since, int) and not isinstance(since, bool) and since <= begun.step else begun.step
    return SlowPeriod(
        about=about,
        level=level,
        reason=str(begun.get("reason") or ""),
        from_step=first,
        to_step=max(begun.step, ended.step),
        from_seconds=clock.at(begun.time),
        to_seconds=max(clock.at(begun.time), clock.at(ended.time)),
    )
