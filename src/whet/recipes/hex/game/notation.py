"""Read and write one game as text: trmph, HexWorld and plain move lists."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, EMPTY, MAX_SIZE, RED, SWAP, cell_name, check_size
from whet.recipes.hex.game.game import Game

Notation = Literal["trmph", "hexworld", "plain"]
MAX_LINE = 10_000
_HEADER = re.compile(r"(?:[^#]*#)?(\d{1,2})((?:[a-z]\d*)*),(.*)", re.DOTALL)
_GLUED = re.compile(r"([a-z]\d{1,2})|(:[rf][bw]|:[a-z])|(,)")
_NUMBER = re.compile(r"(?<![a-z0-9])\d+\.")
_WINNERS = {"1": BLUE, "b": BLUE, "blue": BLUE, "2": RED, "r": RED, "red": RED}
_COLUMNS, _ROWS = "abcdefghijklmnopqrstuvwxyz", range(1, MAX_SIZE + 1)
_NAMES = {f"{column}{row:0{digits}}": f"{column}{row}" for column in _COLUMNS for row in _ROWS for digits in (1, 2)}
"""What a move may be called, and its one name."""
_REACH = {name: max(ord(name[0]) - ord("a") + 1, int(name[1:])) for name in _NAMES.values()}
_NAMES |= {"swap": "swap", "swap-pieces": "swap"}
_REACH |= {"swap": 0}
_RESIGNED = {":rb": RED, ":fb": RED, ":rw": BLUE, ":fw": BLUE}


@dataclass(frozen=True, slots=True)
class GameRecord:
    """One game as it was written down: read, not replayed."""

    kind: Notation
    words: tuple[str, ...]
    """Cells by name, or "swap"."""
    size: int | None = None
    """None where the record does not say it."""
    winner: int = EMPTY
    """BLUE (the first player) or RED where the record says it."""

    @property
    def least_size(self) -> int:
        """The smallest board that has all its cells."""
        return max([_REACH[word] for word in self.words], default=0)

    def moves(self, size: int) -> tuple[int, ...]:
        """Its moves as numbers on a board of this size, which has them all (`least_size`)."""
        numbers = _numbers(size)
        return tuple([numbers[word] for word in self.words])


@cache
def _numbers(size: int) -> dict[str, int]:
    return {cell_name(cell, size=size): cell for cell in range(size * size)} | {"swap": SWAP}


def read_game(line: str) -> GameRecord:
    """What one line says.

    >>> read_game("https://trmph.com/hex/board#5,a1b2c3 1").words, read_game("a4 swap g7").kind
    (('a1', 'b2', 'c3'), 'plain')
    """
    text = line.strip().lower()
    if not text or len(text) > MAX_LINE or not text.isascii():
        raise _unreadable("no game", line)
    found = _HEADER.fullmatch(text)
    if found is None:
        return _read_plain(text, line)
    size, options, rest = check_size(int(found[1])), found[2], found[3]
    body, *behind = rest.split() or [""]
    if len(behind) > 1 or (behind and behind[0] not in _WINNERS):
        raise _unreadable("something stands behind the moves", line)
    winner = _WINNERS[behind[0]] if behind else EMPTY
    words: list[str] = []
    is_over, place = False, 0
    while place < len(body):
        one = _GLUED.match(body, place)
        if one is None or (is_over and one[0] != ","):
            raise _unreadable("not a move", line, at=body[place : place + 10])
        place = one.end()
        if one[2] in _RESIGNED:
            winner, is_over = _RESIGNED[one[2]], True
        elif one[2] == ":s":
            words.append("swap")
        elif one[2]:
            raise _unreadable("not a move of Hex", line, at=one[2])
        elif one[1]:  # A comma only says where somebody looked.
            words.append(_named(one[1], line))
    is_trmph = not options and ":" not in body and "," not in body
    return GameRecord("trmph" if is_trmph else "hexworld", tuple(words), size, winner)


def _read_plain(text: str, line: str) -> GameRecord:
    words = [word for word in re.split(r"[\s,;]+", _NUMBER.sub(" ", text)) if word]
    winner = EMPTY
    if words and words[-1] in ("blue", "red"):
        winner = _WINNERS[words.pop()]
    elif words and words[-1] == "resign":
        words.pop()
        winner = RED if len(words) % 2 == 0 else BLUE
    return GameRecord("plain", tuple(_named(word, line) for word in words), None, winner)


def _named(word: str, line: str) -> str:
    name = _NAMES.get(word)
    if name is None:
        raise _unreadable("not a move", line, at=word[:20])
    return name


def _unreadable(what: str, line: str, *, at: str | None = None) -> UsageError:
    return UsageError(what, got=repr(at or line[:60]), try_="#13,a4g7 or a4 g7")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_game(game: Game, kind: Notation = "trmph") -> str:
    """A game as one line; trmph has no word for a swap.

    >>> from whet.recipes.hex.game.game import replay
    >>> write_game(replay([0, 6], size=5)), write_game(replay([1, SWAP], size=5), "hexworld")
    ('#5,a1b2', 'https://hexworld.org/board/#5c1,b1:s')
    """
    names = ["swap" if move == SWAP else cell_name(move, size=game.size) for move in game.moves]
    if kind == "plain":
        return " ".join(names)
    if kind == "hexworld":
        return f"https://hexworld.org/board/#{game.size}c1," + "".join(":s" if n == "swap" else n for n in names)
    if "swap" in names:
        raise UsageError("a swap cannot be written as trmph", got=" ".join(names[:4]), try_="hexworld or plain")
    return f"#{game.size}," + "".join(names)
