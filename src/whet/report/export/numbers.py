"""Which numbers does an event carry, and what are they called elsewhere?"""

from collections.abc import Iterable, Iterator

from whet.base.errors import WhetError
from whet.run.event import Event, as_number

KINDS = ("step", "eval", "health")
"""The kinds of events that carry curves."""

_PREFIXES = {"step": "train", "eval": "eval", "health": "health"}
_EXACT = 2**53
"""Whole numbers up to here are the same in every program."""


def numbers(event: Event) -> dict[str, int | float]:
    """Every number of an event; one in a map is named "seconds/data"."""
    found: dict[str, int | float] = {}
    for name, value in event.fields.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                _add(found, f"{name}/{inner}", item)
        else:
            _add(found, name, value)
    return found


def named_numbers(event: Event) -> dict[str, float]:
    """The same under the names that dashboards group by: train/loss, seconds/data, eval/accuracy.

    >>> named_numbers(Event(kind="step", time=1.0, step=3, fields={"loss": 0.5, "seconds": {"data": 0.25}}))
    {'train/loss': 0.5, 'seconds/data': 0.25}
    """
    return {outside_name(event.kind, name): float(value) for name, value in numbers(event).items()}


def outside_name(kind: str, field: str) -> str:
    """What a field of a kind of events is called outside of the run folder.

    >>> outside_name("step", "loss"), outside_name("step", "seconds/data"), outside_name("health", "memory/process")
    ('train/loss', 'seconds/data', 'health/memory/process')
    """
    field = readable(field)
    return field if kind == "step" and "/" in field else f"{_PREFIXES[kind]}/{field}"


def readable(name: str) -> str:
    """A name that can be written as UTF-8: JSON may hold halves of characters, which cannot."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


def without_remade(events: Iterable[Event]) -> Iterator[Event]:
    """The events of a history, without readings of the machine at steps that were made again after a resume."""
    step = None
    for event in events:
        if event.kind == "step":
            step = event.step
        if event.kind != "health" or event.step == step:
            yield event


def step_of(event: Event) -> int:
    """The step of an event, where it is one that other programs can hold."""
    if 0 <= event.step < 2**63:
        return event.step
    raise WhetError(
        "the log of the run is damaged",
        got=f"step {str(event.step)[:40]}",
        try_="restore events.jsonl from a copy",
    )


def _add(found: dict[str, int | float], name: str, value: object) -> None:
    if type(value) is float or (type(value) is int and -_EXACT <= value <= _EXACT):
        found[name] = value
    elif (number := as_number(value)) is not None:
        found[name] = number
