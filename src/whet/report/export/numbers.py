"""Which numbers does an event carry, and what are they called elsewhere?"""

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
    prefix = _PREFIXES[event.kind]
    is_grouped = event.kind == "step"
    return {
        name if is_grouped and "/" in name else f"{prefix}/{name}": float(value)
        for name, value in numbers(event).items()
    }


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
