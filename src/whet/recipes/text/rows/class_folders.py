"""How is a folder of class folders read? Each file in it is a text, and its folder's name the label."""

from collections.abc import Iterator
from pathlib import Path

from whet.recipes.text.rows.row import MOST_ROW_BYTES, Fault, Row, Source
from whet.run.plain_file import open_plain

_BOM = b"\xef\xbb\xbf"
_TEXT_ENDINGS = {"", ".txt", ".text", ".md"}


def class_folders(folder: Path) -> list[Path]:
    """The folders in a folder that hold text files; none, if that is not what it is."""
    below = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [child for child in below if next(_text_files(child), None) is not None]


def read_class_folders(source: Source) -> Iterator[Row]:
    """Every file of every class folder, in the order of their names."""
    number = 0
    for folder in class_folders(source.path):
        for file in sorted(_text_files(folder)):
            number += 1
            yield _read_file(file, number=number)


def file_names(folder: Path) -> list[str]:
    """The names of the rows of a folder, in their order."""
    return [f"{below.name}/{file.name}" for below in class_folders(folder) for file in sorted(_text_files(below))]


def _text_files(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.suffix.lower() in _TEXT_ENDINGS and not file.name.startswith(".") and file.is_file():
            yield file


def _read_file(file: Path, *, number: int) -> Row:
    name = f"{file.parent.name}/{file.name}"
    with open_plain(file, follows_links=True) as opened:
        data = opened.read(MOST_ROW_BYTES + 1)
    fault = None
    if len(data) > MOST_ROW_BYTES:
        fault = Fault(kind="long", what="is too long", got=f"over {MOST_ROW_BYTES:,} bytes", try_="shorter texts")
    body = data.removeprefix(_BOM)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        text = body.decode(errors="replace")
        fault = fault or Fault(
            kind="not-utf8",
            what="is not UTF-8",
            got=f"byte 0x{body[error.start]:02x} at offset {error.start + len(data) - len(body)}",
            try_=f"iconv -f latin1 -t utf-8 {file.name}, or whatever it was written in",
        )
    return Row(
        line=number,
        cells={} if fault else {"text": text, "label": file.parent.name},
        num_bytes=len(data),
        fault=fault,
        has_bom=len(body) < len(data),
        name=name,
    )
