"""The manifest of prepared conversations, and its summary for the terminal."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.base.units import format_bytes, format_percent, format_plural
from whet.recipes.chat.conversation import Loss
from whet.run.disk import open_regular_file, read_regular_file

FORMAT = "whet chat 1"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


class SplitFacts(FrozenModel):
    conversations: int = 0
    documents: int = 0
    """Number of conversations, or segments of long conversations. Attention does not cross documents."""
    rows: int = 0
    """Number of rows of up to `max_length` tokens, into which the documents are packed."""
    tokens: int = 0
    loss_tokens: int = 0
    """Number of tokens that the loss includes."""
    loss_bytes: int = 0
    """Number of bytes of the text of the loss tokens. Bits per byte = nats of a split / ln 2 / loss_bytes."""
    longest: int = 0
    """Number of tokens of the longest document."""


class ChatFile(FrozenModel):
    """Size and hash of a file."""

    bytes: int
    sha256: str


class ChatManifest(FrozenModel):
    """The contents of manifest.json. It is deterministic for the same input, options and seed."""

    format: str = FORMAT
    sources: tuple[dict[str, Any], ...]
    """Name, bytes, sha256 and format of each input file."""
    options: dict[str, Any]
    """Options of `whet data chat`."""
    template: str
    loss: Loss
    max_length: int
    tokenizer: str
    """Value of --tokenizer. The tokenizer itself is in tokenizer.json."""
    vocab_size: int
    marks: dict[str, int]
    """Token ids of padding, the end of a turn, and the start of a turn of each role."""
    token_type: Literal["<u2", "<u4"]
    splits: dict[Split, SplitFacts]
    counts: dict[str, Any]
    """Numbers of conversations read, excluded, split and truncated, with examples of rejected records."""
    files: dict[str, ChatFile]


def hash_file(path: Path) -> ChatFile:
    """Return the size and SHA-256 hash of a file."""
    digest, size = hashlib.sha256(), 0
    with open_regular_file(path, follows_links=True) as file:
        while chunk := file.read(1024**2):
            digest.update(chunk)
            size += len(chunk)
    return ChatFile(bytes=size, sha256=digest.hexdigest())


def read_manifest(folder: Path) -> ChatManifest:
    """Read the manifest of a folder that `whet data chat` wrote. Raise UsageError if there is none."""
    path = folder / MANIFEST
    try:
        read = json.loads(read_regular_file(path, follows_links=True))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is not a folder of prepared conversations",
            got=f"no {MANIFEST}",
            try_=f"whet data chat FILE --out {folder}",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WhetError(f"cannot read {path}", got=str(error)[:200], try_="prepare the data again") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        got = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise UsageError(
            f"{path} has an unsupported format", got=str(got)[:100], try_=f"{FORMAT!r}: prepare the data again"
        )
    return ChatManifest.from_json(read, where=path)


_MAX_SHOWN = 5
_LOSS_TEXT = {"assistant": "the assistant's text and the end of its turns", "all": "every token"}
_NOTES = {
    "excluded_by_subsample": "conversations not used (--subsample-size)",
    "excluded_as_held_out": "conversations not used: a held-out file contains them too",
    "conversations_split": "conversations longer than --max-length were split into segments that end with an answer",
    "documents_truncated": "segments had a question or an answer longer than --max-length, which was truncated",
    "texts_changed_by_tokenizer": "texts of a sample are not reproduced by this tokenizer: answers are trained on as "
    "it "
    "decodes them, and bits per byte cannot be compared with other tokenizers",
}


def summary_lines(manifest: ChatManifest, folder: Path) -> tuple[str, ...]:
    """Return the lines that `whet data chat` prints: the input, the output, and the next command."""
    counts = manifest.counts
    read = ", ".join(f"{source['name']} ({source['format']})" for source in manifest.sources)
    rows = [("read", f"{format_plural(counts['conversations'], 'conversation')}: {read}")]
    for number, (where, why) in enumerate(counts["rejected_examples"][:_MAX_SHOWN]):
        rows.append(("" if number else "skipped", f"{where}: {why}"))
    if counts["rejected_records"] > _MAX_SHOWN:
        rows.append(("", f"... {counts['rejected_records']:,} bad records in total"))
    rows += [("note", f"{counts[key]:,} {text}") for key, text in _NOTES.items() if counts[key]]
    if not manifest.splits["val"].conversations:
        rows.append(("note", "the val split is empty, but training needs it: more conversations, or --train-split"))
    for split in SPLITS:
        facts = manifest.splits[split]
        fill = facts.tokens / (facts.rows * manifest.max_length) if facts.rows else 0
        rows.append(
            (
                split,
                f"{format_plural(facts.conversations, 'conversation')}, {format_plural(facts.tokens, 'token')}, "
                f"{facts.loss_tokens:,} of them trained on; {format_plural(facts.rows, 'row')} of "
                f"{manifest.max_length:,}, {format_percent(fill, 1)} full",
            )
        )
    rows.append(("tokens", f"{manifest.tokenizer}, {manifest.vocab_size:,} ids; loss on {_LOSS_TEXT[manifest.loss]}"))
    size = sum(file.bytes for file in manifest.files.values())
    rows.append(("wrote", f"{folder} ({format_bytes(size)}); whet train chat data_paths=[{folder}]"))
    return tuple(f"{name:9} {text}" for name, text in rows)
