"""What does the trainer get to see? Rows of one length, each filled with documents and marked where they begin."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.recipes.chat.arch import Arch
from whet.recipes.chat.dataset import ChatPart
from whet.recipes.chat.tokenizer import ChatTokenizer

_MOST_BYTES = 1 << 30
"""Larger parts stay in their files, and rows are read when they are needed."""


class Rows:
    """The rows of a part, of several folders one after the other. Where a row is not full, padding is at its end."""

    def __init__(self, parts: Sequence[ChatPart], *, row_length: int, pad_id: int) -> None:
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

    def _padded(self, part: ChatPart, index: int) -> dict[str, Tensor]:
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

    def in_memory(self) -> "Rows | dict[str, Tensor]":
        """As columns where they are small enough to be held."""
        if not len(self) or 6 * self._length * len(self) > _MOST_BYTES:
            return self
        samples = [self[index] for index in range(len(self))]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatData:
    """Three parts of rows, and what is needed to speak with the model."""

    train: Any
    val: Any
    test: Any
    arch: Arch
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


def questions_of(part: ChatPart, tokenizer: ChatTokenizer, *, count: int, most_tokens: int) -> tuple[Question, ...]:
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
    answer = tuple(_until(ids[begin:], tokenizer.end_id))
    return Question(prompt=tuple(ids[:begin]), answer=answer)


def _until(ids: Sequence[int], end_id: int) -> Iterator[int]:
    for number in ids:
        if number == end_id:
            return
        yield number
