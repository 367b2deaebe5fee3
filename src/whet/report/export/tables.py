"""Which tables does a run make, and what are their columns and rows?"""

from collections.abc import Iterator
from dataclasses import dataclass

from whet.base.errors import WhetError
from whet.report.export.numbers import numbers, readable, step_of
from whet.run.events import History

_ALWAYS = ("steps", "evaluations")
_KINDS = {"steps": "step", "evaluations": "eval", "health": "health"}
_MOST_COLUMNS = 4_096

Row = tuple[int | float | None, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of event, a row each: first its step and its time (unix seconds), then its numbers by name."""

    name: str
    kind: str
    columns: tuple[str, ...]
    """The numbers; `step` and `time` come before them."""

    @property
    def header(self) -> tuple[str, ...]:
        """The name of every column."""
        return ("step", "time", *map(readable, self.columns))


def find_tables(history: History) -> tuple[Table, ...]:
    """The tables of a run; one that is not in every run is left out where it has no rows."""
    found = (Table(name=name, kind=kind, columns=_columns(history, kind)) for name, kind in _KINDS.items())
    return tuple(table for table in found if table.columns or table.name in _ALWAYS)


def read_rows(history: History, table: Table) -> Iterator[Row]:
    """The rows of a table in the order of the run; only what counts, and None where an event lacks a number."""
    for event in history.events(kinds=(table.kind,)):
        values = numbers(event)
        yield (step_of(event), event.time, *(values.get(name) for name in table.columns))


def _columns(history: History, kind: str) -> tuple[str, ...]:
    # The index knows them: millions of steps need not be read twice.
    names: dict[str, None] = {}
    for block in history.counted_blocks():
        names.update((field.removeprefix(f"{kind}/"), None) for field in block.fields if field.startswith(f"{kind}/"))
        if len(names) > _MOST_COLUMNS:
            raise WhetError(
                "the run has too many different numbers for a table",
                got=f"more than {_MOST_COLUMNS:,} names in its {kind} events",
                try_="--to tensorboard",
            )
    return tuple(name for name in names if name not in ("step", "time"))
