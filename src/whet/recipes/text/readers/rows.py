"""Rows of JSON lines, CSV and TSV files, read line by line.

Files are never loaded into memory as a whole. An invalid byte or an unclosed quote affects one row only: reading
continues with the next row.
"""

import csv
import io
import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from whet.base.errors import UsageError, WhetError
from whet.run.disk import open_regular_file

SplitName = Literal["train", "val", "test"]
FileFormat = Literal["JSON lines", "CSV", "TSV", "Parquet", "Arrow", "class folders"]

MAX_ROW_BYTES = 64 * 1024**2
"""The maximum size of a line. Reading a longer line could exhaust memory."""
UTF8_BOM = b"\xef\xbb\xbf"
_MAX_RECORD_LINES = 1_000
"""The maximum number of lines of a CSV record. A longer record is assumed to have an unclosed quote."""
_SKIP_BYTES = 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """A defect of the row itself, as opposed to its text or label."""

    kind: str
    """The kind of defect, a key of `DEFECT_KINDS` (data_report/report.py)."""
    what: str
    """The end of the sentence "row 12 of FILE ..."."""
    got: str
    try_: str
    is_usable: bool = False
    """Whether the cells of the row can be used despite the error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """A file (or a folder of class folders) with rows of one split."""

    path: Path
    format: FileFormat
    split: SplitName | None
    """The split of the rows; None if whet splits them."""
    delimiter: str = ""
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The class names, for each column of class indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """The cells of a row by column; empty if the row has an error that makes it unusable."""

    line: int
    """The line on which the row begins, from 1; in a format without lines, the row number, from 1."""
    cells: dict[str, Any]
    raw: str = ""
    """The unchanged text of the row without its line ending; empty in a format without lines."""
    ending: str = ""
    """The line ending: LF, CRLF, or empty at the end of a file."""
    num_bytes: int = 0
    error: RowError | None = None
    has_bom: bool = False
    """Whether a byte order mark precedes the row."""
    name: str = ""
    """The file name, if each row is a separate file."""


# --- lines of a file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line without its ending."""

    number: int
    text: str
    ending: str
    num_bytes: int
    error: RowError | None = None
    has_bom: bool = False


def read_lines(source: TextSource) -> Iterator[TextLine]:
    """Read every line of a file. Invalid UTF-8 is decoded as U+FFFD and reported as an error of the line."""
    try:
        file = open_regular_file(source.path, follows_links=True)
    except OSError as cause:
        raise UsageError(
            f"cannot read {source.path}", got=cause.strerror, try_="a file that exists and may be read"
        ) from cause
    except WhetError as cause:
        raise UsageError(f"cannot read {source.path}", got=cause.got, try_="a regular file") from None
    offset = number = 0
    with file:
        while data := file.readline(MAX_ROW_BYTES):
            number += 1
            error = None
            size = len(data)
            # readline stopped at its limit: skip the rest of this line piece by piece, without storing it.
            if size == MAX_ROW_BYTES and not data.endswith(b"\n"):
                size += _skip_line(file)
                data = b""
                error = RowError(
                    kind="long", what="is too long", got=f"{size:,} bytes", try_="rows of at most 64 MB, one per line"
                )
            # Only the first line can have a byte order mark.
            has_bom = number == 1 and data.startswith(UTF8_BOM)
            body = data[len(UTF8_BOM) :] if has_bom else data
            ending = "\r\n" if body.endswith(b"\r\n") else "\n" if body.endswith(b"\n") else ""
            body = body[: len(body) - len(ending)]
            try:
                text = body.decode()
            except UnicodeDecodeError as invalid:
                text = body.decode(errors="replace")
                start = invalid.start + (len(UTF8_BOM) if has_bom else 0)
                error = RowError(
                    kind="not-utf8",
                    what="is not UTF-8",
                    got=f"byte 0x{body[invalid.start]:02x} at offset {offset + start}, row {number}",
                    try_=f"iconv -f latin1 -t utf-8 {source.path.name} > utf8-{source.path.name}, "
                    "or whatever its encoding is",
                )
            yield TextLine(number, text, ending, size, error, has_bom)
            offset += size


def _skip_line(file: Any) -> int:
    """Skip the rest of a line and return its length in bytes."""
    skipped = 0
    while piece := file.readline(_SKIP_BYTES):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


# --- JSON lines -------------------------------------------------------------------------------------------------------


def read_json_lines(source: TextSource) -> Iterator[TextRow]:
    """Yield one row from every line that is not blank."""
    for line in read_lines(source):
        if not line.text.strip() and line.error is None:
            continue
        error, cells = line.error, {}
        if error is None:
            try:
                record = json.loads(line.text)
            except (ValueError, RecursionError) as invalid:
                error = _json_error(line.text, invalid)
            else:
                if isinstance(record, dict):
                    cells = record
                else:
                    error = RowError(
                        kind="not-a-row",
                        what="is not an object",
                        got=line.text[:60],
                        try_='{"text": "...", "label": "..."}',
                    )
        yield TextRow(
            line=line.number,
            cells=cells,
            raw=line.text,
            ending=line.ending,
            num_bytes=line.num_bytes,
            error=error,
            has_bom=line.has_bom,
        )


