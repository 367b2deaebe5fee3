"""Find the data files at a path, detect the format and split of each, and read their rows."""

import json
import re
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import cast

from whet.base.errors import UsageError, WhetError, first_line
from whet.recipes.text.readers.columnar import class_names, read_columnar
from whet.recipes.text.readers.rows import (
    MAX_ROW_BYTES,
    UTF8_BOM,
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

SPLIT_NAMES: dict[SplitName, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev"),
    "test": ("test",),
}
"""The names of files (without suffix) and folders for each split."""

_SPLIT_OF_NAME = {name: split for split, names in SPLIT_NAMES.items() for name in names}
_SHARD = re.compile(r"[-_]\d+[-_]of[-_]\d+$")
_ROW_SUFFIXES = {"", ".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow"}
_TEXT_SUFFIXES = {"", ".txt", ".text", ".md"}
_HEAD_BYTES = 64 * 1024
# Collect the columns of JSON lines from this many rows, because single rows may lack keys.
_SAMPLED_ROWS = 100


def read_rows(source: TextSource) -> Iterator[TextRow]:
    """Read the rows of a source, one at a time."""
    return _READERS[source.format](source)


def column_names(source: TextSource) -> list[str]:
    """Return the columns of a source, from its header or its first rows."""
    if source.format in ("CSV", "TSV"):
        return read_header(source)[1]
    num_rows = _SAMPLED_ROWS if source.format == "JSON lines" else 1
    usable = (row for row in read_rows(source) if row.cells)
    return list(dict.fromkeys(str(name) for row in islice(usable, num_rows) for name in row.cells))


def find_sources(path: Path) -> tuple[TextSource, ...]:
    """Return the source of a file, or the sources in a folder with one of the layouts in `docs/text-data.md`."""
    if not path.is_dir():
        return (_file_source(path, split=None),)
    try:
        sources = (
            _saved_dataset(path, split=None)
            or _split_files(path)
            or _split_files(path / "data")
            or _split_folders(path)
            or _class_folder_source(path, split=None)
        )
        if sources and (len(sources) == 1 or any(source.split == "train" for source in sources)):
            return tuple(sources)
        names = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    except OSError as error:
        raise UsageError(f"cannot read {path}", got=error.strerror, try_="a folder that may be read") from error
    raise UsageError(
        f"no training file in {path}",
        got=names,
        try_="a file train.jsonl, train.csv, train.tsv or train.parquet there, or a folder for each class",
    )


def split_name(name: str) -> SplitName | None:
    """Return the split that a file or folder name (without suffix) refers to, or None.

    >>> split_name("Validation"), split_name("train-00000-of-00002"), split_name("reviews")
    ('val', 'train', None)
    """
    return _SPLIT_OF_NAME.get(_SHARD.sub("", name.lower()))


# --- folders ----------------------------------------------------------------------------------------------------------


def _split_files(folder: Path) -> list[TextSource]:
    """Return the files named train, val and test, each of which may consist of several shards."""
    if not folder.is_dir():
        return []
    named = [
        (split, file)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in _ROW_SUFFIXES and file.is_file() and (split := split_name(file.stem)) is not None
    ]
    for split, files in groupby(sorted(named), key=lambda pair: pair[0]):
        _check_shards([file for _, file in files], split=split)
    in_order = [(split, file) for wanted in SPLIT_NAMES for split, file in named if split == wanted]
    return [_file_source(file, split=split) for split, file in in_order]


def _check_shards(files: list[Path], *, split: str) -> None:
    """Check that several files of a split are shards ("1-of-2"). Other files might contain the same rows twice."""
    if len(files) > 1 and any(not _SHARD.search(file.stem) for file in files):
        names = ", ".join(file.name for file in files)
        raise UsageError(
            f"several files for {split} in {files[0].parent}", got=names, try_="one of them, or data_paths"
        )


def _split_folders(folder: Path) -> list[TextSource]:
    """Return folders named train, val and test, which contain class folders or saved datasets."""
    # Sort, so that the order of rows does not depend on the file system.
    named = [
        (split, child) for child in sorted(folder.iterdir()) if child.is_dir() and (split := split_name(child.name))
    ]
    in_order = [(split, child) for wanted in SPLIT_NAMES for split, child in named if split == wanted]
    return [
        source
        for split, child in in_order
        for source in _saved_dataset(child, split=split) or _class_folder_source(child, split=split)
    ]


def _saved_dataset(folder: Path, *, split: SplitName | None) -> list[TextSource]:
    """Return the files of a dataset saved by Hugging Face datasets: Arrow files, described by JSON files."""
    if (folder / "dataset_dict.json").exists():
        splits = _read_json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list):
            raise UsageError(f"{folder / 'dataset_dict.json'} has no splits", got=str(splits), try_="save it again")
        chosen = [(name, one) for name in map(str, splits) if (one := split_name(name)) and (folder / name).is_dir()]
        in_order = [(name, one) for wanted in SPLIT_NAMES for name, one in chosen if one == wanted]
        return [source for name, one in in_order for source in _saved_dataset(folder / name, split=one)]
    info, state_file = folder / "dataset_info.json", folder / "state.json"
    if not info.exists() and not state_file.exists():
        return []
    names = class_names(_read_json(info).get("features")) if info.exists() else {}
    state = _read_json(state_file) if state_file.exists() else {}
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UsageError(
            f"{folder} has an index that selects some of its rows",
            got="state.json names a file of indices",
            try_="dataset.flatten_indices().save_to_disk(...)",
        )
    listed = state.get("_data_files")
    files = (
        [folder / Path(str(entry.get("filename"))).name for entry in listed if isinstance(entry, dict)]
        if isinstance(listed, list)
        else sorted(folder.glob("*.arrow"))
    )
    return [
        TextSource(path=file, format="Arrow", split=split or _split_in_file_name(file.stem), class_names=names)
        for file in files
    ]


