"""What happened in a run, told on a time line?"""

from typing import Literal

from whet.base.record import Record
from whet.base.units import show_bytes
from whet.report.parts.work_clock import WorkClock
from whet.report.sentences import sentence
from whet.report.summary import Happening
from whet.run.event import HAPPENINGS, Event
from whet.run.events import History

MOST = 300
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
_QUIET = ("start", "plan", "end", "checkpoint")


class Moment(Record):
    """One happening."""

    kind: str
    step: int
    time: float
    """Unix seconds."""
    seconds: float
    """Of work until then."""
    tone: Tone
    words: str


def moments(history: History, clock: WorkClock) -> tuple[tuple[Moment, ...], int]:
    """The moments of a run in their order, and how many in the middle were left out."""
    kinds = {kind for block in history.layout.blocks for kind in block.kinds} & {*HAPPENINGS, *_QUIET}
    first: list[Moment] = []
    for event in history.events(kinds=kinds):
        if len(first) >= MOST // 2:
            break
        first.append(_moment(event, clock))
    total = sum(block.kinds.get(kind, 0) for block in history.layout.blocks for kind in kinds)
    last: list[Moment] = []
    for event in history.backwards(kinds=kinds):
        if len(last) >= min(MOST // 2, total - len(first)):
            break
        last.append(_moment(event, clock))
    return (*first, *reversed(last)), max(0, total - len(first) - len(last))


def _moment(event: Event, clock: WorkClock) -> Moment:
    tone, words = _told(event)
    return Moment(
        kind=event.kind, step=event.step, time=event.time, seconds=clock.at(event.time), tone=tone, words=words[:2000]
    )


def _told(event: Event) -> tuple[Tone, str]:
    if event.kind == "start":
        return "plain", "training began"
    if event.kind == "plan":
        return "plain", str(event.get("changed") or "the plan was made")
    if event.kind == "checkpoint":
        size = event.number("bytes")
        return "good", f"saved {event.get('name') or ''}" + (f", {show_bytes(size)}" if size else "")
    if event.kind == "end":
        state, reason = str(event.get("state") or "done"), event.get("reason")
        tone: Tone = "good" if state == "done" else "bad" if state == "failed" else "plain"
        return tone, f"{state}: {reason}" if reason else state
    tone = _TONES.get(event.kind, "plain")
    if event.kind == "throttle" and event.get("state") == "cool":
        tone = "good"
    if event.kind == "pressure" and event.get("level") in ("normal", "critical"):
        tone = "good" if event.get("level") == "normal" else "bad"
    happening = Happening(kind=event.kind, time=event.time, step=event.step, details=dict(event.fields))
    return tone, sentence(happening)
