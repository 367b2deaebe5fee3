"""One game of Hex, move by move."""

from dataclasses import dataclass

import numpy as np

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, COLORS, EMPTY, NEIGHBORS, RED, SWAP, cell_name, check_size, other
from whet.recipes.hex.game.rules import Positions

# Offsets of the edge nodes, which follow the cells: top, bottom, left, right.
_FIRST_EDGE, _LAST_EDGE = {BLUE: 0, RED: 2}, {BLUE: 1, RED: 3}


class ChainTracker:
    """Tracks chains of stones and the winner during a game, with union-find over the cells and the four edges."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._colors = [EMPTY] * (size * size)
        self._parents = list(range(size * size + 4))
        self.winner = EMPTY

    def put(self, cell: int, color: int) -> None:
        """Add a stone on an empty cell."""
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
                neighbor = (row + down) * size + column + right
                if self._colors[neighbor] == color:
                    self._join(cell, neighbor)
        if self._root(edge + _FIRST_EDGE[color]) == self._root(edge + _LAST_EDGE[color]):
            self.winner = color

    def _root(self, node: int) -> int:
        parents = self._parents
        while parents[node] != node:
            parents[node] = parents[parents[node]]  # Path halving keeps the trees flat.
            node = parents[node]
        return node

    def _join(self, one: int, two: int) -> None:
        self._parents[self._root(one)] = self._root(two)


@dataclass(frozen=True, slots=True)
class Game:
    """The moves of a legal, possibly unfinished game. Create it with `replay` or `after`."""

    size: int
    moves: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()
    """The board: EMPTY, BLUE or RED for each cell."""
    mover: int = BLUE
    winner: int = EMPTY

    def after(self, move: int) -> "Game":
        """Return the game after one more move."""
        return replay((*self.moves, move), size=self.size)

    def back(self, count: int = 1) -> "Game":
        """Return the game without its last moves."""
        return replay(self.moves[: max(0, len(self.moves) - count)], size=self.size)

    @property
    def may_swap(self) -> bool:
        """Whether a swap is legal in this position."""
        return len(self.moves) == 1 and self.winner == EMPTY

    @property
    def legal(self) -> tuple[int, ...]:
        """The cells that are legal moves."""
        return tuple(cell for cell, color in enumerate(self.cells) if color == EMPTY) if self.winner == EMPTY else ()

    @property
    def position(self) -> Positions:
        """The position as a batch of one."""
        board = np.array(self.cells, dtype=np.int8).reshape(1, self.size, self.size)
        return Positions(board, np.array([self.mover], dtype=np.int8))


def replay(moves: "tuple[int, ...] | list[int]", *, size: int) -> Game:
    """Return the game after these moves. Raises an error for the first illegal move."""
    check_size(size)
    cells, chains, mover = [EMPTY] * size**2, ChainTracker(size), BLUE
    for number, move in enumerate(moves, start=1):
        if chains.winner != EMPTY:
            raise _illegal(number, move, size, f"{COLORS[chains.winner]} has already won")
        if move == SWAP:
            if number != 2:
                raise _illegal(number, move, size, "only the second move may be a swap")
            cells, chains = [EMPTY] * size**2, ChainTracker(size)
            row, column = divmod(moves[0], size)
            cells[column * size + row] = RED
            chains.put(column * size + row, RED)
        else:
            if not 0 <= move < size**2:
                raise _illegal(number, move, size, "it is not on the board")
            if cells[move] != EMPTY:
                raise _illegal(number, move, size, "the cell is occupied")
            cells[move] = mover
            chains.put(move, mover)
        mover = other(mover)
    return Game(size=size, moves=tuple(moves), cells=tuple(cells), mover=mover, winner=chains.winner)


def _illegal(number: int, move: int, size: int, why: str) -> UsageError:
    name = "swap" if move == SWAP else cell_name(move, size=size) if 0 <= move < size**2 else str(move)
    return UsageError(f"move {number} is not legal: {why}", got=name, try_="an empty cell, while nobody has won")
