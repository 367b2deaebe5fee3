"""Prepared conversations on disk: pack documents into rows, write them, and read them memory-mapped."""

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
ARRAYS = {"tokens": None, "loss": "|u1", "starts": "<i8", "loss_bytes": "<i8", "rows": "<i8"}
"""The files of a split and their dtypes. The dtype of the tokens depends on the vocabulary (see the manifest)."""

# --- Packing ----------------------------------------------------------------------------------------------------------

# More open rows waste less space, but reorder documents more and use more memory.
MAX_OPEN_ROWS = 64


class Packer(Generic[Item]):
    """Packs documents into rows by best fit, with a limited number of open rows."""

    def __init__(self, row_length: int, *, max_open_rows: int = MAX_OPEN_ROWS) -> None:
        self._row_length = row_length
        self._max_open_rows = max_open_rows
        self._rows: dict[int, list[Item]] = {}
        # (free tokens, row number), sorted with the fullest row first.
        self._free: list[tuple[int, int]] = []
        self._next = 0

    def add(self, item: Item, length: int) -> list[Item] | None:
        """Add a document. Return a row if one was completed, else None."""
        # Find the fullest row with enough space. -1 sorts before all row numbers with the same free space.
        index = bisect_left(self._free, (length, -1))
        if index < len(self._free):
            free, row = self._free.pop(index)
        else:
            free, row = self._row_length, self._next
            self._rows[row] = []
            self._next += 1
        self._rows[row].append(item)
        insort(self._free, (free - length, row))
        # Close the fullest row if it is full, or if there are too many open rows: it wastes the least space.
        if self._free[0][0] == 0 or len(self._free) > self._max_open_rows:
            return self._rows.pop(self._free.pop(0)[1])
        return None

    def rest(self) -> Iterator[list[Item]]:
        """Yield the incomplete rows that are left at the end, the fullest first."""
        for _, row in self._free:
            yield self._rows.pop(row)


def pack_in_order(lengths: Array, *, row_length: int) -> Array:
    """Pack documents without reordering them. Return the first document of each row, followed by their number.

    >>> pack_in_order(np.array([3, 2, 4, 1, 5]), row_length=5).tolist()
    [0, 2, 4, 5]
    """
    ends = np.cumsum(lengths)
    rows, taken = [0], 0
    while rows[-1] < len(ends):
        # At least one document per row, even if it is longer than the row.
        following = max(int(np.searchsorted(ends, taken + row_length, side="right")), rows[-1] + 1)
        rows.append(following)
        taken = int(ends[following - 1])
    return np.array(rows, dtype=np.int64)


# --- Writing ----------------------------------------------------------------------------------------------------------


class Document(NamedTuple):
    """A tokenized conversation, or a segment of one, ready to be written."""

    tokens: bytes
    """The token ids, in the dtype of `token_type`."""
    mask: bytes
    """The loss mask, one byte per token."""
    loss_bytes: int
    """The size in bytes of the text of the loss tokens."""


def token_type(vocab_size: int) -> str:
    """Return the smallest unsigned dtype for the token ids of a vocabulary.

    >>> token_type(65_536), token_type(65_537)
    ('<u2', '<u4')
    """
    return "<u2" if vocab_size <= 2**16 else "<u4"


class SplitWriter:
    """Writes the files of one split into a temporary folder."""

    def __init__(self, draft: Path, split: Split, *, max_length: int) -> None:
        self._split = split
        self._packer: Packer[Document] = Packer(max_length)
        durable.make_directory(draft / split)
        self._files = {name: durable.StreamedFile(draft / split / f"{name}.bin") for name in ARRAYS}
        self._documents = self._rows = self._tokens = self._loss_tokens = self._loss_bytes = self._longest = 0
        # Arrays of offsets have one more entry than items: item i extends from offset i to offset i + 1.
        self._append("starts", 0)
        self._append("rows", 0)

    def add(self, document: Document) -> None:
        """Add a document, which must not be longer than a row."""
        row = self._packer.add(document, len(document.mask))
        if row is not None:
            self._write(row)

    def close(self, *, conversations: int) -> tuple[SplitFacts, dict[str, ChatFile]]:
        """Write the rows that are still open, and return the sizes of the split and the hashes of the files."""
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
        written = {f"{self._split}/{name}.bin": file.close() for name, file in self._files.items()}
        return facts, {name: ChatFile(bytes=file.size, sha256=file.sha256) for name, file in written.items()}

    def abandon(self) -> None:
        """Close the files after an error, without completing their content."""
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
            self._append("starts", self._tokens)
            self._append("loss_bytes", loss_bytes)
        self._documents += len(row)
        self._rows += 1
        self._append("rows", self._documents)

    def _append(self, name: str, number: int) -> None:
        self._files[name].append(number.to_bytes(8, "little"))


# --- Reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A document, or a row of several documents: three arrays of the same length."""

    tokens: Array
    """int32 token ids."""
    is_loss: Array
    """uint8: 1 if the prediction of this token is included in the loss."""
    positions: Array
    """int32 positions within the document. A document starts at each 0."""
    loss_bytes: int
    """The size in bytes of the text of the loss tokens."""


