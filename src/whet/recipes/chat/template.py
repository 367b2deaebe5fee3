"""Turn a conversation into token ids and a loss mask, and fit long ones into rows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from whet.recipes.chat.conversation import Loss, Role, Turn
from whet.recipes.chat.tokenizer import ChatTokenizer

TEMPLATE = "<|role|> text <|end|>"
"""Its name in a manifest; another layout gets another one."""


class TurnIds(NamedTuple):
    """A turn as token ids."""

    role: Role
    ids: Sequence[int]
    is_whole: bool = True
    """An answer that was cut has no end mark: it did not end there."""
    num_bytes: int | None = None
    """Of its text; None where that was cut and has to be looked up."""

    @property
    def length(self) -> int:
        """Tokens with the marks."""
        return len(self.ids) + 1 + self.is_whole


def write(turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant") -> tuple[list[int], bytes]:
    """The ids of a conversation, and a byte for each: whether it is learned."""
    ids: list[int] = []
    mask = bytearray()
    for role, text, is_whole, _ in turns:
        is_learned = loss == "all" or role == "assistant"
        ids.append(tokenizer.role_ids[role])
        ids += text
        if is_whole:
            ids.append(tokenizer.end_id)
        # Who speaks is decided by the one who asks, so a role's mark is learned only where all is.
        mask.append(loss == "all")
        mask += (b"\1" if is_learned else b"\0") * (len(text) + is_whole)
    if mask:
        mask[0] = 0  # Nothing stands before it that could foretell it.
    return ids, bytes(mask)


def loss_bytes(turns: Iterable[TurnIds], tokenizer: ChatTokenizer, *, loss: Loss = "assistant") -> int:
    """Bytes of the text that is learned."""
    learned = [turn for turn in turns if loss == "all" or turn.role == "assistant"]
    return sum(
        len(tokenizer.decode(turn.ids).encode()) if turn.num_bytes is None else turn.num_bytes for turn in learned
    )


def prompt(turns: Iterable[Turn], tokenizer: ChatTokenizer) -> list[int]:
    """The ids that an answer is asked for with: the turns so far, then the assistant's mark."""
    ids, _ = write((TurnIds(role, tokenizer.encode(text)) for role, text in turns), tokenizer)
    return [*ids, tokenizer.role_ids["assistant"]]


MIN_LENGTH = 16
"""Marks and a few tokens of each side."""


class Segment(NamedTuple):
    """Turns that fit into a row."""

    turns: tuple[TurnIds, ...]
    length: int
    is_cut: bool = False
    """Whether texts had to be shortened."""


def fit_conversation(turns: Sequence[TurnIds], *, max_length: int) -> list[Segment]:
    """A conversation of whole turns as pieces of at most `max_length` tokens; one where it fits."""
    length = sum([len(turn.ids) for turn in turns]) + 2 * len(turns)
    if length <= max_length:
        return [Segment(tuple(turns), length)]
    is_led = turns[0].role == "system"
    head = tuple(turns[:1]) if is_led else ()
    taken = head_length = sum(turn.length for turn in head)
    pieces: list[Segment] = []
    inside: list[TurnIds] = []

    def close() -> None:
        nonlocal taken
        if inside:
            pieces.append(Segment((*head, *inside), taken))
            inside.clear()
            taken = head_length

    for exchange in _exchanges(turns[len(head) :]):
        size = sum(turn.length for turn in exchange)
        if taken + size > max_length:
            close()
        if head_length + size > max_length:
            pieces.append(_shortened(head, exchange, max_length=max_length))
        else:
            inside += exchange
            taken += size
    close()
    return pieces


def _exchanges(turns: Sequence[TurnIds]) -> Iterator[tuple[TurnIds, ...]]:
    """An answer with what led to it; what follows the last answer is left out."""
    start = 0
    for place, turn in enumerate(turns):
        if turn.role == "assistant":
            yield tuple(turns[start : place + 1])
            start = place + 1


def _shortened(head: tuple[TurnIds, ...], exchange: tuple[TurnIds, ...], *, max_length: int) -> Segment:
    """The answer keeps half of the row if it needs it; the rest is for the question, whose longest turn gives way."""
    *asked, answer = (*head, *exchange)
    needed = sum(turn.length for turn in asked)
    room = max(max_length - needed, max_length // 2)
    answer = _truncate(answer, room)
    excess = needed + answer.length - max_length
    while excess > 0:
        longest = max(range(len(asked)), key=lambda place: len(asked[place].ids))
        if not asked[longest].ids:
            asked.pop(0)  # Marks alone fill the row: many turns of tools.
        else:
            asked[longest] = _truncate(asked[longest], max(1, asked[longest].length - excess), ends=True)
        excess = sum(turn.length for turn in asked) + answer.length - max_length
    turns = (*asked, answer)
    return Segment(turns, sum(turn.length for turn in turns), is_cut=True)


def _truncate(turn: TurnIds, length: int, *, ends: bool = False) -> TurnIds:
    """The turn with at most `length` tokens; one that is asked ends all the same, an answer is left open."""
    if turn.length <= length:
        return turn
    if ends:
        return TurnIds(turn.role, turn.ids[: max(0, length - 2)])
    return TurnIds(turn.role, turn.ids[: max(1, length - 1)], is_whole=False)
