"""What do the tables of a run look like as CSV? UTF-8, a header, `.` in numbers, nothing rounded."""

import csv
import io
import itertools
from collections.abc import Iterator

from whet.report.export.tables import Row, Table, find_tables, read_rows
from whet.run.events import History

_ROWS_AT_ONCE = 2_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_files(history: History) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The files by name, each as pieces of bytes."""
    for table in find_tables(history):
        yield f"{table.name}.csv", _pieces(history, table)


def _pieces(history: History, table: Table) -> Iterator[bytes]:
    head = io.StringIO()
    csv.writer(head, lineterminator="\n").writerow(_inert(name) for name in table.header)
    yield head.getvalue().encode()
    rows = read_rows(history, table)
    while lines := [_line(row) for row in itertools.islice(rows, _ROWS_AT_ONCE)]:
        yield "".join(lines).encode()


def _line(row: Row) -> str:
    # repr: the shortest text that gives the same number back. What an event lacks is an empty cell.
    return ",".join(["" if value is None else repr(value) for value in row]) + "\n"


def _inert(name: str) -> str:
    """A name that a spreadsheet takes for a name, and never for a formula to work out."""
    return f"'{name}" if name.startswith(_FORMULA) else name
