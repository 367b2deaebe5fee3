"""Which conversations do the files of an input hold, and which records are none?"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.recipes.chat.conversation import Conversation, MalformedError, validate_turns
from whet.recipes.chat.formats import FORMATS, TRM_FOLDER, TRM_ROWS, Format, detect_format, is_trm_folder
from whet.recipes.chat.json_records import Record
from whet.recipes.chat.manifest import SPLITS, Split
from whet.recipes.text.readers.sources import split_name

_ENDINGS = {".json", ".jsonl", ".ndjson", ".gz", ".bz2", ".xz", ".zst"}
_ID_KEYS = ("id", "conversation_id", "message_tree_id", "uuid", "hash")


class ConversationFile(NamedTuple):
    """A file of conversations."""

    path: Path
    shape: Format
    part: Split | None = None
    """The part that the file's name stands for."""


class RejectedRecord(NamedTuple):
    """A record that is no conversation."""

    where: str
    why: str


def find_files(path: Path, *, shape: str = "auto") -> tuple[ConversationFile, ...]:
    """The file, or the files train, dev and test of a folder."""
    files: list[tuple[Split | None, Path]] = [(None, path)]
    if is_trm_folder(path):
        found = [(part, path / part / TRM_ROWS) for part in SPLITS if (path / part / TRM_ROWS).is_file()]
        return tuple(ConversationFile(file, TRM_FOLDER, part) for part, file in found)
    if path.is_dir():
        files = [
            (part, file)
            for wanted in SPLITS
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
    return tuple(
        ConversationFile(file, detect_format(file) if shape == "auto" else FORMATS[shape], part) for part, file in files
    )


def read_conversations(source: ConversationFile) -> Iterator[Conversation | RejectedRecord]:
    """The conversations of a file in order, and what is none."""
    for record in source.shape.gather(source.shape.records(source.path)):
        yield _read(record, source)


def _read(record: Record, source: ConversationFile) -> Conversation | RejectedRecord:
    name = _record_id(record.value)
    where = f"{source.path.name}:{record.number}" + (f" ({name})" if name else "")
    try:
        if record.fault:
            raise MalformedError(record.fault)
        if not isinstance(record.value, dict):
            raise MalformedError("no object")
        if not source.shape.fits(record.value):
            raise MalformedError(f"not of the shape {source.shape.name}")
        return Conversation(validate_turns(source.shape.read(record.value)), where)
    except MalformedError as error:
        return RejectedRecord(where, str(error))


def _record_id(value: object) -> str:
    found = next((value[key] for key in _ID_KEYS if value.get(key)), "") if isinstance(value, dict) else ""
    # It is shown to a person, and a name of many lines or with colours would not be one.
    return (
        "".join(sign if sign.isprintable() else " " for sign in str(found)[:80]) if isinstance(found, str | int) else ""
    )
