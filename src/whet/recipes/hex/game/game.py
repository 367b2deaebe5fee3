"""One game of Hex, move by move."""

from dataclasses import dataclass

import numpy as np

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, COLORS, EMPTY, NEIGHBORS, RED, SWAP, cell_name, check_size, other
from whet.recipes.hex.game.rules import Positions

_FIRST_EDGE, _LAST_EDGE = {BLUE: 0, RED: 2}, {BLUE: 1, RED: 3}


class ChainTracker:
    """The chains of one board; it only grows."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._colors = [EMPTY] * (size * size)
        self._parents = list(range(size * size + 4))
        self.winner = EMPTY

    def put(self, cell: int, color: int) -> None:
        """One more stone, on a cell that is empty."""
        size, edge = self._size, self._size**2
        self._colors[cell] = color
        row, column = divmod(cell, size)
        across = row if color == BLUE else column
        if across == 0:
            self._join(cell, edge + _FIRST_EDGE[color])
        if across == size - 1:
            self._join(cell, edge + _LAST_EDGE[color])
        for down, right in NEIGHBORS:
            if 0 <= row + down < size and 0 <= column + right < size:
                beside = (row + down) * size + column + right
                if self._colors[beside] == color:
                    self._join(cell, beside)
        if self._root(edge + _FIRST_EDGE[color]) == self._root(edge + _LAST_EDGE[color]):
            self.winner = color

    def _root(self, place: int) -> int:
        parents = self._parents
        while parents[place] != place:
            parents[place] = parents[parents[place]]
            place = parents[place]
        return place

    def _join(self, one: int, two: int) -> None:
        self._parents[self._root(one)] = self._root(two)


@dataclass(frozen=True, slots=True)
class Game:
    """A game that was played by the rules so far; made by `replay` and `after`."""

    size: int
    moves: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()
    """The board: EMPTY, BLUE or RED for each cell."""
    mover: int = BLUE
    winner: int = EMPTY

    def after(self, move: int) -> "Game":
        """The game with one more move."""
        return replay((*self.moves, move), size=self.size)

    def back(self, count: int = 1) -> "Game":
        """The game without its last moves."""
        return replay(self.moves[: max(0, len(self.moves) - count)], size=self.size)

    @property
    def may_swap(self) -> bool:
        """Whether swapping is a legal move now."""
        return len(self.moves) == 1 and self.winner == EMPTY

    @property
    def legal(self) -> tuple[int, ...]:
        """The cells a stone may be put on now."""
        return tuple(cell for cell, has in enumerate(self.cells) if has == EMPTY) if self.winner == EMPTY else ()

    @property
    def position(self) -> Positions:
        """As a batch of one."""
        board = np.array(self.cells, dtype=np.int8).reshape(1, self.size, self.size)
        return Positions(board, np.array([self.mover], dtype=np.int8))


def replay(moves: "tuple[int, ...] | list[int]", *, size: int) -> Game:
    """The game after these moves; the first that is not legal is named."""
    check_size(size)
    cells, chains, mover = [EMPTY] * size**2, ChainTracker(size), BLUE
    for number, move in enumerate(moves, start=1):
        if chains.winner != EMPTY:
            _refuse(number, move, size, f"{COLORS[chains.winner]} has won before")
        if move == SWAP:
            if number != 2:
                _refuse(number, move, size, "only the second move may be a swap")
            cells, chains = [EMPTY] * size**2, ChainTracker(size)
            row, column = divmod(moves[0], size)
            cells[column * size + row] = RED
            chains.put(column * size + row, RED)
        else:
            if not 0 <= move < size**2:
                _refuse(number, move, size, "it is not on the board")
            if cells[move] != EMPTY:
                _refuse(number, move, size, "a stone lies there")
            cells[move] = mover
            chains.put(move, mover)
        mover = other(mover)
    return Game(size=size, moves=tuple(moves), cells=tuple(cells), mover=mover, winner=chains.winner)


def _refuse(number: int, move: int, size: int, why: str) -> None:
    name = "swap" if move == SWAP else cell_name(move, size=size) if 0 <= move < size**2 else str(move)
    raise UsageError(f"move {number} is not legal: {why}", got=name, try_="an empty cell, while nobody has won")
