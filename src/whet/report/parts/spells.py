"""When was a run slowed by heat, by low power, or short of memory?"""

from whet.base.record import Record
from whet.report.parts.work_clock import WorkClock
from whet.run.event import SITTINGS, Event
from whet.run.events import History

_GOOD = {"heat": ("cool", "normal", "nominal"), "power": ("normal", "mains", "off"), "pressure": ("normal",)}
MOST = 200


class Spell(Record):
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


def spells(history: History, clock: WorkClock) -> tuple[Spell, ...]:
    """The stretches between an event that says so and the one that takes it back, or the end of the sitting."""
    found: list[Spell] = []
    open_ones: dict[str, Event] = {}
    for event in history.events(kinds=("throttle", "pressure", "end", *SITTINGS)):
        if event.kind in ("throttle", "pressure"):
            about, _ = _about(event)
            if about in open_ones:
                found.append(_spell(open_ones.pop(about), event, clock))
            if _is_bad(event):
                open_ones[about] = event
        else:
            found += [_spell(begun, event, clock) for begun in open_ones.values()]
            open_ones = {}
    last = history.last("step")
    if last is not None:
        found += [_spell(begun, last, clock) for begun in open_ones.values()]
    return tuple(found[:MOST])


def _about(event: Event) -> tuple[str, str]:
    if event.kind == "pressure":
        return "pressure", str(event.get("level") or "")
    return str(event.get("about") or "heat"), str(event.get("state") or "")


def _is_bad(event: Event) -> bool:
    about, level = _about(event)
    return level not in _GOOD.get(about, ())


def _spell(begun: Event, ended: Event, clock: WorkClock) -> Spell:
    about, level = _about(begun)
    since = begun.get("since_step")
    first = since if isinstance(since, int) and not isinstance(since, bool) and since <= begun.step else begun.step
    return Spell(
        about=about,
        level=level,
        reason=str(begun.get("reason") or ""),
        from_step=first,
        to_step=max(begun.step, ended.step),
        from_seconds=clock.at(begun.time),
        to_seconds=max(clock.at(begun.time), clock.at(ended.time)),
    )
