"""Find the input files of `whet data chat`, and read their conversations."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from whet.base.errors import UsageError
from whet.base.units import printable_line
from whet.recipes.chat.conversation import Conversation, MalformedError, validate_turns
from whet.recipes.chat.formats import FORMATS, TRM_FOLDER, TRM_ROWS, Format, detect_format, is_trm_folder
from whet.recipes.chat.json_records import Record
from whet.recipes.chat.manifest import SPLITS, Split
from whet.recipes.text.readers.sources import split_name

_SUFFIXES = {".json", ".jsonl", ".ndjson", ".gz", ".bz2", ".xz", ".zst"}
_ID_KEYS = ("id", "conversation_id", "message_tree_id", "uuid", "hash")


class ConversationFile(NamedTuple):
    """An input file and its format."""

    path: Path
    format: Format
    split: Split | None = None
    """The split that the file name indicates, or None if the file has to be split."""


class RejectedRecord(NamedTuple):
    """A record that is not a valid conversation."""

    where: str
    """The file name and the number of the record."""
    why: str


def find_files(path: Path, *, format_name: str = "auto") -> tuple[ConversationFile, ...]:
    """Return the input files: `path` itself, or the train, val and test files in it if it is a folder.

    File names such as `dev` and `valid` also indicate the val split.
    """
    if is_trm_folder(path):
        rows = [(split, path / split / TRM_ROWS) for split in SPLITS if (path / split / TRM_ROWS).is_file()]
        return tuple(ConversationFile(file, TRM_FOLDER, split) for split, file in rows)
    files: list[tuple[Split | None, Path]] = [(None, path)]
    if path.is_dir():
        files = [
            (split, file)
            for wanted in SPLITS
            for file in sorted(path.iterdir())
            if file.suffix.lower() in _SUFFIXES
            and file.is_file()
            and (split := split_name(file.name.split(".")[0])) == wanted
        ]
        if not any(split == "train" for split, _ in files):
            raise UsageError(f"no training file in {path}", got="no train.json or train.jsonl", try_="a file")
    elif not path.exists():
        raise UsageError("the data path does not exist", got=path, try_="an existing file or folder")
    elif not path.is_file():
        raise UsageError(
            "conversations are read twice, which needs a regular file", got=path, try_="copy the data to a file"
        )
    return tuple(
        ConversationFile(file, detect_format(file) if format_name == "auto" else FORMATS[format_name], split)
        for split, file in files
    )


def read_conversations(source: ConversationFile) -> Iterator[Conversation | RejectedRecord]:
    """Yield the conversations and rejected records of a file in order."""
    for record in source.format.merge(source.format.records(source.path)):
        yield _parse(record, source)


def _parse(record: Record, source: ConversationFile) -> Conversation | RejectedRecord:
    record_id = _record_id(record.value)
    where = f"{source.path.name}:{record.number}" + (f" ({record_id})" if record_id else "")
    try:
        if record.error:
            raise MalformedError(record.error)
        if not isinstance(record.value, dict):
            raise MalformedError("not an object")
        if not source.format.fits(record.value):
            raise MalformedError(f"not in the format {source.format.name}")
        return Conversation(validate_turns(source.format.read(record.value)), where)
    except MalformedError as error:
        return RejectedRecord(where, str(error))


def _record_id(value: object) -> str:
    record_id = next((value[key] for key in _ID_KEYS if value.get(key)), "") if isinstance(value, dict) else ""
    if not isinstance(record_id, str | int):
        return ""
    # Replace line breaks and escape characters, because the text is printed to the terminal.
    return printable_line(str(record_id)[:80])
