"""Encode conversations as token ids with a loss mask, and split those that are longer than a row."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from whet.recipes.chat.conversation import Loss, Role
from whet.recipes.chat.tokenizer import ChatTokenizer

TEMPLATE = "<|role|> text <|end|>"
"""Name of this layout in manifests."""
MIN_LENGTH = 16
"""Minimum row length. It has room for the special tokens, and for a few tokens of a question and an answer."""


class TurnIds(NamedTuple):
    """A turn as token ids."""

    role: Role
    ids: Sequence[int]
    is_whole: bool = True
    """Whether an end token follows. A truncated answer has none, so that the model does not learn to stop there."""
    num_bytes: int | None = None
    """Number of bytes of the text, or None if it was truncated, so that its bytes have to be counted."""

    @property
    def length(self) -> int:
        """Number of tokens, including special tokens."""
        return len(self.ids) + 1 + self.is_whole


def encode_turns(
    turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant"
) -> tuple[list[int], bytes]:
    """Return the token ids of a conversation, and the loss mask with one byte per id."""
    ids: list[int] = []
    mask = bytearray()
    for role, text, is_whole, _ in turns:
        is_trained = loss == "all" or role == "assistant"
        ids.append(tokenizer.role_ids[role])
        ids += text
        if is_whole:
            ids.append(tokenizer.end_id)
        # When answers are generated, the caller adds the role token, so train on it only with loss=all.
        mask.append(loss == "all")
        mask += (b"\1" if is_trained else b"\0") * (len(text) + is_whole)
    if mask:
        mask[0] = 0  # The first token cannot be predicted, because it has no context.
    return ids, bytes(mask)


def count_loss_bytes(turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant") -> int:
    """Return the number of UTF-8 bytes of the text that the loss includes."""
    trained = [turn for turn in turns if loss == "all" or turn.role == "assistant"]
    return sum(
        len(tokenizer.decode(turn.ids).encode()) if turn.num_bytes is None else turn.num_bytes for turn in trained
    )


class Segment(NamedTuple):
    """Turns of a conversation that fit into a row."""

    turns: tuple[TurnIds, ...]
    length: int
    is_truncated: bool = False


def fit_conversation(turns: Sequence[TurnIds], *, max_length: int) -> list[Segment]:
    """Split a conversation into segments of at most `max_length` tokens, each of which ends with an answer.

    A system turn is repeated at the start of every segment.
    """
    length = sum([len(turn.ids) for turn in turns]) + 2 * len(turns)
    if length <= max_length:
        return [Segment(tuple(turns), length)]
    head = tuple(turns[:1]) if turns[0].role == "system" else ()
    taken = head_length = sum(turn.length for turn in head)
    segments: list[Segment] = []
    pending: list[TurnIds] = []

    def close() -> None:
        nonlocal taken
        if pending:
            segments.append(Segment((*head, *pending), taken))
            pending.clear()
            taken = head_length

    for exchange in _exchanges(turns[len(head) :]):
        size = sum(turn.length for turn in exchange)
        if taken + size > max_length:
            close()
        if head_length + size > max_length:
            segments.append(_shorten(head, exchange, max_length=max_length))
        else:
            pending += exchange
            taken += size
    close()
    return segments


def _exchanges(turns: Sequence[TurnIds]) -> Iterator[tuple[TurnIds, ...]]:
    """Yield each answer with the turns since the previous answer. Turns after the last answer are dropped."""
    start = 0
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            yield tuple(turns[start : index + 1])
            start = index + 1


def _shorten(head: tuple[TurnIds, ...], exchange: tuple[TurnIds, ...], *, max_length: int) -> Segment:
    """Truncate one exchange to `max_length` tokens, including the system turn in `head`.

    The answer may use at least half of the row. The longest of the other turns is shortened first.
    """
    *question, answer = (*head, *exchange)
    needed = sum(turn.length for turn in question)
    answer = _truncate(answer, max(max_length - needed, max_length // 2))
    excess = needed + answer.length - max_length
    while excess > 0:
        longest = max(range(len(question)), key=lambda index: len(question[index].ids))
        if not question[longest].ids:
            question.pop(0)  # The special tokens alone exceed the row, as with many tool turns.
        else:
            length = max(1, question[longest].length - excess)
            question[longest] = _truncate(question[longest], length, keep_end=True)
        excess = sum(turn.length for turn in question) + answer.length - max_length
    turns = (*question, answer)
    return Segment(turns, sum(turn.length for turn in turns), is_truncated=True)


def _truncate(turn: TurnIds, length: int, *, keep_end: bool = False) -> TurnIds:
    """Shorten a turn to `length` tokens. With `keep_end`, it keeps its end mark."""
    if turn.length <= length:
        return turn
    if keep_end:
        return TurnIds(turn.role, turn.ids[: max(0, length - 2)])
    return TurnIds(turn.role, turn.ids[: max(1, length - 1)], is_whole=False)
