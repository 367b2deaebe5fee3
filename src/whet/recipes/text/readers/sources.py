"""Find the files behind a path, with the format and split of each."""

import json
import re
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import cast

from whet.base.errors import UsageError, WhetError
from whet.recipes.text.readers.columnar import class_names, read_columnar
from whet.recipes.text.readers.rows import (
    MAX_ROW_BYTES,
    FileFormat,
    RowError,
    SplitName,
    TextRow,
    TextSource,
    read_delimited,
    read_header,
    read_json_lines,
)
from whet.run.disk import open_regular_file, read_regular_file

_BOM_BYTES = b"\xef\xbb\xbf"
_TEXT_ENDINGS = {"", ".txt", ".text", ".md"}


def class_folders(folder: Path) -> list[Path]:
    """The folders in a folder that hold text files; none, if that is not what it is."""
    below = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [child for child in below if next(_text_files(child), None) is not None]


def read_class_folders(source: TextSource) -> Iterator[TextRow]:
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


def _read_file(file: Path, *, number: int) -> TextRow:
    name = f"{file.parent.name}/{file.name}"
    with open_regular_file(file, follows_links=True) as opened:
        data = opened.read(MAX_ROW_BYTES + 1)
    fault = None
    if len(data) > MAX_ROW_BYTES:
        fault = RowError(kind="long", what="is too long", got=f"over {MAX_ROW_BYTES:,} bytes", try_="shorter texts")
    body = data.removeprefix(_BOM_BYTES)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        text = body.decode(errors="replace")
        fault = fault or RowError(
            kind="not-utf8",
            what="is not UTF-8",
            got=f"byte 0x{body[error.start]:02x} at offset {error.start + len(data) - len(body)}",
            try_=f"iconv -f latin1 -t utf-8 {file.name}, or whatever it was written in",
        )
    return TextRow(
        line=number,
        cells={} if fault else {"text": text, "label": file.parent.name},
        num_bytes=len(data),
        fault=fault,
        has_bom=len(body) < len(data),
        name=name,
    )


SPLIT_NAMES: dict[SplitName, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "dev", "valid", "validation"),
    "test": ("test",),
}
"""The names, without ending, that make a file or folder a ready part."""

_SPLIT_OF_NAME = {name: part for part, names in SPLIT_NAMES.items() for name in names}
_SHARD = re.compile(r"[-_]\d+[-_]of[-_]\d+$")
_ROW_ENDINGS = {"", ".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow"}
_HEAD_BYTES = 64 * 1024
_SAMPLED_ROWS = 100
_READERS = {
    "JSON lines": read_json_lines,
    "CSV": read_delimited,
    "TSV": read_delimited,
    "Parquet": read_columnar,
    "Arrow": read_columnar,
    "class folders": read_class_folders,
}


def read_rows(source: TextSource) -> Iterator[TextRow]:
    """The rows of a source, one at a time."""
    return _READERS[source.form](source)


def column_names(source: TextSource) -> list[str]:
    """The columns of a source: its header's, or those of its first rows, each of which may lack some."""
    if source.form in ("CSV", "TSV"):
        return read_header(source)[1]
    several = _SAMPLED_ROWS if source.form == "JSON lines" else 1
    whole = (row for row in read_rows(source) if row.cells)
    return list(dict.fromkeys(str(name) for row in islice(whole, several) for name in row.cells))


def find_sources(path: Path) -> tuple[TextSource, ...]:
    """What a path holds: a file, or a folder in one of the forms that `docs/data.md` lists."""
    if not path.is_dir():
        return (_file_source(path, part=None),)
    try:
        found = (
            _saved_dataset(path, part=None)
            or _split_files(path)
            or _split_files(path / "data")
            or _split_folders(path)
            or _folders_of(path, part=None)
        )
        if found and (len(found) == 1 or any(source.part == "train" for source in found)):
            return tuple(found)
        names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    except OSError as error:
        raise UsageError(f"cannot read {path}", got=error.strerror, try_="a folder that may be read") from error
    raise UsageError(
        f"no training file in {path}",
        got=names,
        try_="a file train.jsonl, train.csv, train.tsv or train.parquet there, or a folder for each class",
    )


def split_name(name: str) -> SplitName | None:
    """The part that a name without ending stands for.

    >>> part_of("Validation"), part_of("train-00000-of-00002"), part_of("reviews")
    ('dev', 'train', None)
    """
    return _SPLIT_OF_NAME.get(_SHARD.sub("", name.lower()))


# --- folders ---------------------------------------------------------------------------------------------------------


def _split_files(folder: Path) -> list[TextSource]:
    """Files named train, dev and test, perhaps in several pieces."""
    if not folder.is_dir():
        return []
    named = [
        (part, file)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in _ROW_ENDINGS and file.is_file() and (part := split_name(file.stem)) is not None
    ]
    for part, files in groupby(sorted(named), key=lambda pair: pair[0]):
        _check_one_format([file for _, file in files], part=part)
    in_order = [(part, file) for wanted in SPLIT_NAMES for part, file in named if part == wanted]
    return [_file_source(file, part=part) for part, file in in_order]


def _check_one_format(files: list[Path], *, part: str) -> None:
    """Two files for one part are pieces of it, or the same rows twice: only pieces say "1 of 2"."""
    if len(files) > 1 and any(not _SHARD.search(file.stem) for file in files):
        names = ", ".join(file.name for file in files)
        raise UsageError(f"several files for {part} in {files[0].parent}", got=names, try_="one of them, or data_paths")


