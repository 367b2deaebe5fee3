"""From a config to the rows that a training reads."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.base.units import format_count, format_plural
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.chat.config import ChatConfig, data_folders, read_manifests, resolve_seq_len
from whet.recipes.chat.dataset import ChatDataset, ChatSplit, TokenRow, open_dataset
from whet.recipes.chat.tokenizer import ChatTokenizer

NUM_QUESTIONS = 4
_MAX_MEMORY_BYTES = 1 << 30
"""Larger parts stay in their files, and rows are read when they are needed."""


class PackedRows:
    """The rows of a part, of several folders one after the other. Where a row is not full, padding is at its end."""

    def __init__(self, parts: Sequence[ChatSplit], *, row_length: int, pad_id: int) -> None:
        self._parts = [part.repacked(row_length) for part in parts]
        # One more: the last token is a target only, so that the model sees a round number of places.
        self._length = row_length + 1
        self._pad_id = pad_id

    def __len__(self) -> int:
        return sum(part.num_rows for part in self._parts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """tokens int32, is_start (a document begins), is_loss (to be predicted), each (S); loss_bytes: of that text."""
        for part in self._parts:
            if index < part.num_rows:
                return self._padded(part, index)
            index -= part.num_rows
        raise IndexError(index)

    def _padded(self, part: ChatSplit, index: int) -> dict[str, Tensor]:
        sample = part.row(index)
        size = len(sample.tokens)
        tokens = torch.full((self._length,), self._pad_id, dtype=torch.int32)
        tokens[:size] = torch.from_numpy(sample.tokens)
        is_start = torch.zeros(self._length, dtype=torch.bool)
        is_start[:size] = torch.from_numpy(sample.positions == 0)
        is_start[size:][:1] = True  # Padding is a document of its own, which no other looks at.
        is_loss = torch.zeros(self._length, dtype=torch.bool)
        is_loss[:size] = torch.from_numpy(sample.is_loss != 0)
        is_loss &= ~is_start  # Nothing of its own document stands before a first token.
        return {
            "tokens": tokens,
            "is_start": is_start,
            "is_loss": is_loss,
            "loss_bytes": torch.tensor(sample.loss_bytes, dtype=torch.int32),
        }

    def in_memory(self) -> "PackedRows | dict[str, Tensor]":
        """As columns where they are small enough to be held."""
        if not len(self) or 6 * self._length * len(self) > _MAX_MEMORY_BYTES:
            return self
        samples = [self[index] for index in range(len(self))]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData:
    """Three parts of rows, and what is needed to speak with the model."""

    train: Any
    val: Any
    test: Any
    arch: ChatArch
    """With a number for seq_len."""
    num_places: int
    """That number: tokens of a row."""
    tokenizer: ChatTokenizer
    num_rows: int
    longest: int
    """Tokens of the longest document."""
    fingerprint: str
    questions: tuple["Question", ...]
    """From the dev part: answered while training, to be looked at."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A conversation up to an answer, and that answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def sample_questions(
    part: ChatSplit, tokenizer: ChatTokenizer, *, count: int, most_tokens: int
) -> tuple[Question, ...]:
    """The first answers of a few documents spread over a part."""
    spread = range(0, part.num_documents, max(1, part.num_documents // max(1, count)))
    found = (_first_question(part.document(index).tokens.tolist(), tokenizer) for index in spread)
    fitting = [question for question in found if question is not None and len(question.prompt) < most_tokens]
    return tuple(fitting[:count])


def _first_question(ids: Sequence[int], tokenizer: ChatTokenizer) -> Question | None:
    mark = tokenizer.role_ids["assistant"]
    if mark not in ids:
        return None
    begin = list(ids).index(mark) + 1
    answer = tuple(_take_until(ids[begin:], tokenizer.end_id))
    return Question(prompt=tuple(ids[:begin]), answer=answer)


def _take_until(ids: Sequence[int], end_id: int) -> Iterator[int]:
    for number in ids:
        if number == end_id:
            return
        yield number


def read_chat(config: ChatConfig) -> ChatData:
    """All three parts."""
    datasets = _open_datasets(config)
    tokenizer = datasets[0].tokenizer
    longest = max(part.facts.longest for each in datasets for part in (each.train, each.val, each.test))
    arch = resolve_seq_len(config.arch, longest=longest)
    assert isinstance(arch.seq_len, int)
    train, val, test = (
        PackedRows(parts, row_length=arch.seq_len, pad_id=tokenizer.pad_id)
        for parts in (
            [each.train for each in datasets],
            [each.val for each in datasets],
            [each.test for each in datasets],
        )
    )
    for name, part in (("train", train), ("val", val)):
        if not len(part):
            raise UsageError(f"the {name} part is empty", got="0 rows", try_="more conversations, or --train-split 0.9")
    num_tokens = sum(each.train.facts.tokens for each in datasets)
    notes = (
        f"{format_plural(sum(each.train.facts.conversations for each in datasets), 'conversation')} to train on, "
        f"{format_count(num_tokens)} tokens in {format_plural(len(train), 'row')} of {arch.seq_len}",
        arch.words(tokenizer.vocab_size),
        *_overlap_note(datasets),
    )
    return ChatData(
        train=train.in_memory(),
        val=val.in_memory(),
        test=test.in_memory() if len(test) else None,
        arch=arch,
        num_places=arch.seq_len,
        tokenizer=tokenizer,
        num_rows=len(train),
        longest=longest,
        fingerprint="+".join(each.fingerprint for each in datasets),
        questions=sample_questions(datasets[0].val, tokenizer, count=NUM_QUESTIONS, most_tokens=arch.seq_len),
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
    """What is held out in one folder and trained on in another: then a score says less than it seems to."""
    if len(datasets) < 2:
        return ()
    held = Counter(_document_hash(document) for each in datasets for part in (each.val, each.test) for document in part)
    trained = {mark for each in datasets for document in each.train if (mark := _document_hash(document)) in held}
    num_shared = sum(held[mark] for mark in trained)
    if not num_shared:
        return ()
    return (f"{num_shared:,} of {held.total():,} conversations for dev and test are trained on too, in another folder",)


def _document_hash(document: TokenRow) -> bytes:
    return blake2b(document.tokens.tobytes(), digest_size=8).digest()
