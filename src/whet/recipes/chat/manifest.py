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
    """How much is in a part."""

    conversations: int = 0
    documents: int = 0
    """Conversations, or pieces of long ones: what attends to itself only."""
    rows: int = 0
    """Documents packed behind each other, up to `max_length` tokens."""
    tokens: int = 0
    loss_tokens: int = 0
    """Tokens that are to be predicted."""
    loss_bytes: int = 0
    """Bytes of text behind them: bits per byte = nats of a part / ln 2 / loss_bytes."""
    longest: int = 0
    """Tokens of the longest document."""


class ChatFile(FrozenModel):
    """What a file must hold."""

    bytes: int
    sha256: str


class ChatManifest(FrozenModel):
    """All of it."""

    format: str = FORMAT
    made_from: tuple[dict[str, Any], ...]
    """The files that were read: name, bytes, sha256, shape."""
    options: dict[str, Any]
    """What was asked for: seed, train_split, subsample_size and so on."""
    template: str
    loss: Loss
    max_length: int
    tokenizer: str
    """Where the vocabulary comes from, in a word; it lies in tokenizer.json."""
    vocab_size: int
    marks: dict[str, int]
    """The ids of padding, the end of a turn, and the start of a turn of each role."""
    token_type: Literal["<u2", "<u4"]
    parts: dict[Split, SplitFacts]
    told: dict[str, Any]
    """What was left out, cut or trimmed, as numbers, with a few names."""
    files: dict[str, ChatFile]


def hash_file(path: Path) -> ChatFile:
    """What a file holds."""
    digest, size = hashlib.sha256(), 0
    with open_regular_file(path, follows_links=True) as file:
        while piece := file.read(1024**2):
            digest.update(piece)
            size += len(piece)
    return ChatFile(bytes=size, sha256=digest.hexdigest())


def read_manifest(folder: Path) -> ChatManifest:
    """The manifest of a folder that `whet data chat` wrote."""
    path = folder / MANIFEST
    try:
        read = json.loads(read_regular_file(path, follows_links=True))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} is no folder of prepared conversations",
            got=f"no {MANIFEST}",
            try_=f"whet data chat FILE --output-dir {folder}",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WhetError(f"cannot read {path}", got=str(error)[:200], try_="prepare it again") from None
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        got = read.get("format") if isinstance(read, dict) else type(read).__name__
        raise UsageError(f"{path} has another format", got=str(got)[:100], try_=f"{FORMAT!r}: prepare it again")
    return ChatManifest.from_json(read, where=path)


_MAX_SHOWN = 5


def summary_lines(manifest: ChatManifest, folder: Path) -> tuple[str, ...]:
    """What was read, what became of it, and what to do next."""
    told = manifest.told
    read = ", ".join(f"{source['name']} ({source['shape']})" for source in manifest.made_from)
    rows = [("read", f"{format_plural(told['conversations_found'], 'conversation')}: {read}")]
    for number, (where, why) in enumerate(told["bad_records_shown"][:_MAX_SHOWN]):
        rows.append(("" if number else "skipped", f"{where}: {why}"))
    if told["bad_records"] > _MAX_SHOWN:
        rows.append(("", f"... {told['bad_records']:,} bad records in all"))
    for key, words in _LEFT_OUT.items():
        if told[key]:
            rows.append(("note", f"{told[key]:,} {words}"))
    if not manifest.parts["val"].conversations:
        rows.append(
            ("note", "nothing is held out for dev, which a training needs: more conversations, or --train-split")
        )
    for part in SPLITS:
        facts = manifest.parts[part]
        fill = facts.tokens / (facts.rows * manifest.max_length) if facts.rows else 0
        rows.append(
            (
                part,
                f"{format_plural(facts.conversations, 'conversation')}, {format_plural(facts.tokens, 'token')}, "
                f"{facts.loss_tokens:,} of them learned; {format_plural(facts.rows, 'row')} of {manifest.max_length:,}, "
                f"{format_percent(fill, 1)} full",
            )
        )
    rows.append(("tokens", f"{manifest.tokenizer}, {manifest.vocab_size:,} ids; loss on {_LOSS[manifest.loss]}"))
    size = sum(file.bytes for file in manifest.files.values())
    rows.append(("wrote", f"{folder} ({format_bytes(size)}); whet train chat data_paths=[{folder}]"))
    return tuple(f"{name:9} {words}" for name, words in rows)


_LOSS = {"assistant": "the assistant's text and the end of its turns", "all": "every token"}
_LEFT_OUT = {
    "conversations_left_out_by_subsample": "conversations left out (--subsample-size)",
    "conversations_left_out_as_held_out_elsewhere": "conversations left out: a held-out file has them too",
    "conversations_cut_apart": "conversations longer than --max-length became pieces that end with an answer",
    "documents_shortened": "pieces had a question or an answer longer than --max-length, whose end was cut off",
    "texts_that_the_tokenizer_changes": "texts of a sample do not come back from this tokenizer as they were: answers "
    "are learned as it spells them, and bits per byte compare with nothing else",
}
