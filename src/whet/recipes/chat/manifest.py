"""What does a folder of prepared conversations say of itself? One JSON file, the same for the same data and seed."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from whet.base.errors import UsageError, WhetError
from whet.base.model import FrozenModel
from whet.recipes.chat.conversation import Loss
from whet.run.disk import open_regular_file, read_regular_file

FORMAT = "whet chat 1"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
Part = Literal["train", "val", "test"]
PARTS: tuple[Part, ...] = ("train", "val", "test")


class PartFacts(FrozenModel):
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


class FileFacts(FrozenModel):
    """What a file must hold."""

    bytes: int
    sha256: str


class Manifest(FrozenModel):
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
    parts: dict[Part, PartFacts]
    told: dict[str, Any]
    """What was left out, cut or trimmed, as numbers, with a few names."""
    files: dict[str, FileFacts]


def facts_of(path: Path) -> FileFacts:
    """What a file holds."""
    digest, size = hashlib.sha256(), 0
    with open_regular_file(path, follows_links=True) as file:
        while piece := file.read(1024**2):
            digest.update(piece)
            size += len(piece)
    return FileFacts(bytes=size, sha256=digest.hexdigest())


def read_manifest(folder: Path) -> Manifest:
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
    return Manifest.from_json(read, where=path)