class ChatSplit:
    """The documents of a split, packed into rows of up to `row_length` tokens."""

    def __init__(self, arrays: dict[str, Array], facts: SplitFacts, *, row_length: int) -> None:
        self.facts = facts
        self.tokens = arrays["tokens"]
        """All tokens, memory-mapped; uint16 or uint32."""
        self.loss = arrays["loss"]
        """The loss mask, memory-mapped; uint8."""
        self.starts = arrays["starts"]
        """(documents + 1), int64: the first token of each document."""
        self.loss_bytes = arrays["loss_bytes"]
        """(documents), int64: the size in bytes of the text of each document's loss tokens."""
        self.rows = arrays["rows"]
        """(rows + 1), int64: the first document of each row."""
        self.row_length = row_length

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_rows(self) -> int:
        return len(self.rows) - 1

    def document(self, index: int) -> TokenRow:
        return self._read(index, index + 1)

    def row(self, index: int) -> TokenRow:
        return self._read(int(self.rows[index]), int(self.rows[index + 1]))

    def repack(self, row_length: int) -> "ChatSplit":
        """Return the same documents packed into rows of a different length."""
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

    def _read(self, first: int, end: int) -> TokenRow:
        starts = self.starts[first : end + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        indices = np.arange(tokens.start, tokens.stop, dtype=np.int64)
        positions = indices - np.repeat(starts[:-1], np.diff(starts))
        return TokenRow(
            tokens=self.tokens[tokens].astype(np.int32),
            is_loss=np.array(self.loss[tokens]),
            positions=positions.astype(np.int32),
            loss_bytes=int(self.loss_bytes[first:end].sum()),
        )


@dataclass(frozen=True, kw_only=True)
class ChatDataset:
    """An opened folder of prepared conversations."""

    folder: Path
    manifest: ChatManifest
    tokenizer: ChatTokenizer
    train: ChatSplit
    val: ChatSplit
    test: ChatSplit

    @property
    def fingerprint(self) -> str:
        """A hash of the hashes of all files."""
        hashes = [f"{name} {file.sha256}" for name, file in sorted(self.manifest.files.items())]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def open_dataset(folder: Path, *, verify: bool = False) -> ChatDataset:
    """Open a folder of prepared conversations and check the file sizes. With `verify`, also check the hashes."""
    manifest = read_manifest(folder)
    # Accept only known file names, so that a manipulated manifest cannot point outside the folder.
    if set(manifest.files) != {TOKENIZER, *(f"{split}/{name}.bin" for split in SPLITS for name in ARRAYS)}:
        got = ", ".join(sorted(manifest.files))[:200]
        raise WhetError(f"{folder} is damaged", got=f"its manifest lists {got}", try_="prepare the data again")
    for name, facts in manifest.files.items():
        _check_file(folder, name, size=facts.bytes, sha256=facts.sha256 if verify or name == TOKENIZER else None)
    tokenizer = ChatTokenizer.from_json(read_regular_file(folder / TOKENIZER, follows_links=True).decode())
    if tokenizer.vocab_size != manifest.vocab_size:
        raise WhetError(
            f"{folder / TOKENIZER} is a different tokenizer",
            got=f"{tokenizer.vocab_size} ids, not {manifest.vocab_size}",
            try_="prepare the data again",
        )
    splits = {split: _open_split(folder, split, manifest) for split in SPLITS}
    if verify and any(int(split.tokens.max(initial=0)) >= tokenizer.vocab_size for split in splits.values()):
        raise WhetError(f"{folder} is damaged", got="ids outside the vocabulary", try_="prepare the data again")
    return ChatDataset(folder=folder, manifest=manifest, tokenizer=tokenizer, **splits)


def _open_split(folder: Path, split: Split, manifest: ChatManifest) -> ChatSplit:
    facts = manifest.splits[split]
    arrays = {
        name: _map_array(folder / split / f"{name}.bin", dtype or manifest.token_type) for name, dtype in ARRAYS.items()
    }
    starts, rows = arrays["starts"], arrays["rows"]
    is_consistent = (
        len(arrays["tokens"]) == len(arrays["loss"]) == facts.tokens
        and len(starts) == facts.documents + 1 == len(arrays["loss_bytes"]) + 1
        and len(rows) == facts.rows + 1
        and (int(starts[0]), int(starts[-1]), int(rows[0]), int(rows[-1])) == (0, facts.tokens, 0, facts.documents)
        and bool((np.diff(starts) > 0).all())
        and bool((np.diff(rows) > 0).all())
        and int(np.diff(starts).max(initial=0)) == facts.longest
        and int(np.diff(starts[rows]).max(initial=0)) <= manifest.max_length
    )
    if not is_consistent:
        raise WhetError(f"{folder / split} is damaged", got="its files do not agree", try_="prepare the data again")
    return ChatSplit(arrays, facts, row_length=manifest.max_length)


def _map_array(path: Path, dtype: str) -> Array:
    if path.stat().st_size == 0:
        return np.empty(0, dtype=dtype)  # An empty file cannot be memory-mapped.
    return np.memmap(path, dtype=dtype, mode="r")


def _check_file(folder: Path, name: str, *, size: int, sha256: str | None) -> None:
    path = folder / name
    try:
        actual = path.stat().st_size
        is_intact = actual == size and (sha256 is None or hash_file(path).sha256 == sha256)
    except OSError as error:
        raise WhetError(f"{path} cannot be read", got=error.strerror, try_="prepare the data again") from None
    if not is_intact:
        got = f"{actual:,} bytes, not {size:,}" if actual != size else "its hash differs from the manifest"
        raise WhetError(f"{path} is damaged", got=got, try_="prepare the data again")
