"""Which lines does a file hold? Decoded one by one, so that a bad byte spoils its own line and memory stays bounded."""

from collections.abc import Iterator
from dataclasses import dataclass

from whet.base.errors import UsageError, WhetError
from whet.recipes.text.rows.row import MOST_ROW_BYTES, Fault, Source
from whet.run.plain_file import open_plain

_BOM = b"\xef\xbb\xbf"
_SKIPPED_PIECE = 1024**2


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its end."""

    number: int
    text: str
    ending: str
    num_bytes: int
    fault: Fault | None = None
    has_bom: bool = False


def read_lines(source: Source) -> Iterator[Line]:
    """Every line of a file; what is not UTF-8 is shown as U+FFFD and carries its fault."""
    try:
        file = open_plain(source.path, follows_links=True)
    except OSError as error:
        raise UsageError(
            f"cannot read {source.path}", got=error.strerror, try_="a file that exists and may be read"
        ) from error
    except WhetError as error:
        raise UsageError(f"cannot read {source.path}", got=error.got, try_="an ordinary file") from None
    offset = 0
    with file:
        number = 0
        while data := file.readline(MOST_ROW_BYTES):
            number += 1
            fault = None
            size = len(data)
            if size == MOST_ROW_BYTES and not data.endswith(b"\n"):
                size += _skip_line(file)
                data = b""
                fault = Fault(
                    kind="long", what="is too long", got=f"{size:,} bytes", try_="rows of at most 64 MB, one on a line"
                )
            has_bom = number == 1 and data.startswith(_BOM)
            body = data[len(_BOM) :] if has_bom else data
            ending = "\r\n" if body.endswith(b"\r\n") else "\n" if body.endswith(b"\n") else ""
            body = body[: len(body) - len(ending)]
            try:
                text = body.decode()
            except UnicodeDecodeError as error:
                text = body.decode(errors="replace")
                start = error.start + (len(_BOM) if has_bom else 0)
                fault = Fault(
                    kind="not-utf8",
                    what="is not UTF-8",
                    got=f"byte 0x{body[error.start]:02x} at offset {offset + start}, row {number}",
                    try_=f"iconv -f latin1 -t utf-8 {source.path.name} > utf8-{source.path.name}, "
                    "or whatever it was written in",
                )
            yield Line(number, text, ending, size, fault, has_bom)
            offset += size


def _skip_line(file: object) -> int:
    """Passes over the rest of a line; its bytes."""
    skipped = 0
    while piece := file.readline(_SKIPPED_PIECE):  # type: ignore[attr-defined]
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
