"""What is different between runs, and what came of it?"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from whet.base.errors import UsageError
from whet.base.record import Record
from whet.plan.words import show_value
from whet.report.view import RunView
from whet.run.strict_json import StrictRecord

MOST_RUNS = 12


class Row(Record):
    """One thing, as each run has it; None where a run does not have it."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


class CompareView(StrictRecord):
    """Runs side by side, in the order they were named."""

    runs: tuple[RunView, ...]
    labels: tuple[str, ...]
    """What each run is called here: its name, with a number where two have the same."""
    settings: tuple[Row, ...]
    """Of the plans; those that differ first."""
    config: tuple[Row, ...]
    environment: tuple[Row, ...]


def compare_view(views: Sequence[RunView]) -> CompareView:
    """The comparison of runs; between two and a dozen can be told apart."""
    if not 2 <= len(views) <= MOST_RUNS:
        raise UsageError(
            "that many runs cannot be compared", got=f"{len(views)} runs", try_=f"between 2 and {MOST_RUNS} of them"
        )
    return CompareView(
        runs=tuple(views),
        labels=_labels([view.name for view in views]),
        settings=_rows(views, lambda view: {s.name: show_value(s.value) for s in view.report.settings}),
        config=_rows(views, lambda view: _flat(view.origin.config)),
        environment=_rows(views, _environment),
    )


def _labels(names: Sequence[str]) -> tuple[str, ...]:
    counted = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(name if count == 1 else f"{name} ({count})" for name, count in zip(names, counted, strict=True))


def _rows(views: Sequence[RunView], told: Callable[[RunView], Mapping[str, str]]) -> tuple[Row, ...]:
    each = [told(view) for view in views]
    names = dict.fromkeys(name for one in each for name in one)
    rows = []
    for name in names:
        values = tuple(one.get(name) for one in each)
        rows.append(Row(name=name, values=values, differs=len(set(values)) > 1))
    return tuple(sorted(rows, key=lambda row: not row.differs))


def _flat(config: Mapping[str, Any], above: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[above + name] = json.dumps(value) if isinstance(value, list | tuple) else show_value(value)
    return flat


def _environment(view: RunView) -> dict[str, str]:
    facts = {"machine": view.report.machine, "command": view.origin.command or "from Python"}
    return facts | {"data": (view.origin.data or "unknown")[:12]} | dict(view.origin.versions)
