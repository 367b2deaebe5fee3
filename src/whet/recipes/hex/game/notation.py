"""Read games from text, one per line, and write HexWorld links.

These notations are read:

    trmph     #13,a4g7f8           with or without a URL before it, and optionally a winner after it (1, 2, blue, red)
    hexworld  #13c1,a4:sg7:rb      :s swaps pieces; :rb and :rw (:fb, :fw): the first or second player resigned
    plain     a4 swap g7           separated by whitespace or commas

The first player is expected to connect top and bottom. `records` detects files in which the edges are exchanged.
"""

import re
from dataclasses import dataclass
from functools import cache

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, EMPTY, MAX_SIZE, RED, SWAP, cell_name, check_size
from whet.recipes.hex.game.game import Game

MAX_LINE = 10_000
_HEADER = re.compile(r"(?:[^#]*#)?(\d{1,2})(?:[a-z]\d*)*,(.*)", re.DOTALL)
_TOKEN = re.compile(r"([a-z]\d{1,2})|(:[rf][bw]|:[a-z])|(,)")
_NUMBER = re.compile(r"(?<![a-z0-9])\d+\.")
_WINNERS = {"1": BLUE, "b": BLUE, "blue": BLUE, "2": RED, "r": RED, "red": RED}
_COLUMNS, _ROWS = "abcdefghijklmnopqrstuvwxyz", range(1, MAX_SIZE + 1)
_NAMES = {f"{column}{row:0{digits}}": f"{column}{row}" for column in _COLUMNS for row in _ROWS for digits in (1, 2)}
"""Maps each spelling of a move to its canonical name."""
_MIN_SIZES = {name: max(ord(name[0]) - ord("a") + 1, int(name[1:])) for name in _NAMES.values()}
_NAMES |= {"swap": "swap", "swap-pieces": "swap"}
_MIN_SIZES |= {"swap": 0}
_RESIGNED = {":rb": RED, ":fb": RED, ":rw": BLUE, ":fw": BLUE}


@dataclass(frozen=True, slots=True)
class GameRecord:
    """A recorded game that has not been validated."""

    names: tuple[str, ...]
    """The moves, as names of cells or "swap"."""
    size: int | None = None
    """Board size, or None if the record does not contain it."""
    winner: int = EMPTY
    """BLUE (the first player) or RED, or EMPTY if not recorded."""

    @property
    def min_size(self) -> int:
        """Size of the smallest board that contains all moves."""
        return max([_MIN_SIZES[name] for name in self.names], default=0)

    def outside(self, size: int) -> str | None:
        """Return the first move that is not on a board of this size, or None."""
        return next((name for name in self.names if _MIN_SIZES[name] > size), None)

    def moves(self, size: int) -> tuple[int, ...]:
        """Return the moves as numbers on a board of this size, which must be at least `min_size`."""
        numbers = _numbers(size)
        return tuple([numbers[name] for name in self.names])


@cache
def _numbers(size: int) -> dict[str, int]:
    return {cell_name(cell, size=size): cell for cell in range(size * size)} | {"swap": SWAP}


def read_game(line: str) -> GameRecord:
    """Parse the game on a line. Raise UsageError if it cannot be read.

    >>> read_game("https://trmph.com/hex/board#5,a1b2c3 1").names
    ('a1', 'b2', 'c3')
    """
    text = line.strip().lower()
    if not text or len(text) > MAX_LINE or not text.isascii():
        raise _unreadable("not a game", line)
    header = _HEADER.fullmatch(text)
    if header is None:
        return _read_plain(text, line)
    size, rest = check_size(int(header[1])), header[2]
    body, *behind = rest.split() or [""]
    if len(behind) > 1 or (behind and behind[0] not in _WINNERS):
        raise _unreadable("unexpected text after the moves", line)
    winner = _WINNERS[behind[0]] if behind else EMPTY
    names: list[str] = []
    is_finished, start = False, 0
    while start < len(body):
        token = _TOKEN.match(body, start)
        if token is None or (is_finished and token[0] != ","):
            raise _unreadable("not a move", line, at=body[start : start + 10])
        start = token.end()
        if token[2] in _RESIGNED:
            winner, is_finished = _RESIGNED[token[2]], True
        elif token[2] == ":s":
            names.append("swap")
        elif token[2]:
            raise _unreadable("not a move of Hex", line, at=token[2])
        # A comma separates the moves before and after the position that the page displayed. It is not a move.
        elif token[1]:
            names.append(_canonical(token[1], line))
    return GameRecord(tuple(names), size, winner)


def _read_plain(text: str, line: str) -> GameRecord:
    words = [word for word in re.split(r"[\s,;]+", _NUMBER.sub(" ", text)) if word]
    winner = EMPTY
    if words and words[-1] in ("blue", "red"):
        winner = _WINNERS[words.pop()]
    elif words and words[-1] == "resign":
        words.pop()
        winner = RED if len(words) % 2 == 0 else BLUE
    return GameRecord(tuple(_canonical(word, line) for word in words), None, winner)


def _canonical(word: str, line: str) -> str:
    name = _NAMES.get(word)
    if name is None:
        raise _unreadable("not a move", line, at=word[:20])
    return name


def _unreadable(what: str, line: str, *, at: str | None = None) -> UsageError:
    return UsageError(what, got=repr(at or line[:60]), try_="#13,a4g7 or a4 g7")


# --- writing ---------------------------------------------------------------------------------------------------------


def write_game(game: Game) -> str:
    """Return a HexWorld link to a game.

    >>> from whet.recipes.hex.game.game import replay
    >>> write_game(replay([1, SWAP], size=5))
    'https://hexworld.org/board/#5c1,b1:s'
    """
    names = (":s" if move == SWAP else cell_name(move, size=game.size) for move in game.moves)
    return f"https://hexworld.org/board/#{game.size}c1," + "".join(names)
