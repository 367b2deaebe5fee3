"""Rows of JSON lines, CSV and TSV files, decoded line by line."""

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
"""A longer line is no row, and reading it whole could take all memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """What is wrong with a row itself; `is_whole` rows can still be used."""

    kind: str
    """The kind of finding in a data report."""
    what: str
    """Follows "row 12 of FILE"."""
    got: str
    try_: str
    is_whole: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """A file (or a folder of class folders) that holds rows of one part; None: of all parts, to be split."""

    path: Path
    form: FileFormat
    part: SplitName | None
    delimiter: str = ""
    class_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of a column whose numbers stand for names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRow:
    """One row: its cells by column, or the fault that left none."""

    line: int
    """Where it begins, counted from 1; in a form without lines the row's own number."""
    cells: dict[str, Any]
    raw: str = ""
    """As it stands in the file, without its line end; empty where a form has no lines."""
    ending: str = ""
    """`\\n`, `\\r\\n`, or nothing at the end of a file."""
    num_bytes: int = 0
    fault: RowError | None = None
    has_bom: bool = False
    """A byte order mark stands before it."""
    name: str = ""
    """Of the file, where a row is a file."""


_UTF8_BOM = b"\xef\xbb\xbf"
_SKIPPED_PIECE = 1024**2


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line without its end."""

    number: int
    text: str
    ending: str
    num_bytes: int
    fault: RowError | None = None
    has_bom: bool = False


def read_lines(source: TextSource) -> Iterator[TextLine]:
    """Every line of a file; what is not UTF-8 is shown as U+FFFD and carries its fault."""
    try:
        file = open_regular_file(source.path, follows_links=True)
    except OSError as error:
        raise UsageError(
            f"cannot read {source.path}", got=error.strerror, try_="a file that exists and may be read"
        ) from error
    except WhetError as error:
        raise UsageError(f"cannot read {source.path}", got=error.got, try_="an ordinary file") from None
    offset = 0
    with file:
        number = 0
        while data := file.readline(MAX_ROW_BYTES):
            number += 1
            fault = None
            size = len(data)
            if size == MAX_ROW_BYTES and not data.endswith(b"\n"):
                size += _skip_line(file)
                data = b""
                fault = RowError(
                    kind="long", what="is too long", got=f"{size:,} bytes", try_="rows of at most 64 MB, one on a line"
                )
            has_bom = number == 1 and data.startswith(_UTF8_BOM)
            body = data[len(_UTF8_BOM) :] if has_bom else data
            ending = "\r\n" if body.endswith(b"\r\n") else "\n" if body.endswith(b"\n") else ""
            body = body[: len(body) - len(ending)]
            try:
                text = body.decode()
            except UnicodeDecodeError as error:
                text = body.decode(errors="replace")
                start = error.start + (len(_UTF8_BOM) if has_bom else 0)
                fault = RowError(
                    kind="not-utf8",
                    what="is not UTF-8",
                    got=f"byte 0x{body[error.start]:02x} at offset {offset + start}, row {number}",
                    try_=f"iconv -f latin1 -t utf-8 {source.path.name} > utf8-{source.path.name}, "
                    "or whatever it was written in",
                )
            yield TextLine(number, text, ending, size, fault, has_bom)
            offset += size


def _skip_line(file: object) -> int:
    """Passes over the rest of a line; its bytes."""
    skipped = 0
    while piece := file.readline(_SKIPPED_PIECE):  # type: ignore[attr-defined]
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


_MAX_RECORD_LINES = 1_000
"""Of one record: a quoted text with more line breaks is a quote that was never closed."""


class _Record(NamedTuple):
    """One row's lines and fields, or what is wrong with it."""

    lines: list[TextLine]
    fields: list[str]
    fault: RowError | None = None


def read_delimited(source: TextSource) -> Iterator[TextRow]:
    """Every record behind the header."""
    # The limit belongs to the process; ours is on the line.
    csv.field_size_limit(MAX_ROW_BYTES)
    lines = _LineBuffer(read_lines(source))
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
        fault = record.fault or _check_field_count(record.fields, header)
        is_usable = fault is None or fault.is_whole
        yield TextRow(
            line=first.number,
            cells=dict(zip(header, record.fields, strict=False)) if is_usable else {},
            raw="".join(line.text + line.ending for line in record.lines).removesuffix(last.ending),
            ending=last.ending,
            num_bytes=sum(line.num_bytes for line in record.lines),
            fault=fault,
            has_bom=has_bom,
        )
        has_bom = False


def read_header(source: TextSource) -> tuple[list[str], list[str]]:
    """The fields of the header as they stand, and the names of the cells below them."""
    lines = _LineBuffer(read_lines(source))
    while (record := _read_record(lines, delimiter=source.delimiter, width=0)) is not None:
        if record.fields or record.fault is not None:
            return record.fields, _checked_header(record, source=source)
    return [], []


def write_record(fields: Sequence[str], *, delimiter: str) -> str:
    """A record as a line, quoted where it must be."""
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="").writerow(fields)
    return out.getvalue()


class _LineBuffer:
    """Lines that can be put back."""

    def __init__(self, lines: Iterator[TextLine]) -> None:
        self._lines = lines
        self._again: deque[TextLine] = deque()

    def next(self) -> TextLine | None:
        return self._again.popleft() if self._again else next(self._lines, None)

    def put_back(self, lines: list[TextLine]) -> None:
        self._again.extendleft(reversed(lines))


def _read_record(lines: _LineBuffer, *, delimiter: str, width: int) -> _Record | None:
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
        while len(pulled) < _MAX_RECORD_LINES and num_bytes < MAX_ROW_BYTES and (line := lines.next()) is not None:
            pulled.append(line)
            num_bytes += line.num_bytes
            yield line.text + line.ending

    try:
        fields = next(csv.reader(feed(), delimiter=delimiter, strict=True))
    except csv.Error as error:
        lines.put_back(pulled[1:])
        return _Record([first], [], _csv_error(str(error)))
    return _Record(pulled, fields, next((line.fault for line in pulled if line.fault is not None), None))


def _is_quoted_or_plain(field: str) -> bool:
    return not field.startswith('"') or (len(field) > 1 and field.endswith('"'))


def _csv_error(reason: str) -> RowError:
    return RowError(
        kind="truncated",
        what="cannot be read",
        got=reason,
        try_='quotes doubled inside a quoted text and closed behind it: "a ""b"" c",label; or JSON lines',
    )


def _checked_header(record: _Record, *, source: TextSource) -> list[str]:
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


def _check_field_count(fields: list[str], header: list[str]) -> RowError | None:
    if len(fields) > len(header) and any(field.strip() for field in fields[len(header) :]):
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
            try_="the whole row",
            is_whole=True,
        )
    return None


def read_json_lines(source: TextSource) -> Iterator[TextRow]:
    """Every line that is not blank."""
    for line in read_lines(source):
        if not line.text.strip() and line.fault is None:
            continue
        fault, cells = line.fault, {}
        if fault is None:
            try:
                record = json.loads(line.text)
            except (ValueError, RecursionError) as error:
                fault = _json_error(line.text, error)
            else:
                if isinstance(record, dict):
                    cells = record
                else:
                    fault = RowError(
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
            fault=fault,
            has_bom=line.has_bom,
        )


def _json_error(text: str, error: Exception) -> RowError:
    """A line that stops before its object is closed was cut; any other was never JSON."""
    is_cut = text.lstrip().startswith("{") and not text.rstrip().endswith("}")
    return RowError(
        kind="truncated" if is_cut else "not-a-row",
        what="is not JSON",
        got=str(error)[:200],
        try_="one object per line",
    )
