"""What becomes of a conversation that is too long? Pieces that end with an answer; what is longer still is cut.

Every piece starts with the system's turn, as it does when a model talks and its memory is full.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from whet.recipes.chat.template import TurnIds

LEAST_LENGTH = 16
"""Marks and a few tokens of each side."""


class Piece(NamedTuple):
    """Turns that fit into a row."""

    turns: tuple[TurnIds, ...]
    length: int
    is_cut: bool = False
    """Whether texts had to be shortened."""


def pieces_of(turns: Sequence[TurnIds], *, max_length: int) -> list[Piece]:
    """A conversation of whole turns as pieces of at most `max_length` tokens; one where it fits."""
    length = sum([len(turn.ids) for turn in turns]) + 2 * len(turns)
    if length <= max_length:
        return [Piece(tuple(turns), length)]
    is_led = turns[0].role == "system"
    head = tuple(turns[:1]) if is_led else ()
    taken = head_length = sum(turn.length for turn in head)
    pieces: list[Piece] = []
    inside: list[TurnIds] = []

    def close() -> None:
        nonlocal taken
        if inside:
            pieces.append(Piece((*head, *inside), taken))
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


def _shortened(head: tuple[TurnIds, ...], exchange: tuple[TurnIds, ...], *, max_length: int) -> Piece:
    """The answer keeps half of the row if it needs it; the rest is for the question, whose longest turn gives way."""
    *asked, answer = (*head, *exchange)
    needed = sum(turn.length for turn in asked)
    room = max(max_length - needed, max_length // 2)
    answer = _cut(answer, room)
    excess = needed + answer.length - max_length
    while excess > 0:
        longest = max(range(len(asked)), key=lambda place: len(asked[place].ids))
        if not asked[longest].ids:
            asked.pop(0)  # Marks alone fill the row: many turns of tools.
        else:
            asked[longest] = _cut(asked[longest], max(1, asked[longest].length - excess), ends=True)
        excess = sum(turn.length for turn in asked) + answer.length - max_length
    turns = (*asked, answer)
    return Piece(turns, sum(turn.length for turn in turns), is_cut=True)


def _cut(turn: TurnIds, length: int, *, ends: bool = False) -> TurnIds:
    """The turn with at most `length` tokens; one that is asked ends all the same, an answer is left open."""
    if turn.length <= length:
        return turn
    if ends:
        return TurnIds(turn.role, turn.ids[: max(0, length - 2)])
    return TurnIds(turn.role, turn.ids[: max(1, length - 1)], is_whole=False)
