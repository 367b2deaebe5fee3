"""What do the tables of a run look like as Parquet? A file each, every number a float64 but the step."""

import importlib
import io
import itertools
from collections.abc import Iterator
from typing import Any

from whet.base.errors import WhetError
from whet.report.export.tables import Table, find_tables, read_rows
from whet.run.events import History

_ROWS_OF_A_GROUP = 32_768


def parquet_files(history: History) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The files by name, each as pieces of bytes."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise WhetError(
            "Parquet files need pyarrow", got="it is not installed", try_="pip install 'whet[parquet]'; or --to csv"
        ) from None
    for table in find_tables(history):
        yield f"{table.name}.parquet", _pieces(history, table, arrow=arrow, parquet=parquet)


def _pieces(history: History, table: Table, *, arrow: Any, parquet: Any) -> Iterator[bytes]:
    types = [arrow.int64(), *(arrow.float64() for _ in table.header[1:])]
    schema = arrow.schema(list(zip(table.header, types, strict=True)))
    sink = _Sink()
    rows = read_rows(history, table)
    with parquet.ParquetWriter(sink, schema) as writer:
        # One group after the other: memory holds one of them, however long the run is.
        while group := list(itertools.islice(rows, _ROWS_OF_A_GROUP)):
            columns = [
                arrow.array([row[place] for row in group], type=type_, from_pandas=False)
                for place, type_ in enumerate(types)
            ]
            writer.write_table(arrow.Table.from_arrays(columns, schema=schema))
            yield sink.take()
    yield sink.take()


class _Sink(io.RawIOBase):
    """A file that is written to and emptied now and then."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._taken = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._held += data
        return len(data)

    def tell(self) -> int:
        return self._taken + len(self._held)

    def take(self) -> bytes:
        """What was written since the last time."""
        taken = bytes(self._held)
        self._taken += len(taken)
        self._held.clear()
        return taken
