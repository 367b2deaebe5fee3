"""How do documents come onto the disk? Packed into rows, and appended to the files of their part."""

from pathlib import Path
from typing import NamedTuple

from whet.recipes.chat.dataset import ARRAYS
from whet.recipes.chat.manifest import FileFacts, Part, PartFacts
from whet.recipes.chat.packing import Packer
from whet.run import durable

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


class PartWriter:
    """The files of one part, in a folder that is not published yet."""

    def __init__(self, draft: Path, part: Part, *, max_length: int) -> None:
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

    def close(self, *, conversations: int) -> tuple[PartFacts, dict[str, FileFacts]]:
        """Writes what is still open; how much there is, and what the files hold."""
        for row in self._packer.rest():
            self._write(row)
        facts = PartFacts(
            conversations=conversations,
            documents=self._documents,
            rows=self._rows,
            tokens=self._tokens,
            loss_tokens=self._loss_tokens,
            loss_bytes=self._loss_bytes,
            longest=self._longest,
        )
        written = {f"{self._part}/{name}.bin": file.close() for name, file in self._files.items()}
        return facts, {name: FileFacts(bytes=one.size, sha256=one.sha256) for name, one in written.items()}

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
