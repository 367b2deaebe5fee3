"""How are your texts read? JSON lines, CSV or TSV, recognised by their content; or a folder of train, dev and test."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from whet.base.errors import UsageError
from whet.recipes.text.corpus import Corpus, Examples, gather, split

TEXT_NAMES = ("text", "sentence", "content", "review", "comment", "message", "body", "document", "abstract", "string")
LABEL_NAMES = ("label", "category", "class", "target", "intent", "sentiment", "topic", "tag")
SPLITS = {"train": ("train", "training"), "dev": ("dev", "valid", "validation", "val"), "test": ("test",)}
"""The file names, without ending, that make a folder a ready split."""

_Row = tuple[str, str]
"""A text and the name of its class."""


def read_table(*paths: Path) -> Corpus:
    """The rows of all files and folders as one corpus; what a folder does not bring is cut from its training rows."""
    parts: dict[str, list[_Row]] = {name: [] for name in SPLITS}
    whole: list[_Row] = []
    for path in paths:
        if path.is_dir():
            for name, file in _split_files(path).items():
                parts[name] += _read_file(file)
        else:
            whole += _read_file(path)
    whole += parts["train"]
    where = ", ".join(map(str, paths))
    classes = _class_names(whole, held_out=[*parts["dev"], *parts["test"]], where=where)
    train, dev, test = (_numbered(rows, classes=classes) for rows in (whole, parts["dev"], parts["test"]))
    return _with_missing_parts(train, dev=dev, test=test, classes=classes, where=where)


def _with_missing_parts(
    train: Examples, *, dev: Examples, test: Examples, classes: Sequence[str], where: str
) -> Corpus:
    cut = split(train, classes=classes)
    if dev and test:
        cut = Corpus(classes=tuple(classes), train=train, dev=dev, test=test)
    elif dev:
        cut = Corpus(classes=cut.classes, train=_joined(cut.train, cut.dev), dev=dev, test=cut.test)
    elif test:
        cut = Corpus(classes=cut.classes, train=_joined(cut.train, cut.test), dev=cut.dev, test=test)
    for name, part in (("dev", cut.dev), ("test", cut.test)):
        if not part:
            raise UsageError(
                f"too few rows to hold a {name} part back",
                got=f"{len(train)} rows of {len(classes)} classes in {where}",
                try_="at least ten different texts of a class, or a folder with train, dev and test files",
            )
    return cut


def _joined(one: Examples, other: Examples) -> Examples:
    return Examples(texts=one.texts + other.texts, labels=one.labels + other.labels)


def _numbered(rows: list[_Row], *, classes: Sequence[str]) -> Examples:
    number = {name: index for index, name in enumerate(classes)}
    return gather([(text, number[label]) for text, label in rows])


def _class_names(train: list[_Row], *, held_out: list[_Row], where: str) -> list[str]:
    """The classes in alphabetical order, each seen often enough to be learned."""
    seen = Counter(label for _, label in train)
    known = ", ".join(f"{label} ({count})" for label, count in seen.most_common(8))
    for label in sorted({*seen, *(label for _, label in held_out)}):
        if seen[label] < 2:
            times = "once" if seen[label] else "never"
            raise UsageError(
                f"the label {label!r} is seen {times} in the training rows of {where}",
                got=known,
                try_="more rows of it, or leave it out; perhaps it is a header or a typing error",
            )
    if len(seen) < 2:
        raise UsageError(
            f"all rows of {where} have the same label",
            got=known,
            try_="rows of at least two classes, or another column",
        )
    return sorted(seen)


# --- files -----------------------------------------------------------------------------------------------------------


def _split_files(folder: Path) -> dict[str, Path]:
    found = {
        split_name: file
        for split_name, stems in SPLITS.items()
        for file in sorted(folder.iterdir())
        if file.is_file() and file.stem.lower() in stems
    }
    if "train" not in found:
        names = ", ".join(sorted(file.name for file in folder.iterdir())[:8]) or "nothing"
        raise UsageError(
            f"no training file in {folder}", got=names, try_="a file train.jsonl, train.csv or train.tsv there"
        )
    return found


def _read_file(path: Path) -> list[_Row]:
    text = _decoded(path)
    if not text.strip():
        raise UsageError(f"{path} is empty", got="no rows", try_="rows with a text and a label")
    records = _json_lines(text, path=path) if text.lstrip()[0] in "{[" else _delimited(text, path=path)
    columns: tuple[str, str] | None = None
    rows: list[_Row] = []
    for number, record in records:
        columns = columns or _columns(record, path=path)
        rows.append(
            (
                _filled(record, columns[0], where=f"{path}, row {number}"),
                _filled(record, columns[1], where=f"{path}, row {number}"),
            )
        )
    if not rows:
        raise UsageError(f"{path} is empty", got="a header without rows", try_="rows with a text and a label")
    return rows


def _decoded(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}", got=error.strerror, try_="a file that exists and may be read"
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path} is not UTF-8",
            got=f"byte 0x{data[error.start]:02x} at offset {error.start}, row {row}",
            try_=f"iconv -f latin1 -t utf-8 {path.name} > utf8-{path.name}, or whatever it was written in",
        ) from error


def _json_lines(text: str, *, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UsageError(
                f"row {number} of {path} is not JSON", got=str(error), try_="one object per line"
            ) from None
        if not isinstance(record, dict):
            raise UsageError(
                f"row {number} of {path} is not an object", got=line[:60], try_='{"text": "...", "label": "..."}'
            )
        yield number, record


def _delimited(text: str, *, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    header = text.split("\n", 1)[0]
    # Strict: a quote that is never closed would swallow the rows behind it.
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter="\t" if "\t" in header else ",", strict=True)
    try:
        names = [str(name).strip().lower() for name in reader.fieldnames or ()]
        if len(set(names)) < len(names):
            raise UsageError(f"{path} has a column twice", got=", ".join(names)[:200], try_="one column of each name")
        for record in reader:
            if None in record:
                raise UsageError(
                    f"row {reader.line_num} of {path} has more fields than the header",
                    got=str(record[None])[:200],
                    try_='quotes around texts with commas: "a text, with a comma",label',
                )
            yield reader.line_num, record
    except csv.Error as error:
        raise UsageError(f"row {reader.line_num} of {path} cannot be read", got=str(error), try_="JSON lines") from None


def _columns(record: dict[str, Any], *, path: Path) -> tuple[str, str]:
    """The names of the text and label columns, as the file spells them."""
    spelled = {str(name).strip().lower(): str(name) for name in record}
    found: list[str] = []
    for what, names in (("text", TEXT_NAMES), ("label", LABEL_NAMES)):
        fitting = [spelled[name] for name in names if name in spelled]
        if not fitting:
            raise UsageError(
                f"{path} has no {what} column",
                got="columns " + ", ".join(map(str, record))[:200],
                try_=f"name it {what!r} (also understood: {', '.join(names[1:])})",
            )
        found.append(fitting[0])
    return found[0], found[1]


def _filled(record: dict[str, Any], column: str, *, where: str) -> str:
    value = record.get(column)
    text = "" if value is None else str(value).strip()
    if not text:
        raise UsageError(f"an empty {column} in {where}", got=repr(value), try_="fill it in, or remove the row")
    return text
