"""How do batches of tokenized turns become documents? All conversations of a batch at once, in arrays.

It writes what template.py says, some times faster than turn by turn; only conversations that are too long take the long
way.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from whet.recipes.chat.conversation import Loss, Turn
from whet.recipes.chat.fitting import pieces_of
from whet.recipes.chat.template import TurnIds, loss_bytes, write
from whet.recipes.chat.tokenizer import ChatTokenizer
from whet.recipes.chat.writing import Document, token_type


class Assembled(NamedTuple):
    """What became of one conversation."""

    documents: tuple[Document, ...]
    """One, where it was short enough."""
    num_cut: int = 0
    """Documents whose texts had to be shortened."""


def assemble(
    conversations: Sequence[tuple[Turn, ...]],
    ids: Sequence[Sequence[int]],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    loss: Loss,
) -> Iterator[Assembled]:
    """The documents of each conversation; `ids` are those of all their turns in order."""
    turns = [turn for conversation in conversations for turn in conversation]
    kind = token_type(tokenizer.vocab_size)
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids)) + 2
    ends = np.cumsum(lengths)
    starts = ends - lengths
    roles = np.array([tokenizer.role_ids[turn.role] for turn in turns], dtype=kind)
    is_learned = (roles == tokenizer.role_ids["assistant"]) | (loss == "all")
    sizes = np.array([len(text) if text.isascii() else len(text.encode()) for _, text in turns], dtype=np.int64)

    tokens = np.empty(int(ends[-1]), dtype=kind)
    is_text = np.ones(len(tokens), dtype=np.bool_)
    is_text[starts] = is_text[ends - 1] = False
    tokens[starts] = roles
    tokens[ends - 1] = tokenizer.end_id
    tokens[is_text] = np.fromiter(chain.from_iterable(ids), dtype=kind, count=len(tokens) - 2 * len(ids))

    after = np.cumsum([len(conversation) for conversation in conversations])
    first = np.concatenate([[0], after[:-1]])
    mask = np.repeat(is_learned.astype(np.uint8), lengths)
    mask[starts] = loss == "all"
    mask[starts[first]] = 0
    learned_bytes = np.add.reduceat(np.where(is_learned, sizes, 0), first).tolist()
    places = zip(starts[first].tolist(), ends[after - 1].tolist(), strict=True)
    for number, (start, end) in enumerate(places):
        if end - start <= max_length:
            whole = Document(tokens[start:end].tobytes(), mask[start:end].tobytes(), learned_bytes[number])
            yield Assembled((whole,))
        else:
            inside = range(int(first[number]), int(after[number]))
            as_ids = [TurnIds(turns[place].role, ids[place], True, int(sizes[place])) for place in inside]
            yield _cut_apart(as_ids, tokenizer, max_length=max_length, loss=loss)


def _cut_apart(turns: Sequence[TurnIds], tokenizer: ChatTokenizer, *, max_length: int, loss: Loss) -> Assembled:
    kind = token_type(tokenizer.vocab_size)
    pieces = pieces_of(turns, max_length=max_length)
    documents = []
    for piece in pieces:
        tokens, mask = write(piece.turns, tokenizer, loss=loss)
        size = loss_bytes(piece.turns, tokenizer, loss=loss)
        documents.append(Document(np.array(tokens, dtype=kind).tobytes(), mask, size))
    return Assembled(tuple(documents), sum(piece.is_cut for piece in pieces))
