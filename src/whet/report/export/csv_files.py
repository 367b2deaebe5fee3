"""What do the tables of a run look like as CSV? UTF-8, a header, `.` in numbers, nothing rounded."""

import csv
import io
from collections.abc import Iterator

from whet.report.export.tables import Table, find_tables, read_rows
from whet.run.events import History

_ROWS_AT_ONCE = 2_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_files(history: History) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The files by name, each as pieces of bytes."""
    for table in find_tables(history):
        yield f"{table.name}.csv", _pieces(history, table)


def _pieces(history: History, table: Table) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_inert(name) for name in table.header)
    for number, row in enumerate(read_rows(history, table)):
        # repr: the shortest text that gives the same number back. What an event lacks is an empty cell.
        writer.writerow("" if value is None else repr(value) for value in row)
        if number % _ROWS_AT_ONCE == 0:
            yield text.getvalue().encode()
            text.seek(0)
            text.truncate()
    yield text.getvalue().encode()


def _inert(name: str) -> str:
    """A name that a spreadsheet takes for a name, and never for a formula to work out."""
    return f"'{name}" if name.startswith(_FORMULA) else name
