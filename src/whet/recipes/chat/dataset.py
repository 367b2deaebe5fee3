"""How are prepared conversations read while training? From mapped files, by document or by packed row.

A part lies in five files of plain numbers, little-endian: `tokens` (all documents behind each other), `loss` (a byte
for each token: 1 where it is to be predicted), `starts` (where each document starts, and the end), `loss_bytes` (bytes
of text that a document's loss tokens stand for), and `rows` (the first document of each packed row, and the end).
Documents of a row lie behind each other, so a row is one slice. Nothing is padded.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.manifest import PARTS, TOKENIZER, Manifest, Part, PartFacts, facts_of, read_manifest
from whet.recipes.chat.packing import rows_of
from whet.recipes.chat.tokenizer import ChatTokenizer
from whet.run.disk import read_regular_file

Array = np.ndarray[Any, np.dtype[Any]]
ARRAYS = {"tokens": None, "loss": "|u1", "starts": "<i8", "loss_bytes": "<i8", "rows": "<i8"}
"""The files of a part with the type of their numbers; of tokens the manifest says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A document, or a row of several: three arrays of one length."""

    tokens: Array
    """int32."""
    is_loss: Array
    """uint8: 1 where this token is to be predicted, from the ones before it."""
    positions: Array
    """int32: places within the document; each 0 starts a document, which sees nothing before it."""
    loss_bytes: int
    """Bytes of the text behind the loss tokens."""


class ChatPart:
    """One part: documents, and rows of them that fill `row_length` tokens as well as they can."""

    def __init__(self, arrays: dict[str, Array], facts: PartFacts, *, row_length: int) -> None:
        self.facts = facts
        self.tokens = arrays["tokens"]
        """All tokens of the part, mapped; uint16 or uint32."""
        self.loss = arrays["loss"]
        """The mask of all tokens, mapped; uint8."""
        self.starts = arrays["starts"]
        """(documents + 1), int64."""
        self.loss_bytes = arrays["loss_bytes"]
        """(documents), int64."""
        self.rows = arrays["rows"]
        """(rows + 1), int64: the first document of each row."""
        self.row_length = row_length

    @property
    def num_documents(self) -> int:
        """How many documents there are."""
        return len(self.starts) - 1

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.rows) - 1

    def document(self, index: int) -> Sample:
        """One document."""
        return self._sample(index, index + 1)

    def row(self, index: int) -> Sample:
        """One packed row."""
        return self._sample(int(self.rows[index]), int(self.rows[index + 1]))

    def repacked(self, row_length: int) -> "ChatPart":
        """The same documents in rows of another length."""
        if row_length == self.row_length:
            return self
        if row_length < self.facts.longest:
            raise UsageError(
                "the conversations were prepared for longer rows",
                got=f"{row_length} tokens; the longest document has {self.facts.longest}",
                try_=f"{self.facts.longest} or more; or whet data chat ... --max-length {row_length}",
            )
        rows = rows_of(np.diff(self.starts), row_length=row_length)
        arrays = {"tokens": self.tokens, "loss": self.loss, "starts": self.starts, "loss_bytes": self.loss_bytes}
        return ChatPart({**arrays, "rows": rows}, self.facts, row_length=row_length)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.document, range(self.num_documents))

    def _sample(self, first: int, end: int) -> Sample:
        starts = self.starts[first : end + 1]
        here = slice(int(starts[0]), int(starts[-1]))
        places = np.arange(here.start, here.stop, dtype=np.int64)
        positions = places - np.repeat(starts[:-1], np.diff(starts))
        return Sample(
            tokens=self.tokens[here].astype(np.int32),
            is_loss=np.array(self.loss[here]),
            positions=positions.astype(np.int32),
            loss_bytes=int(self.loss_bytes[first:end].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class ChatDataset:
    """An opened folder."""

    folder: Path
    manifest: Manifest
    tokenizer: ChatTokenizer
    train: ChatPart
    val: ChatPart
    test: ChatPart

    @property
    def fingerprint(self) -> str:
        """What tells this data from other data: the hash of all hashes."""
        known = [f"{name} {file.sha256}" for name, file in sorted(self.manifest.files.items())]
        return hashlib.sha256("\n".join(known).encode()).hexdigest()


def open_dataset(folder: Path, *, verify: bool = False) -> ChatDataset:
    """The prepared conversations in a folder; sizes are looked at, and every byte where `verify` is set."""
    manifest = read_manifest(folder)
    # The names are ours: one that a manifest made up could lead out of the folder.
    if set(manifest.files) != {TOKENIZER, *(f"{part}/{name}.bin" for part in PARTS for name in ARRAYS)}:
        got = ", ".join(sorted(manifest.files))[:200]
        raise WhetError(f"{folder} is damaged", got=f"its manifest names {got}", try_="prepare the data again")
    for name, facts in manifest.files.items():
        _check_file(folder, name, size=facts.bytes, sha256=facts.sha256 if verify or name == TOKENIZER else None)
    tokenizer = ChatTokenizer.from_json(read_regular_file(folder / TOKENIZER, follows_links=True).decode())
    if tokenizer.vocab_size != manifest.vocab_size:
        raise WhetError(
            f"{folder / TOKENIZER} is another tokenizer",
            got=f"{tokenizer.vocab_size} ids, not {manifest.vocab_size}",
            try_="prepare the data again",
        )
    parts = {part: _open_part(folder, part, manifest) for part in PARTS}
    if verify and any(int(part.tokens.max(initial=0)) >= tokenizer.vocab_size for part in parts.values()):
        raise WhetError(f"{folder} is damaged", got="tokens that its vocabulary lacks", try_="prepare the data again")
    return ChatDataset(folder=folder, manifest=manifest, tokenizer=tokenizer, **parts)


def _open_part(folder: Path, part: Part, manifest: Manifest) -> ChatPart:
    facts = manifest.parts[part]
    arrays = {
        name: _mapped(folder / part / f"{name}.bin", kind or manifest.token_type) for name, kind in ARRAYS.items()
    }
    starts, rows = arrays["starts"], arrays["rows"]
    fits = (
        len(arrays["tokens"]) == len(arrays["loss"]) == facts.tokens
        and len(starts) == facts.documents + 1 == len(arrays["loss_bytes"]) + 1
        and len(rows) == facts.rows + 1
        and (int(starts[0]), int(starts[-1]), int(rows[0]), int(rows[-1])) == (0, facts.tokens, 0, facts.documents)
        and bool((np.diff(starts) > 0).all())
        and bool((np.diff(rows) > 0).all())
        and int(np.diff(starts).max(initial=0)) == facts.longest
        and int(np.diff(starts[rows]).max(initial=0)) <= manifest.max_length
    )
    if not fits:
        raise WhetError(f"{folder / part} is damaged", got="its files do not agree", try_="prepare the data again")
    return ChatPart(arrays, facts, row_length=manifest.max_length)


def _mapped(path: Path, kind: str) -> Array:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=kind)  # An empty file cannot be mapped.
    return np.memmap(path, dtype=kind, mode="r")


def _check_file(folder: Path, name: str, *, size: int, sha256: str | None) -> None:
    path = folder / name
    try:
        found = path.stat().st_size
        is_right = found == size and (sha256 is None or facts_of(path).sha256 == sha256)
    except OSError as error:
        raise WhetError(f"{path} cannot be read", got=error.strerror, try_="prepare the data again") from None
    if not is_right:
        got = f"{found:,} bytes, not {size:,}" if found != size else "other bytes than were written"
        raise WhetError(f"{path} is damaged", got=got, try_="prepare the data again")
