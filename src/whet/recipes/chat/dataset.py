"""Prepared conversations on disk: packing into rows, writing and memory-mapped reading."""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from whet.base.errors import UsageError, WhetError
from whet.recipes.chat.manifest import (
    SPLITS,
    TOKENIZER,
    ChatFile,
    ChatManifest,
    Split,
    SplitFacts,
    hash_file,
    read_manifest,
)
from whet.recipes.chat.tokenizer import ChatTokenizer
from whet.run import durable
from whet.run.disk import read_regular_file

Item = TypeVar("Item")
Array = np.ndarray[Any, np.dtype[Any]]

MAX_OPEN_ROWS = 64
"""So many rows are held in memory at most."""


class Packer(Generic[Item]):
    """Documents in, full rows out; the fullest row goes first, so that memory is bounded."""

    def __init__(self, row_length: int, *, open_rows: int = MAX_OPEN_ROWS) -> None:
        self._row_length = row_length
        self._most = open_rows
        self._rows: dict[int, list[Item]] = {}
        self._room: list[tuple[int, int]] = []
        """(tokens that are free, number of the row), the fullest first."""
        self._next = 0

    def add(self, document: Item, length: int) -> list[Item] | None:
        """Takes a document; gives a row that is complete now, if there is one."""
        place = bisect_left(self._room, (length, -1))
        if place < len(self._room):
            room, row = self._room.pop(place)
        else:
            room, row = self._row_length, self._next
            self._rows[row] = []
            self._next += 1
        self._rows[row].append(document)
        insort(self._room, (room - length, row))
        if self._room[0][0] == 0 or len(self._room) > self._most:
            return self._rows.pop(self._room.pop(0)[1])
        return None

    def rest(self) -> Iterator[list[Item]]:
        """The rows that are still open, the fullest first."""
        for _, row in self._room:
            yield self._rows.pop(row)


def pack_in_order(lengths: Array, *, row_length: int) -> Array:
    """The first document of each row and the end, for documents that stay in their order.

    >>> rows_of(np.array([3, 2, 4, 1, 5]), row_length=5).tolist()
    [0, 2, 4, 5]
    """
    ends = np.cumsum(lengths)
    rows, taken = [0], 0
    while rows[-1] < len(ends):
        following = max(int(np.searchsorted(ends, taken + row_length, side="right")), rows[-1] + 1)
        rows.append(following)
        taken = int(ends[following - 1])
    return np.array(rows, dtype=np.int64)


ARRAYS = {"tokens": None, "loss": "|u1", "starts": "<i8", "loss_bytes": "<i8", "rows": "<i8"}
"""The files of a part with the type of their numbers; of tokens the manifest says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A document, or a row of several: three arrays of one length."""

    tokens: Array
    """int32."""
    is_loss: Array
    """uint8: 1 where this token is to be predicted, from the ones before it."""
    positions: Array
    """int32: places within the document; each 0 starts a document, which sees nothing before it."""
    loss_bytes: int
    """Bytes of the text behind the loss tokens."""


