"""Which conversations do the files of an input hold, and which records are none?"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.recipes.chat.conversation import Conversation, MalformedError, check
from whet.recipes.chat.manifest import PARTS, Part
from whet.recipes.chat.reading import Record
from whet.recipes.chat.shapes.every import SHAPES, TRM_FOLDER, Shape, detect
from whet.recipes.chat.shapes.trm_folder import ROWS, is_folder
from whet.recipes.text.readers.sources import split_name

_ENDINGS = {".json", ".jsonl", ".ndjson", ".gz", ".bz2", ".xz", ".zst"}
_NAMES = ("id", "conversation_id", "message_tree_id", "uuid", "hash")


class Source(NamedTuple):
    """A file of conversations."""

    path: Path
    shape: Shape
    part: Part | None = None
    """The part that the file's name stands for."""


class Bad(NamedTuple):
    """A record that is no conversation."""

    where: str
    why: str


def find_sources(path: Path, *, shape: str = "auto") -> tuple[Source, ...]:
    """The file, or the files train, dev and test of a folder."""
    files: list[tuple[Part | None, Path]] = [(None, path)]
    if is_folder(path):
        found = [(part, path / part / ROWS) for part in PARTS if (path / part / ROWS).is_file()]
        return tuple(Source(file, TRM_FOLDER, part) for part, file in found)
    if path.is_dir():
        files = [
            (part, file)
            for wanted in PARTS
            for file in sorted(path.iterdir())
            if file.suffix.lower() in _ENDINGS
            and file.is_file()
            and (part := split_name(file.name.split(".")[0])) == wanted
        ]
        if not any(part == "train" for part, _ in files):
            raise UsageError(f"no training file in {path}", got="no train.json or train.jsonl", try_="a file")
    elif not path.exists():
        raise UsageError("the conversations are not there", got=path, try_="a file or folder that exists")
    elif not path.is_file():
        raise UsageError("conversations are read twice, which needs a file", got=path, try_="a copy of it in a file")
    return tuple(Source(file, detect(file) if shape == "auto" else SHAPES[shape], part) for part, file in files)


def read_conversations(source: Source) -> Iterator[Conversation | Bad]:
    """The conversations of a file in order, and what is none."""
    for record in source.shape.gather(source.shape.records(source.path)):
        yield _read(record, source)


def _read(record: Record, source: Source) -> Conversation | Bad:
    name = _name(record.value)
    where = f"{source.path.name}:{record.number}" + (f" ({name})" if name else "")
    try:
        if record.fault:
            raise MalformedError(record.fault)
        if not isinstance(record.value, dict):
            raise MalformedError("no object")
        if not source.shape.fits(record.value):
            raise MalformedError(f"not of the shape {source.shape.name}")
        return Conversation(check(source.shape.read(record.value)), where)
    except MalformedError as error:
        return Bad(where, str(error))


def _name(value: object) -> str:
    found = next((value[key] for key in _NAMES if value.get(key)), "") if isinstance(value, dict) else ""
    # It is shown to a person, and a name of many lines or with colours would not be one.
    return (
        "".join(sign if sign.isprintable() else " " for sign in str(found)[:80]) if isinstance(found, str | int) else ""
    )