def _split_in_file_name(stem: str) -> SplitName | None:
    """Return the split in a file name of the datasets cache, such as `name-train-00000-of-00002`."""
    parts = _SHARD.sub("", stem).lower().split("-")
    return next((_SPLIT_OF_NAME[part] for part in reversed(parts) if part in _SPLIT_OF_NAME), None)


def _read_json(path: Path) -> dict[str, object]:
    try:
        content = json.loads(read_regular_file(path, follows_links=True))
    except (OSError, ValueError, RecursionError, WhetError) as error:
        raise UsageError(f"cannot read {path}", got=first_line(error), try_="save it again") from None
    return cast("dict[str, object]", content) if isinstance(content, dict) else {}


# --- class folders: a folder for each class, and each file in it is a text --------------------------------------------


def _class_folder_source(folder: Path, *, split: SplitName | None) -> list[TextSource]:
    has_classes = len(_class_folders(folder)) >= 2
    return [TextSource(path=folder, format="class folders", split=split)] if has_classes else []


def file_names(folder: Path) -> list[str]:
    """Return the names of the files in class folders, in the order of the rows."""
    return [f"{child.name}/{file.name}" for child in _class_folders(folder) for file in sorted(_text_files(child))]


def _class_folders(folder: Path) -> list[Path]:
    children = sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [child for child in children if next(_text_files(child), None) is not None]


def _read_class_folders(source: TextSource) -> Iterator[TextRow]:
    files = [file for folder in _class_folders(source.path) for file in sorted(_text_files(folder))]
    for number, file in enumerate(files, start=1):
        yield _read_text_file(file, number=number)


def _text_files(folder: Path) -> Iterator[Path]:
    for file in folder.iterdir():
        if file.suffix.lower() in _TEXT_SUFFIXES and not file.name.startswith(".") and file.is_file():
            yield file