class ChatSplit:
    """One part: documents, and rows of them that fill `row_length` tokens as well as they can."""

    def __init__(self, arrays: dict[str, Array], facts: SplitFacts, *, row_length: int) -> None:
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

    def document(self, index: int) -> TokenRow:
        """One document."""
        return self._sample(index, index + 1)

    def row(self, index: int) -> TokenRow:
        """One packed row."""
        return self._sample(int(self.rows[index]), int(self.rows[index + 1]))

    def repacked(self, row_length: int) -> "ChatSplit":
        """The same documents in rows of another length."""
        if row_length == self.row_length:
            return self
        if row_length < self.facts.longest:
            raise UsageError(
                "the conversations were prepared for longer rows",
                got=f"{row_length} tokens; the longest document has {self.facts.longest}",
                try_=f"{self.facts.longest} or more; or whet data chat ... --max-length {row_length}",
            )
        rows = pack_in_order(np.diff(self.starts), row_length=row_length)
        arrays = {"tokens": self.tokens, "loss": self.loss, "starts": self.starts, "loss_bytes": self.loss_bytes}
        return ChatSplit({**arrays, "rows": rows}, self.facts, row_length=row_length)

    def __iter__(self) -> Iterator[TokenRow]:
        return map(self.document, range(self.num_documents))

    def _sample(self, first: int, end: int) -> TokenRow:
        starts = self.starts[first : end + 1]
        here = slice(int(starts[0]), int(starts[-1]))
        places = np.arange(here.start, here.stop, dtype=np.int64)
        positions = places - np.repeat(starts[:-1], np.diff(starts))
        return TokenRow(
            tokens=self.tokens[here].astype(np.int32),
            is_loss=np.array(self.loss[here]),
            positions=positions.astype(np.int32),
            loss_bytes=int(self.loss_bytes[first:end].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class ChatDataset:
    """An opened folder."""

    folder: Path
    manifest: ChatManifest
    tokenizer: ChatTokenizer
    train: ChatSplit
    val: ChatSplit
    test: ChatSplit

    @property
    def fingerprint(self) -> str:
        """What tells this data from other data: the hash of all hashes."""
        known = [f"{name} {file.sha256}" for name, file in sorted(self.manifest.files.items())]
        return hashlib.sha256("\n".join(known).encode()).hexdigest()


def open_dataset(folder: Path, *, verify: bool = False) -> ChatDataset:
    """The prepared conversations in a folder; sizes are looked at, and every byte where `verify` is set."""
    manifest = read_manifest(folder)
    # The names are ours: one that a manifest made up could lead out of the folder.
    if set(manifest.files) != {TOKENIZER, *(f"{part}/{name}.bin" for part in SPLITS for name in ARRAYS)}:
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
    parts = {part: _open_split(folder, part, manifest) for part in SPLITS}
    if verify and any(int(part.tokens.max(initial=0)) >= tokenizer.vocab_size for part in parts.values()):
        raise WhetError(f"{folder} is damaged", got="tokens that its vocabulary lacks", try_="prepare the data again")
    return ChatDataset(folder=folder, manifest=manifest, tokenizer=tokenizer, **parts)


def _open_split(folder: Path, part: Split, manifest: ChatManifest) -> ChatSplit:
    facts = manifest.parts[part]
    arrays = {
        name: _map_array(folder / part / f"{name}.bin", kind or manifest.token_type) for name, kind in ARRAYS.items()
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
    return ChatSplit(arrays, facts, row_length=manifest.max_length)


def _map_array(path: Path, kind: str) -> Array:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=kind)  # An empty file cannot be mapped.
    return np.memmap(path, dtype=kind, mode="r")


def _check_file(folder: Path, name: str, *, size: int, sha256: str | None) -> None:
    path = folder / name
    try:
        found = path.stat().st_size
        is_right = found == size and (sha256 is None or hash_file(path).sha256 == sha256)
    except OSError as error:
        raise WhetError(f"{path} cannot be read", got=error.strerror, try_="prepare the data again") from None
    if not is_right:
        got = f"{found:,} bytes, not {size:,}" if found != size else "other bytes than were written"
        raise WhetError(f"{path} is damaged", got=got, try_="prepare the data again")


_STARTS, _BYTES, _ROWS = "starts", "loss_bytes", "rows"


class Document(NamedTuple):
    """What attends to itself only, ready to be written."""

    tokens: bytes
    """Numbers of the type that holds every id."""
    mask: bytes
    """A byte for each token."""
    loss_bytes: int


def token_type(vocab_size: int) -> str:
    """The smallest unsigned type that holds every id.

    >>> token_type(65_536), token_type(65_537)
    ('<u2', '<u4')
    """
    return "<u2" if vocab_size <= 2**16 else "<u4"


class SplitWriter:
    """The files of one part, in a folder that is not published yet."""

    def __init__(self, draft: Path, part: Split, *, max_length: int) -> None:
        self._part = part
        self._packer: Packer[Document] = Packer(max_length)
        durable.make_directory(draft / part)
        self._files = {name: durable.StreamedFile(draft / part / f"{name}.bin") for name in ARRAYS}
        self._documents = self._rows = self._tokens = self._loss_tokens = self._loss_bytes = self._longest = 0
        self._append(_STARTS, 0)
        self._append(_ROWS, 0)

    def add(self, document: Document) -> None:
        """Takes a document of at most a row's length."""
        row = self._packer.add(document, len(document.mask))
        if row is not None:
            self._write(row)

    def close(self, *, conversations: int) -> tuple[SplitFacts, dict[str, ChatFile]]:
        """Writes what is still open; how much there is, and what the files hold."""
        for row in self._packer.rest():
            self._write(row)
        facts = SplitFacts(
            conversations=conversations,
            documents=self._documents,
            rows=self._rows,
            tokens=self._tokens,
            loss_tokens=self._loss_tokens,
            loss_bytes=self._loss_bytes,
            longest=self._longest,
        )
        written = {f"{self._part}/{name}.bin": file.close() for name, file in self._files.items()}
        return facts, {name: ChatFile(bytes=one.size, sha256=one.sha256) for name, one in written.items()}

    def abandon(self) -> None:
        """Lets go of the files: the whole folder is given up."""
        for file in self._files.values():
            file.abandon()

    def _write(self, row: list[Document]) -> None:
        for tokens, mask, loss_bytes in row:
            self._files["tokens"].append(tokens)
            self._files["loss"].append(mask)
            self._tokens += len(mask)
            self._loss_tokens += mask.count(1)
            self._loss_bytes += loss_bytes
            self._longest = max(self._longest, len(mask))
            self._append(_STARTS, self._tokens)
            self._append(_BYTES, loss_bytes)
        self._documents += len(row)
        self._rows += 1
        self._append(_ROWS, self._documents)

    def _append(self, name: str, number: int) -> None:
        self._files[name].append(number.to_bytes(8, "little"))
