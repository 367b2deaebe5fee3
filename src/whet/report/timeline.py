"""The timeline of a run: sessions, slow periods and notable events."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_seconds
from whet.plan.render import format_value
from whet.run.event import INCIDENT_KINDS, SESSION_START_KINDS, Event, as_number
from whet.run.events import History

# Keep only the first and last entries, because a run of five million steps may have too many for a page.
MAX_TIMELINE = 300
MAX_SLOW_PERIODS = 200
# Steps must be slower by this factor, for this many seconds, to be shown as a slow period.
MIN_SLOW_FACTOR, MIN_SLOW_SECONDS = 1.3, 10.0
# Minimum number of speeds inside and outside a period, to compare them.
_MIN_SPEEDS = 3
TIMELINE_KINDS = ("start", "plan", "checkpoint", *INCIDENT_KINDS, "end")

_MAX_TEXT = 2_000
_NORMAL_LEVELS = {
    "heat": ("cool", "normal", "nominal"),
    "power": ("normal", "mains", "off"),
    "pressure": ("normal",),
}

Tone = Literal["good", "plain", "warn", "bad"]

# The severity with which a page shows an incident. All other incidents are shown as warnings.
_TONES: dict[str, Tone] = {"oom": "bad", "restart": "bad", "resume": "plain"}
_TITLES = {
    "oom": "out of memory",
    "resume": "resumed",
    "restart": "restarted",
    "skip": "a step was skipped",
    "spike": "the loss is far above its usual values",
}
# Labels of incidents in charts. There is no room for more than two words.
_LABELS = {
    "oom": "out of memory",
    "restart": "killed",
    "skip": "skipped",
    "spike": "spike",
    "fallback": "fallback",
    "warning": "warning",
}
# Fields that the text of an incident already contains, or that other parts of a report show.
_UNLISTED_FIELDS = {
    "resume": ("total_steps", "goal", "mode", "rejected", "exactness", "rollback_reason", "moved_from"),
    "oom": ("action",),
    "restart": ("action",),
    "throttle": ("cause", "state", "factor", "since_step", "thermal", "cooldown_seconds"),
    "pressure": ("level",),
    "fallback": ("operators",),
    "skip": ("verdict", "samples"),
    "spike": ("samples",),
    "warning": ("path", "errno", "free_bytes", "retry"),
}


class SessionSpan(FrozenModel):
    """The time in which one process trained without a break."""

    started: float
    """Unix time of the start. `ended` is that of the end."""
    ended: float
    step: int
    """Step from which the session started."""
    begins_at: float
    """Training seconds of all earlier sessions."""


class TrainingClock:
    """Converts unix seconds to training seconds, which exclude the time between sessions."""

    def __init__(self, sessions: Sequence[SessionSpan]) -> None:
        self._sessions = sessions
        self._starts = [session.started for session in sessions]

    def at(self, time: float) -> float:
        """Return the training seconds up to a unix time. They do not increase between two sessions."""
        if not self._sessions:
            return 0.0
        session = self._sessions[max(0, bisect_right(self._starts, time) - 1)]
        return session.begins_at + min(max(0.0, time - session.started), max(0.0, session.ended - session.started))


def session_spans(history: History) -> tuple[SessionSpan, ...]:
    """Return the sessions of a run, from the index of the log. A session always starts a new block."""
    # A rollback is also logged as a resume, but the process continues.
    rollbacks = {event.time for event in history.events(kinds=("resume",)) if event.get("rollback_reason")}
    spans: list[list[float]] = []
    for block in history.layout.blocks:
        if not block.kinds:
            continue
        is_start = not SESSION_START_KINDS.isdisjoint(block.kinds) and block.first_time not in rollbacks
        if not spans or is_start:
            spans.append([block.first_time, block.last_time, block.first_step])
        spans[-1][1] = block.last_time
    sessions: list[SessionSpan] = []
    trained = 0.0
    for started, ended, step in spans:
        sessions.append(SessionSpan(started=started, ended=ended, step=int(step), begins_at=trained))
        trained += max(0.0, ended - started)  # Keep the times in order, because the clock may have been set back.
    return tuple(sessions)


class SlowPeriod(FrozenModel):
    """A period in which heat, low power, memory pressure or other programs clearly slowed the run down."""

    cause: str
    """Cause of the slowdown: heat, power or pressure. Slow steps without a hot sensor count as heat too."""
    level: str
    reason: str
    from_step: int
    to_step: int
    from_seconds: float
    """Start of the period in training seconds."""
    to_seconds: float
    factor: float = 1.0
    """Median speed outside all slow periods divided by the median speed in this one."""


def slow_periods(
    history: History, clock: TrainingClock, speeds: Sequence[tuple[float, float]]
) -> tuple[SlowPeriod, ...]:
    """Return the periods in which steps were clearly slower.

    `speeds` are pairs of training seconds and samples per second. Heat or memory pressure alone is not a slow period,
    because sensors may report it without a noticeable loss of speed.
    """
    return tuple(_clearly_slow(_reported_periods(history, clock), speeds))[:MAX_SLOW_PERIODS]


def _clearly_slow(periods: Sequence[SlowPeriod], speeds: Sequence[tuple[float, float]]) -> Iterator[SlowPeriod]:
    for period in periods:
        inside = [speed for at, speed in speeds if period.from_seconds <= at <= period.to_seconds]
        # Exclude all slow periods from the usual speed.
        outside = [speed for at, speed in speeds if not any(p.from_seconds <= at <= p.to_seconds for p in periods)]
        is_long = period.to_seconds - period.from_seconds >= MIN_SLOW_SECONDS
        if is_long and min(len(inside), len(outside)) >= _MIN_SPEEDS:
            factor = median(outside) / max(median(inside), 1e-9)
            if factor >= MIN_SLOW_FACTOR:
                yield period.model_copy(update={"factor": factor})


def _reported_periods(history: History, clock: TrainingClock) -> list[SlowPeriod]:
    """Return the periods that events report. A period ends with the next event of the same cause, or the session."""
    periods: list[SlowPeriod] = []
    open_events: dict[str, Event] = {}
    for event in history.events(kinds=("throttle", "pressure", "end", *SESSION_START_KINDS)):
        if event.kind in ("throttle", "pressure"):
            cause, level = _cause_and_level(event)
            if cause in open_events:
                periods.append(_slow_period(open_events.pop(cause), event, clock))
            if level not in _NORMAL_LEVELS.get(cause, ()):
                open_events[cause] = event
        else:
            periods += [_slow_period(begun, event, clock) for begun in open_events.values()]
            open_events = {}
    last = history.last("step")
    if last is not None:
        periods += [_slow_period(begun, last, clock) for begun in open_events.values()]
    return periods[:MAX_SLOW_PERIODS]


def _cause_and_level(event: Event) -> tuple[str, str]:
    if event.kind == "pressure":
        return "pressure", str(event.get("level") or "")
    return str(event.get("cause") or "heat"), str(event.get("state") or "")


def _slow_period(begun: Event, ended: Event, clock: TrainingClock) -> SlowPeriod:
    cause, level = _cause_and_level(begun)
    since = begun.get("since_step")
    return SlowPeriod(
        cause=cause,
        level=level,
        reason=str(begun.get("reason") or ""),
        from_step=since if type(since) is int and since <= begun.step else begun.step,
        to_step=max(begun.step, ended.step),
        from_seconds=clock.at(begun.time),
        to_seconds=max(clock.at(begun.time), clock.at(ended.time)),
    )


class TimelineEntry(FrozenModel):
    """One notable event, with its text."""

    kind: str
    step: int
    time: float
    """Unix time of the event."""
    seconds: float
    """Training seconds up to the event."""
    tone: Tone
    text: str
    label: str = ""
    """A word or two for a chart. Empty for events that no chart marks."""


def timeline(history: History, clock: TrainingClock) -> tuple[tuple[TimelineEntry, ...], int]:
    """Return the notable events of a run in order, and the number of events omitted from the middle."""
    kinds = {kind for block in history.layout.blocks for kind in block.kinds} & set(TIMELINE_KINDS)
    # Count events in the index instead of reading them, because a run may have more than a page can show.
    total = sum(block.kinds.get(kind, 0) for block in history.layout.blocks for kind in kinds)
    first: list[TimelineEntry] = []
    for event in history.events(kinds=kinds):
        if len(first) >= MAX_TIMELINE // 2:
            break
        first.append(timeline_entry(event, clock))
    last: list[TimelineEntry] = []
    for event in history.backwards(kinds=kinds):
        if len(last) >= min(MAX_TIMELINE // 2, total - len(first)):
            break
        last.append(timeline_entry(event, clock))
    return (*first, *reversed(last)), max(0, total - len(first) - len(last))


def timeline_entry(event: Event, clock: TrainingClock) -> TimelineEntry:
    """Return the timeline entry for an event, with its text and label."""
    return TimelineEntry(
        kind=event.kind,
        step=event.step,
        time=event.time,
        seconds=clock.at(event.time),
        tone=_tone(event),
        text=_event_text(event)[:_MAX_TEXT],
        label=_label(event),
    )


def _label(event: Event) -> str:
    if event.kind == "resume":
        return "rolled back" if event.get("rollback_reason") else "resumed"
    if event.kind == "end":
        return "failed" if event.get("state") == "failed" else ""
    return _LABELS.get(event.kind, "")


def _tone(event: Event) -> Tone:
    state, level = event.get("state"), event.get("level")
    if event.kind == "checkpoint":
        return "good"
    if event.kind == "end":
        return "bad" if state == "failed" else "plain" if state == "stopped" else "good"
    if event.kind == "throttle" and state == "cool":
        return "good"
    if event.kind == "pressure" and level in ("normal", "critical"):
        return "good" if level == "normal" else "bad"
    return _TONES.get(event.kind, "warn" if event.kind in INCIDENT_KINDS else "plain")


def _event_text(event: Event) -> str:
    if event.kind == "eval":
        numbers = {name: as_number(value) for name, value in event.fields.items()}
        return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)
    if event.kind == "epoch":
        return f"epoch {event.get('epoch')} took {format_seconds(event.number('epoch_seconds') or 0.0)}"
    if event.kind == "checkpoint":
        return f"saved {event.get('name') or ''} ({format_bytes(event.number('bytes') or 0.0)})"
    if event.kind == "start":
        return "training started"
    if event.kind == "plan":
        return str(event.get("message") or "the plan was made")
    if event.kind == "end":
        return str(event.get("reason") or event.get("state") or "done")
    return incident_text(event.kind, event.fields)


def incident_text(kind: str, fields: Mapping[str, Any]) -> str:
    """Return the text of an incident: title, reason, action and all other fields."""
    stated = ("reason", "exact", *_UNLISTED_FIELDS.get(kind, ()))
    rest = ", ".join(f"{name} {format_value(value)}" for name, value in fields.items() if name not in stated)
    parts = [
        "a transient fault" if fields.get("verdict") == "transient" else _title(kind),
        fields.get("reason"),
        fields.get("action"),
        fields.get("exactness"),
        fields.get("rollback_reason"),
        _rejected_checkpoints(fields.get("rejected")),
        rest,
    ]
    return "; ".join(str(part) for part in parts if part) or kind


def _title(kind: str) -> str:
    """Return the title of an incident, or an empty text if its reason needs no title."""
    return _TITLES.get(kind, "" if kind in INCIDENT_KINDS else kind)


def _rejected_checkpoints(problems: object) -> str:
    if not isinstance(problems, list | tuple) or not problems:
        return ""
    return f"{len(problems)} checkpoint{'s' if len(problems) > 1 else ''} rejected: {'; '.join(map(str, problems))}"