def _read_text_file(file: Path, *, number: int) -> TextRow:
    with open_regular_file(file, follows_links=True) as opened:
        data = opened.read(MAX_ROW_BYTES + 1)
    error = None
    if len(data) > MAX_ROW_BYTES:
        error = RowError(kind="long", what="is too long", got=f"over {MAX_ROW_BYTES:,} bytes", try_="shorter texts")
    body = data.removeprefix(UTF8_BOM)
    try:
        text = body.decode()
    except UnicodeDecodeError as invalid:
        text = body.decode(errors="replace")
        error = error or RowError(
            kind="not-utf8",
            what="is not UTF-8",
            got=f"byte 0x{body[invalid.start]:02x} at offset {invalid.start + len(data) - len(body)}",
            try_=f"iconv -f latin1 -t utf-8 {file.name}, or whatever its encoding is",
        )
    return TextRow(
        line=number,
        cells={} if error else {"text": text, "label": file.parent.name},
        num_bytes=len(data),
        error=error,
        has_bom=len(body) < len(data),
        name=f"{file.parent.name}/{file.name}",
    )


# --- files ------------------------------------------------------------------------------------------------------------


def _file_source(path: Path, *, split: SplitName | None) -> TextSource:
    """Detect the format from the first bytes of a file. The suffix is ignored."""
    head = _head(path)
    if head.startswith(b"PAR1"):
        return TextSource(path=path, format="Parquet", split=split)
    # Arrow files start with a magic number, Arrow streams with a continuation marker.
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return TextSource(path=path, format="Arrow", split=split)
    _check_text_format(path, head)
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text:
        raise UsageError(f"{path} is empty", got="no rows", try_="rows with a text and a label")
    if text[0] in "{[":
        return TextSource(path=path, format="JSON lines", split=split)
    header = text.split("\n", 1)[0]
    # Try the tab first, because a column name is least likely to contain it.
    delimiter = next((mark for mark in "\t,;|" if mark in header), ",")
    file_format: FileFormat = "TSV" if delimiter == "\t" else "CSV"
    return TextSource(path=path, format=file_format, split=split, delimiter=delimiter)


def _head(path: Path) -> bytes:
    try:
        with open_regular_file(path, follows_links=True) as file:
            head = file.read(_HEAD_BYTES)
            # Skip leading whitespace of any length.
            while head and not head.strip() and (more := file.read(_HEAD_BYTES)):
                head = more
            return head
    except OSError as error:
        raise UsageError(
            f"cannot read {path}", got=error.strerror, try_="a file that exists and may be read"
        ) from error
    except WhetError as error:
        raise UsageError(f"cannot read {path}", got=error.got, try_="a regular file") from None


def _check_text_format(path: Path, head: bytes) -> None:
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(
            f"{path} is not UTF-8",
            got="a byte order mark of UTF-16",
            try_=f"iconv -f utf-16 -t utf-8 {path.name} > utf8-{path.name}",
        )
    if head.startswith((b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        raise UsageError(f"{path} is compressed", got="the signature of a compressed file", try_="unpack it first")
    if b"\r" in head and b"\n" not in head:
        raise UsageError(
            f"{path} uses carriage returns alone as line endings",
            got="no line feed in its first 64 kB",
            try_=f"tr '\\r' '\\n' < {path.name} > lines-{path.name}",
        )
    start = head.lstrip().removeprefix(UTF8_BOM).lstrip()
    if re.match(rb"\[\s*(\{|\Z)", start):
        raise UsageError(
            f"{path} is one JSON array, not JSON lines",
            got=start[:40].decode(errors="replace"),
            try_=f"jq -c '.[]' {path.name} > rows.jsonl",
        )


_READERS = {
    "JSON lines": read_json_lines,
    "CSV": read_delimited,
    "TSV": read_delimited,
    "Parquet": read_columnar,
    "Arrow": read_columnar,
    "class folders": _read_class_folders,
}
