"""Which files hold the rows that a path names, of which form is each, and of which part?"""

import json
import re
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import cast

from whet.base.errors import UsageError, WhetError
from whet.recipes.text.rows.class_folders import class_folders, read_class_folders
from whet.recipes.text.rows.columnar import class_names, read_columnar
from whet.recipes.text.rows.delimited import read_delimited, read_header
from whet.recipes.text.rows.json_lines import read_json_lines
from whet.recipes.text.rows.row import Form, Part, Row, Source
from whet.run.plain_file import open_plain, read_plain

PART_NAMES: dict[Part, tuple[str, ...]] = {
    "train": ("train", "training"),
    "dev": ("dev", "valid", "validation", "val"),
    "test": ("test",),
}
"""The names, without ending, that make a file or folder a ready part."""

_PARTS = {name: part for part, names in PART_NAMES.items() for name in names}
_SHARD = re.compile(r"[-_]\d+[-_]of[-_]\d+$")
_ROW_ENDINGS = {"", ".csv", ".tsv", ".tab", ".txt", ".json", ".jsonl", ".ndjson", ".parquet", ".arrow"}
_HEAD_BYTES = 64 * 1024
_LOOKED_AT = 100
_READERS = {
    "JSON lines": read_json_lines,
    "CSV": read_delimited,
    "TSV": read_delimited,
    "Parquet": read_columnar,
    "Arrow": read_columnar,
    "class folders": read_class_folders,
}


def read_rows(source: Source) -> Iterator[Row]:
    """The rows of a source, one at a time."""
    return _READERS[source.form](source)


def column_names(source: Source) -> list[str]:
    """The columns of a source: its header's, or those of its first rows, each of which may lack some."""
    if source.form in ("CSV", "TSV"):
        return read_header(source)[1]
    several = _LOOKED_AT if source.form == "JSON lines" else 1
    whole = (row for row in read_rows(source) if row.cells)
    return list(dict.fromkeys(str(name) for row in islice(whole, several) for name in row.cells))


def find_sources(path: Path) -> tuple[Source, ...]:
    """What a path holds: a file, or a folder in one of the forms that `docs/data.md` lists."""
    if not path.is_dir():
        return (_file_source(path, part=None),)
    try:
        found = (
            _saved_dataset(path, part=None)
            or _part_files(path)
            or _part_files(path / "data")
            or _part_folders(path)
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


def part_of(name: str) -> Part | None:
    """The part that a name without ending stands for.

    >>> part_of("Validation"), part_of("train-00000-of-00002"), part_of("reviews")
    ('dev', 'train', None)
    """
    return _PARTS.get(_SHARD.sub("", name.lower()))


# --- folders ---------------------------------------------------------------------------------------------------------


def _part_files(folder: Path) -> list[Source]:
    """Files named train, dev and test, perhaps in several pieces."""
    if not folder.is_dir():
        return []
    named = [
        (part, file)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in _ROW_ENDINGS and file.is_file() and (part := part_of(file.stem)) is not None
    ]
    for part, files in groupby(sorted(named), key=lambda pair: pair[0]):
        _refuse_two_forms([file for _, file in files], part=part)
    in_order = [(part, file) for wanted in PART_NAMES for part, file in named if part == wanted]
    return [_file_source(file, part=part) for part, file in in_order]


def _refuse_two_forms(files: list[Path], *, part: str) -> None:
    """Two files for one part are pieces of it, or the same rows twice: only pieces say "1 of 2"."""
    if len(files) > 1 and any(not _SHARD.search(file.stem) for file in files):
        names = ", ".join(file.name for file in files)
        raise UsageError(f"several files for {part} in {files[0].parent}", got=names, try_="one of them, or data_paths")


def _part_folders(folder: Path) -> list[Source]:
    """Folders named train, dev and test, with class folders or saved datasets inside."""
    named = [(part, child) for child in sorted(folder.iterdir()) if child.is_dir() and (part := part_of(child.name))]
    in_order = [(part, child) for wanted in PART_NAMES for part, child in named if part == wanted]
    return [
        source
        for part, child in in_order
        for source in _saved_dataset(child, part=part) or _folders_of(child, part=part)
    ]


def _folders_of(folder: Path, *, part: Part | None) -> list[Source]:
    is_one = len(class_folders(folder)) >= 2
    return [Source(path=folder, form="class folders", part=part)] if is_one else []


def _saved_dataset(folder: Path, *, part: Part | None) -> list[Source]:
    """A dataset that Hugging Face's library saved: Arrow files, and JSON that describes them."""
    if (folder / "dataset_dict.json").exists():
        splits = _json(folder / "dataset_dict.json").get("splits")
        if not isinstance(splits, list):
            raise UsageError(f"{folder / 'dataset_dict.json'} names no splits", got=str(splits), try_="save it again")
        chosen = [(name, one) for name in map(str, splits) if (one := part_of(name)) and (folder / name).is_dir()]
        in_order = [(name, one) for wanted in PART_NAMES for name, one in chosen if one == wanted]
        return [source for name, one in in_order for source in _saved_dataset(folder / name, part=one)]
    info, state = folder / "dataset_info.json", folder / "state.json"
    if not info.exists() and not state.exists():
        return []
    names = class_names(_json(info).get("features")) if info.exists() else {}
    told = _json(state) if state.exists() else {}
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
    return [Source(path=file, form="Arrow", part=part or _part_in_name(file.stem), class_names=names) for file in files]


def _part_in_name(stem: str) -> Part | None:
    """The library's cache names files after dataset and split: `name-train-00000-of-00002`."""
    words = _SHARD.sub("", stem).lower().split("-")
    return next((_PARTS[word] for word in reversed(words) if word in _PARTS), None)


def _json(path: Path) -> dict[str, object]:
    try:
        read = json.loads(read_plain(path, follows_links=True))
    except (OSError, ValueError, RecursionError, WhetError) as error:
        raise UsageError(f"cannot read {path}", got=str(error).splitlines()[0][:200], try_="save it again") from None
    return cast("dict[str, object]", read) if isinstance(read, dict) else {}


# --- files -----------------------------------------------------------------------------------------------------------


def _file_source(path: Path, *, part: Part | None) -> Source:
    head = _head(path)
    if head.startswith(b"PAR1"):
        return Source(path=path, form="Parquet", part=part)
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return Source(path=path, form="Arrow", part=part)
    _refuse_other_forms(path, head)
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if not text:
        raise UsageError(f"{path} is empty", got="no rows", try_="rows with a text and a label")
    if text[0] in "{[":
        return Source(path=path, form="JSON lines", part=part)
    header = text.split("\n", 1)[0]
    delimiter = next((mark for mark in "\t,;|" if mark in header), ",")
    form: Form = "TSV" if delimiter == "\t" else "CSV"
    return Source(path=path, form=form, part=part, delimiter=delimiter)


def _head(path: Path) -> bytes:
    try:
        with open_plain(path, follows_links=True) as file:
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


def _refuse_other_forms(path: Path, head: bytes) -> None:
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
