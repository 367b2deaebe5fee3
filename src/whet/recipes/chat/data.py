"""The data of the chat recipe: rows of equal length, packed with prepared or embedded conversations."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.base.units import format_count, format_plural
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.config import ChatConfig, data_folders, read_manifests, resolve_seq_len
from whet.recipes.chat.dataset import ChatDataset, ChatSplit, TokenRow, open_dataset
from whet.recipes.chat.tokenizer import ChatTokenizer

_NUM_QUESTIONS = 4
_MAX_MEMORY_BYTES = 1 << 30
"""The maximum size of a split in memory. The rows of larger splits are read from disk on demand."""


class PackedRows:
    """A map-style dataset of the rows of a split, from one or more folders. Rows are padded at the end."""

    def __init__(self, splits: Sequence[ChatSplit], *, row_length: int, pad_id: int) -> None:
        self._splits = [split.repack(row_length) for split in splits]
        # The inputs are all tokens but the last, the targets all tokens but the first. With one more token, the model
        # sees exactly `row_length` positions.
        self._length = row_length + 1
        self._pad_id = pad_id

    def __len__(self) -> int:
        return sum(split.num_rows for split in self._splits)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return tokens (int32), is_start (true at the start of a document) and is_loss, each (S), and loss_bytes."""
        for split in self._splits:
            if index < split.num_rows:
                return self._pad(split.row(index))
            index -= split.num_rows
        raise IndexError(index)

    def _pad(self, row: TokenRow) -> dict[str, Tensor]:
        size = len(row.tokens)
        tokens = torch.full((self._length,), self._pad_id, dtype=torch.int32)
        tokens[:size] = torch.from_numpy(row.tokens)
        is_start = torch.zeros(self._length, dtype=torch.bool)
        is_start[:size] = torch.from_numpy(row.positions == 0)
        is_start[size:][:1] = True  # Padding is a separate document, so that no other token attends to it.
        is_loss = torch.zeros(self._length, dtype=torch.bool)
        is_loss[:size] = torch.from_numpy(row.is_loss != 0)
        is_loss &= ~is_start  # The first token of a document has no context to be predicted from.
        return {
            "tokens": tokens,
            "is_start": is_start,
            "is_loss": is_loss,
            "loss_bytes": torch.tensor(row.loss_bytes, dtype=torch.int32),
        }

    def in_memory(self) -> "PackedRows | dict[str, Tensor]":
        """Return the rows as a dict of tensors if they are small enough, else this dataset."""
        if not len(self) or 6 * self._length * len(self) > _MAX_MEMORY_BYTES:
            return self
        rows = [self[index] for index in range(len(self))]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The beginning of a conversation, up to an answer, and the reference answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData:
    """The train, validation and test splits, with the tokenizer and the resolved architecture."""

    train: Any
    val: Any
    test: Any
    arch: ChatArch
    """The architecture with a resolved seq_len."""
    context_length: int
    """The resolved seq_len, the number of tokens per row."""
    tokenizer: ChatTokenizer
    num_rows: int
    longest: int
    """The number of tokens of the longest document."""
    fingerprint: str
    questions: tuple[Question, ...]
    """Questions from the val split. Evaluations show the model's answers to them."""
    notes: tuple[str, ...] = ()


def read_chat(config: ChatConfig) -> ChatData:
    """Read the conversations of a config: its prepared folders, or the embedded conversations if it names none."""
    datasets = _open_datasets(config)
    tokenizer = datasets[0].tokenizer
    longest = max(split.facts.longest for data in datasets for split in (data.train, data.val, data.test))
    arch = resolve_seq_len(config.arch, longest=longest)
    assert isinstance(arch.seq_len, int)
    train, val, test = (
        PackedRows(splits, row_length=arch.seq_len, pad_id=tokenizer.pad_id)
        for splits in zip(*((data.train, data.val, data.test) for data in datasets), strict=True)
    )
    for name, rows in (("train", train), ("val", val)):
        if not len(rows):
            raise UsageError(
                f"the {name} split is empty", got="0 rows", try_="more conversations, or --train-split 0.9"
            )
    num_tokens = sum(data.train.facts.tokens for data in datasets)
    notes = (
        f"{format_plural(sum(data.train.facts.conversations for data in datasets), 'conversation')} to train on, "
        f"{format_count(num_tokens)} tokens in {format_plural(len(train), 'row')} of {arch.seq_len}",
        arch.summary(tokenizer.vocab_size),
        *_overlap_note(datasets),
    )
    return ChatData(
        train=train.in_memory(),
        val=val.in_memory(),
        test=test.in_memory() if len(test) else None,
        arch=arch,
        context_length=arch.seq_len,
        tokenizer=tokenizer,
        num_rows=len(train),
        longest=longest,
        fingerprint="+".join(data.fingerprint for data in datasets),
        questions=_sample_questions(datasets[0].val, tokenizer, max_tokens=arch.seq_len),
        notes=notes,
    )


def _open_datasets(config: ChatConfig) -> list[ChatDataset]:
    folders = data_folders(config)
    if not folders:
        from whet.recipes.chat.embedded import open_embedded

        return [open_embedded()]
    read_manifests(folders)
    return [open_dataset(folder) for folder in folders]


def _overlap_note(datasets: Sequence[ChatDataset]) -> tuple[str, ...]:
    """Return a warning if held-out conversations are in another folder's training split, which inflates scores."""
    if len(datasets) < 2:
        return ()
    held_out = Counter(
        _document_hash(document) for data in datasets for split in (data.val, data.test) for document in split
    )
    trained = {key for data in datasets for document in data.train if (key := _document_hash(document)) in held_out}
    num_shared = sum(held_out[key] for key in trained)
    if not num_shared:
        return ()
    return (
        f"{num_shared:,} of {held_out.total():,} conversations of val and test are in another folder's train split",
    )


def _document_hash(document: TokenRow) -> bytes:
    return blake2b(document.tokens.tobytes(), digest_size=8).digest()


def _sample_questions(split: ChatSplit, tokenizer: ChatTokenizer, *, max_tokens: int) -> tuple[Question, ...]:
    """Return the first question of a few documents, evenly spaced over a split."""
    indices = range(0, split.num_documents, max(1, split.num_documents // _NUM_QUESTIONS))
    questions = (_first_question(split.document(index).tokens.tolist(), tokenizer) for index in indices)
    fitting = [question for question in questions if question is not None and len(question.prompt) < max_tokens]
    return tuple(fitting[:_NUM_QUESTIONS])


def _first_question(ids: list[int], tokenizer: ChatTokenizer) -> Question | None:
    mark = tokenizer.role_ids["assistant"]
    if mark not in ids:
        return None
    begin = ids.index(mark) + 1
    answer = tuple(takewhile(lambda token: token != tokenizer.end_id, ids[begin:]))
    return Question(prompt=tuple(ids[:begin]), answer=answer)
