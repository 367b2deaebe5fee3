"""The numeric fields of events by name, and tables with one row per event."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from whet.base.errors import WhetError
from whet.base.units import valid_utf8
from whet.run.event import Event, as_number, flatten_fields
from whet.run.events import History

# Event kinds that have curves.
EXPORTED_KINDS = ("step", "eval", "health")

ExportRow = tuple[int | float | None, ...]

_PREFIXES = {"step": "train", "eval": "eval", "health": "health"}
# Larger integers are not exact as floats.
_EXACT = 2**53
_REQUIRED_TABLES = ("steps", "evaluations")
_TABLE_KINDS = {"steps": "step", "evaluations": "eval", "health": "health"}
_MAX_COLUMNS = 4_096


@dataclass(frozen=True, slots=True)
class ExportTable:
    """A table with one row per event of a kind. Its columns are step, time (unix seconds) and the numeric fields."""

    name: str
    kind: str
    columns: tuple[str, ...]
    """Names of the numeric fields, whose columns follow `step` and `time`."""

    @property
    def header(self) -> tuple[str, ...]:
        return ("step", "time", *map(valid_utf8, self.columns))


def find_tables(history: History) -> tuple[ExportTable, ...]:
    """Return the tables of a run. The health table is omitted if it has no rows."""
    tables = (
        ExportTable(name=name, kind=kind, columns=_table_columns(history, kind)) for name, kind in _TABLE_KINDS.items()
    )
    return tuple(table for table in tables if table.columns or table.name in _REQUIRED_TABLES)


def read_rows(history: History, table: ExportTable) -> Iterator[ExportRow]:
    """Yield the rows of a table in order, without superseded events. None marks a missing number."""
    for event in history.events(kinds=(table.kind,)):
        values = event_numbers(event)
        yield (checked_step(event), event.time, *(values.get(name) for name in table.columns))


def event_numbers(event: Event) -> dict[str, int | float]:
    """Return all numeric fields of an event by name. A number in a nested map has a name such as "seconds/data"."""
    numbers: dict[str, int | float] = {}
    for name, value in flatten_fields(event.fields):
        if type(value) is float or (type(value) is int and -_EXACT <= value <= _EXACT):
            numbers[name] = value
        elif (number := as_number(value)) is not None:
            numbers[name] = number
    return numbers


def named_event_numbers(event: Event) -> dict[str, float]:
    """Return the numeric fields of an event by their exported names, such as train/loss or eval/accuracy.

    >>> named_event_numbers(Event(kind="step", time=1.0, step=3, fields={"loss": 0.5, "seconds": {"data": 0.25}}))
    {'train/loss': 0.5, 'seconds/data': 0.25}
    """
    return {export_name(event.kind, name): float(value) for name, value in event_numbers(event).items()}


def export_name(kind: str, field: str) -> str:
    """Return the exported name of a field. Dashboards group names by the part before the slash.

    >>> export_name("step", "loss"), export_name("step", "seconds/data"), export_name("health", "memory/process")
    ('train/loss', 'seconds/data', 'health/memory/process')
    """
    field = valid_utf8(field)
    return field if kind == "step" and "/" in field else f"{_PREFIXES[kind]}/{field}"


def without_repeated_health(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, without health readings at steps that were repeated after a resume."""
    step = None
    for event in events:
        if event.kind == "step":
            step = event.step
        if event.kind != "health" or event.step == step:
            yield event


def checked_step(event: Event) -> int:
    """Return the step of an event. Raise WhetError if it is negative or too large for other programs."""
    if 0 <= event.step < 2**63:
        return event.step
    raise WhetError(
        "the log of the run is damaged",
        got=f"step {str(event.step)[:40]}",
        try_="restore events.jsonl from a copy",
    )


def _table_columns(history: History, kind: str) -> tuple[str, ...]:
    # Take the names from the index, so that millions of steps are not read twice.
    names: dict[str, None] = {}
    for block in history.valid_blocks():
        names.update((field.removeprefix(f"{kind}/"), None) for field in block.fields if field.startswith(f"{kind}/"))
        if len(names) > _MAX_COLUMNS:
            raise WhetError(
                "the run has too many different numbers for a table",
                got=f"more than {_MAX_COLUMNS:,} names in its {kind} events",
                try_="--to tensorboard",
            )
    return tuple(name for name in names if name not in ("step", "time"))
