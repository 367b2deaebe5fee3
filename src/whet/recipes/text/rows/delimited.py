"""How are CSV and TSV read? Record by record, and a quote that is never closed swallows no row behind it."""

import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.recipes.text.rows.lines import Line, read_lines
from whet.recipes.text.rows.row import MOST_ROW_BYTES, Fault, Row, Source

_MOST_LINES = 1_000
"""Of one record: a quoted text with more line breaks is a quote that was never closed."""


class _Record(NamedTuple):
    """One row's lines and fields, or what is wrong with it."""

    lines: list[Line]
    fields: list[str]
    fault: Fault | None = None


def read_delimited(source: Source) -> Iterator[Row]:
    """Every record behind the header."""
    # The limit belongs to the process; ours is on the line.
    csv.field_size_limit(MOST_ROW_BYTES)
    lines = _Lines(read_lines(source))
    header: list[str] = []
    has_bom = False
    while (record := _read_record(lines, delimiter=source.delimiter, width=len(header))) is not None:
        first, last = record.lines[0], record.lines[-1]
        has_bom = has_bom or first.has_bom
        if not record.fields and record.fault is None:
            continue
        if not header:
            header = _checked_header(record, source=source)
            continue
        fault = record.fault or _miscounted(record.fields, header)
        is_usable = fault is None or fault.is_whole
        yield Row(
            line=first.number,
            cells=dict(zip(header, record.fields, strict=False)) if is_usable else {},
            raw="".join(line.text + line.ending for line in record.lines).removesuffix(last.ending),
            ending=last.ending,
            num_bytes=sum(line.num_bytes for line in record.lines),
            fault=fault,
            has_bom=has_bom,
        )
        has_bom = False


def read_header(source: Source) -> tuple[list[str], list[str]]:
    """The fields of the header as they stand, and the names of the cells below them."""
    lines = _Lines(read_lines(source))
    while (record := _read_record(lines, delimiter=source.delimiter, width=0)) is not None:
        if record.fields or record.fault is not None:
            return record.fields, _checked_header(record, source=source)
    return [], []


def write_record(fields: Sequence[str], *, delimiter: str) -> str:
    """A record as a line, quoted where it must be."""
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="").writerow(fields)
    return out.getvalue()


class _Lines:
    """Lines that can be put back."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._again: deque[Line] = deque()

    def next(self) -> Line | None:
        return self._again.popleft() if self._again else next(self._lines, None)

    def put_back(self, lines: list[Line]) -> None:
        self._again.extendleft(reversed(lines))


def _read_record(lines: _Lines, *, delimiter: str, width: int) -> _Record | None:
    first = lines.next()
    if first is None:
        return None
    plain = first.text.split(delimiter) if first.text else []
    if first.fault is not None or '"' not in first.text:
        return _Record([first], plain, first.fault)
    if delimiter == "\t" and len(plain) == width and not all(map(_is_quoted_or_plain, plain)):
        # Tabs alone separate here: a quote is a quote.
        return _Record([first], plain)
    pulled = [first]

    def feed() -> Iterator[str]:
        yield first.text + first.ending
        num_bytes = first.num_bytes
        while len(pulled) < _MOST_LINES and num_bytes < MOST_ROW_BYTES and (line := lines.next()) is not None:
            pulled.append(line)
            num_bytes += line.num_bytes
            yield line.text + line.ending

    try:
        fields = next(csv.reader(feed(), delimiter=delimiter, strict=True))
    except csv.Error as error:
        lines.put_back(pulled[1:])
        return _Record([first], [], _unreadable(str(error)))
    return _Record(pulled, fields, next((line.fault for line in pulled if line.fault is not None), None))


def _is_quoted_or_plain(field: str) -> bool:
    return not field.startswith('"') or (len(field) > 1 and field.endswith('"'))


def _unreadable(reason: str) -> Fault:
    return Fault(
        kind="truncated",
        what="cannot be read",
        got=reason,
        try_='quotes doubled inside a quoted text and closed behind it: "a ""b"" c",label; or JSON lines',
    )


def _checked_header(record: _Record, *, source: Source) -> list[str]:
    if record.fault is not None:
        fault = record.fault
        raise UsageError(f"the header of {source.path} {fault.what}", got=fault.got, try_=fault.try_)
    names = [name.strip() for name in record.fields]
    known = [name.lower() for name in names if name]
    if len(set(known)) < len(known):
        raise UsageError(
            f"{source.path} has a column twice", got=", ".join(known)[:200], try_="one column of each name"
        )
    return [name or f"column {number}" for number, name in enumerate(names, start=1)]


def _miscounted(fields: list[str], header: list[str]) -> Fault | None:
    if len(fields) > len(header) and any(field.strip() for field in fields[len(header) :]):
        return Fault(
            kind="columns",
            what="has more fields than the header",
            got=str(fields[len(header) :])[:200],
            try_='quotes around texts with commas: "a text, with a comma",label',
        )
    if len(fields) < len(header):
        return Fault(
            kind="truncated",
            what="has fewer fields than the header",
            got=f"{len(fields)} of {len(header)}",
            try_="the whole row",
            is_whole=True,
        )
    return None