def _json_error(text: str, error: Exception) -> RowError:
    # A line that starts an object but does not end it was truncated. Any other invalid line was never JSON.
    is_truncated = text.lstrip().startswith("{") and not text.rstrip().endswith("}")
    return RowError(
        kind="truncated" if is_truncated else "not-a-row",
        what="is not JSON",
        got=str(error)[:200],
        try_="one object per line",
    )


# --- CSV and TSV ------------------------------------------------------------------------------------------------------


class _Record(NamedTuple):
    """The lines and fields of a row, or its error."""

    lines: list[TextLine]
    fields: list[str]
    error: RowError | None = None


def read_delimited(source: TextSource) -> Iterator[TextRow]:
    """Yield all records after the header."""
    # The csv module's default limit of 128 KB is too low for texts. It can only be set for the whole process.
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _LineBuffer(read_lines(source))
    header: list[str] = []
    has_bom = False
    while (record := _read_record(lines, delimiter=source.delimiter, width=len(header))) is not None:
        first, last = record.lines[0], record.lines[-1]
        has_bom = has_bom or first.has_bom
        # Blank lines are not rows.
        if not record.fields and record.error is None:
            continue
        if not header:
            header = _validate_header(record, source=source)
            continue
        error = record.error or _check_field_count(record.fields, header)
        is_usable = error is None or error.is_usable
        yield TextRow(
            line=first.number,
            cells=dict(zip(header, record.fields, strict=False)) if is_usable else {},
            raw="".join(line.text + line.ending for line in record.lines).removesuffix(last.ending),
            ending=last.ending,
            num_bytes=sum(line.num_bytes for line in record.lines),
            error=error,
            has_bom=has_bom,
        )
        has_bom = False


def read_header(source: TextSource) -> tuple[list[str], list[str]]:
    """Return the fields of the header as written, and the column names derived from them."""
    lines = _LineBuffer(read_lines(source))
    while (record := _read_record(lines, delimiter=source.delimiter, width=0)) is not None:
        if record.fields or record.error is not None:
            return record.fields, _validate_header(record, source=source)
    return [], []


def write_record(fields: Sequence[str], *, delimiter: str) -> str:
    """Format a record as a line without a line ending, quoted where necessary."""
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="").writerow(fields)
    return out.getvalue()


class _LineBuffer:
    """An iterator over lines to which lines can be returned."""

    def __init__(self, lines: Iterator[TextLine]) -> None:
        self._lines = lines
        self._returned: deque[TextLine] = deque()

    def next(self) -> TextLine | None:
        return self._returned.popleft() if self._returned else next(self._lines, None)

    def put_back(self, lines: list[TextLine]) -> None:
        self._returned.extendleft(reversed(lines))


def _read_record(lines: _LineBuffer, *, delimiter: str, width: int) -> _Record | None:
    first = lines.next()
    if first is None:
        return None
    # Use str.split for lines without quotes, which are most lines: it is much faster than the csv module.
    plain = first.text.split(delimiter) if first.text else []
    if first.error is not None or '"' not in first.text:
        return _Record([first], plain, first.error)
    if delimiter == "\t" and len(plain) == width and not all(map(_is_quoted_or_plain, plain)):
        # Many TSV files do not use quoting, so a quote is part of the text.
        return _Record([first], plain)
    consumed = [first]

    def feed() -> Iterator[str]:
        yield first.text + first.ending
        num_bytes = first.num_bytes
        while len(consumed) < _MAX_RECORD_LINES and num_bytes < MAX_ROW_BYTES and (line := lines.next()) is not None:
            consumed.append(line)
            num_bytes += line.num_bytes
            yield line.text + line.ending

    try:
        fields = next(csv.reader(feed(), delimiter=delimiter, strict=True))
    except csv.Error as error:
        # An unclosed quote invalidates only its first line: put back the lines that the parser consumed.
        lines.put_back(consumed[1:])
        return _Record([first], [], _csv_error(str(error)))
    return _Record(consumed, fields, next((line.error for line in consumed if line.error is not None), None))


def _is_quoted_or_plain(cell: str) -> bool:
    return not cell.startswith('"') or (len(cell) > 1 and cell.endswith('"'))


def _csv_error(reason: str) -> RowError:
    return RowError(
        kind="truncated",
        what="cannot be parsed",
        got=reason,
        try_='quotes doubled inside a quoted text, and a closing quote: "a ""b"" c",label; or JSON lines',
    )


def _validate_header(record: _Record, *, source: TextSource) -> list[str]:
    if record.error is not None:
        error = record.error
        raise UsageError(f"the header of {source.path} {error.what}", got=error.got, try_=error.try_)
    names = [name.strip() for name in record.fields]
    known = [name.lower() for name in names if name]
    if len(set(known)) < len(known):
        raise UsageError(f"{source.path} has a duplicate column", got=", ".join(known)[:200], try_="unique names")
    return [name or f"column {number}" for number, name in enumerate(names, start=1)]


def _check_field_count(fields: list[str], header: list[str]) -> RowError | None:
    if len(fields) > len(header) and any(cell.strip() for cell in fields[len(header) :]):
        return RowError(
            kind="columns",
            what="has more fields than the header",
            got=str(fields[len(header) :])[:200],
            try_='quotes around texts with commas: "a text, with a comma",label',
        )
    if len(fields) < len(header):
        return RowError(
            kind="truncated",
            what="has fewer fields than the header",
            got=f"{len(fields)} of {len(header)}",
            try_="the complete row",
            is_usable=True,
        )
    return None
