"""One game from its first move: what was played, whose turn it is, and who has won."""

from dataclasses import dataclass

import numpy as np

from whet.base.errors import UsageError
from whet.hex.board import BLUE, COLOURS, EMPTY, RED, SWAP, cell_name, check_size, other
from whet.hex.chains import Chains
from whet.hex.rules import Positions


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
    cells, chains, mover = [EMPTY] * size**2, Chains(size), BLUE
    for number, move in enumerate(moves, start=1):
        if chains.winner != EMPTY:
            _refuse(number, move, size, f"{COLOURS[chains.winner]} has won before")
        if move == SWAP:
            if number != 2:
                _refuse(number, move, size, "only the second move may be a swap")
            cells, chains = [EMPTY] * size**2, Chains(size)
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