def _split_folders(folder: Path) -> list[TextSource]:
    """Folders named train, dev and test, with class folders or saved datasets inside."""
    named = [(part, child) for child in sorted(folder.iterdir()) if child.is_dir() and (part := split_name(child.name))]
    in_order = [(part, child) for wanted in SPLIT_NAMES for part, child in named if part == wanted]
    return [
        source
        for part, child in in_order
        for source in _saved_dataset(child, part=part) or _folders_of(child, part=part)
    ]


def _folders_of(folder: Path, *, part: SplitName | None) -> list[TextSource]:
    is_one = len(class_folders(folder)) >= 2
    return [TextSource(path=folder, form="class folders", part=part)] if is_one else []


def _saved_dataset(folder: Path, *, part: SplitName | None) -> list[TextSource]:
    """A dataset that Hugging Face's library saved: Arrow files, and JSON that describes them."""
    if (folder / "dataset_dict.json").exists():
        splits = _read_json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list):
            raise UsageError(f"{folder / 'dataset_dict.json'} names no splits", got=str(splits), try_="save it again")
        chosen = [(name, one) for name in map(str, splits) if (one := split_name(name)) and (folder / name).is_dir()]
        in_order = [(name, one) for wanted in SPLIT_NAMES for name, one in chosen if one == wanted]
        return [source for name, one in in_order for source in _saved_dataset(folder / name, part=one)]
    info, state = folder / "dataset_info.json", folder / "state.json"
    if not info.exists() and not state.exists():
        return []
    names = class_names(_read_json(info).get("features")) if info.exists() else {}
    told = _read_json(state) if state.exists() else {}
    if told.get("_indices_data_files") or told.get("_indices_files"):
        raise UsageError(
            f"{folder} holds a selection of rows beside the rows",
            got="state.json names a file of indices",
            try_="dataset.flatten_indices().save_to_disk(...)",
        )
    listed = told.get("_data_files")
    files = (
        [folder / Path(str(entry.get("filename"))).name for entry in listed if isinstance(entry, dict)]
        if isinstance(listed, list)
        else sorted(folder.glob("*.arrow"))
    )
    return [
        TextSource(path=file, form="Arrow", part=part or _split_in_file_name(file.stem), class_names=names)
        for file in files
    ]


def _split_in_file_name(stem: str) -> SplitName | None:
    """The library's cache names files after dataset and split: `name-train-00000-of-00002`."""
    words = _SHARD.sub("", stem).lower().split("-")
    return next((_SPLIT_OF_NAME[word] for word in reversed(words) if word in _SPLIT_OF_NAME), None)


def _read_json(path: Path) -> dict[str, object]:
    try:
        read = json.loads(read_regular_file(path, follows_links=True))
    except (OSError, ValueError, RecursionError, WhetError) as error:
        raise UsageError(f"cannot read {path}", got=str(error).splitlines()[0][:200], try_="save it again") from None
    return cast("dict[str, object]", read) if isinstance(read, dict) else {}


# --- files -----------------------------------------------------------------------------------------------------------


def _file_source(path: Path, *, part: SplitName | None) -> TextSource:
    head = _head(path)
    if head.startswith(b"PAR1"):
        return TextSource(path=path, form="Parquet", part=part)
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return TextSource(path=path, form="Arrow", part=part)
    _check_text_format(path, head)
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text:
        raise UsageError(f"{path} is empty", got="no rows", try_="rows with a text and a label")
    if text[0] in "{[":
        return TextSource(path=path, form="JSON lines", part=part)
    header = text.split("\n", 1)[0]
    delimiter = next((mark for mark in "\t,;|" if mark in header), ",")
    form: FileFormat = "TSV" if delimiter == "\t" else "CSV"
    return TextSource(path=path, form=form, part=part, delimiter=delimiter)


def _head(path: Path) -> bytes:
    try:
        with open_regular_file(path, follows_links=True) as file:
            head = file.read(_HEAD_BYTES)
            # White space in front is passed over, however much there is.
            while head and not head.strip() and (more := file.read(_HEAD_BYTES)):
                head = more
            return head
    except OSError as error:
        raise UsageError(
            f"cannot read {path}", got=error.strerror, try_="a file that exists and may be read"
        ) from error
    except WhetError as error:
        raise UsageError(f"cannot read {path}", got=error.got, try_="an ordinary file") from None


def _check_text_format(path: Path, head: bytes) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(
            f"{path} is not UTF-8",
            got="UTF-16, by its first bytes",
            try_=f"iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}",
        )
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        raise UsageError(f"{path} is compressed", got="its first bytes say so", try_="unpack it first")
    if b"\r" in head and b"\n" not in head:
        raise UsageError(
            f"{path} ends its lines with a carriage return alone",
            got="no line feed in its first 64 kB",
            try_=f"tr '\\r' '\\n' < {path.name} > lines-{path.name}",
        )
    start = head.lstrip().removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb"\[\s*(\{|\Z)", start):
        raise UsageError(
            f"{path} is one JSON array, not JSON lines",
            got=start[:40].decode(errors="replace"),
            try_=f"jq -c '.[]' {path.name} > rows.jsonl",
        )
