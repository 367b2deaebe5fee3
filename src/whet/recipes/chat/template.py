"""Encode conversations as token ids with a loss mask, and split those that are longer than a row."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from whet.recipes.chat.conversation import Loss, Role
from whet.recipes.chat.tokenizer import ChatTokenizer

TEMPLATE = "<|role|> text <|end|>"
"""The name of this layout in manifests."""
MIN_LENGTH = 16
"""The minimum row length: the marks, and a few tokens of each side."""


class TurnIds(NamedTuple):
    """A turn as token ids."""

    role: Role
    ids: Sequence[int]
    is_whole: bool = True
    """False for a truncated answer, which has no end mark, so that the model does not learn to stop there."""
    num_bytes: int | None = None
    """Bytes of the text; None if the text was truncated and its bytes have to be counted."""

    @property
    def length(self) -> int:
        """The number of tokens including the marks."""
        return len(self.ids) + 1 + self.is_whole


def encode_turns(
    turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant"
) -> tuple[list[int], bytes]:
    """Return the ids of a conversation and the loss mask, one byte per id."""
    ids: list[int] = []
    mask = bytearray()
    for role, text, is_whole, _ in turns:
        is_trained = loss == "all" or role == "assistant"
        ids.append(tokenizer.role_ids[role])
        ids += text
        if is_whole:
            ids.append(tokenizer.end_id)
        # The caller decides which role speaks next, so a role mark is trained on only with loss=all.
        mask.append(loss == "all")
        mask += (b"\1" if is_trained else b"\0") * (len(text) + is_whole)
    if mask:
        mask[0] = 0  # The first token has no context to be predicted from.
    return ids, bytes(mask)


def count_loss_bytes(turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant") -> int:
    """Return the bytes of the text that is trained on."""
    trained = [turn for turn in turns if loss == "all" or turn.role == "assistant"]
    return sum(
        len(tokenizer.decode(turn.ids).encode()) if turn.num_bytes is None else turn.num_bytes for turn in trained
    )


class Segment(NamedTuple):
    """Turns that fit into a row."""

    turns: tuple[TurnIds, ...]
    length: int
    is_truncated: bool = False


def fit_conversation(turns: Sequence[TurnIds], *, max_length: int) -> list[Segment]:
    """Split a conversation into segments of at most `max_length` tokens, each ending with an answer.

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
    """Yield each answer with the turns that led to it. Turns after the last answer are dropped."""
    start = 0
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            yield tuple(turns[start : index + 1])
            start = index + 1


def _shorten(head: tuple[TurnIds, ...], exchange: tuple[TurnIds, ...], *, max_length: int) -> Segment:
    """Truncate one exchange. The answer may use half of the row. The longest of the other turns is shortened first."""
    *question, answer = (*head, *exchange)
    needed = sum(turn.length for turn in question)
    answer = _truncate(answer, max(max_length - needed, max_length // 2))
    excess = needed + answer.length - max_length
    while excess > 0:
        longest = max(range(len(question)), key=lambda index: len(question[index].ids))
        if not question[longest].ids:
            question.pop(0)  # The marks alone fill the row, which happens with many tool turns.
        else:
            length = max(1, question[longest].length - excess)
            question[longest] = _truncate(question[longest], length, keep_end=True)
        excess = sum(turn.length for turn in question) + answer.length - max_length
    turns = (*question, answer)
    return Segment(turns, sum(turn.length for turn in turns), is_truncated=True)


def _truncate(turn: TurnIds, length: int, *, keep_end: bool = False) -> TurnIds:
    """Shorten a turn to `length` tokens. A question keeps its end mark, an answer does not."""
    if turn.length <= length:
        return turn
    if keep_end:
        return TurnIds(turn.role, turn.ids[: max(0, length - 2)])
    return TurnIds(turn.role, turn.ids[: max(1, length - 1)], is_whole=False)
