"""A single game of Hex as a sequence of moves."""

from dataclasses import dataclass

import numpy as np

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, COLORS, EMPTY, RED, SWAP, cell_name, check_size, other
from whet.recipes.hex.game.rules import Positions, winners


@dataclass(frozen=True, slots=True)
class Game:
    """A legal, possibly unfinished game. Create it with `replay` or `after`."""

    size: int
    moves: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()
    """The board: EMPTY, BLUE or RED for each cell, row by row."""
    mover: int = BLUE
    winner: int = EMPTY
    """BLUE or RED, or EMPTY while nobody has won."""

    def after(self, move: int) -> "Game":
        """Return the game after one more move. Raise UsageError if it is illegal."""
        return replay((*self.moves, move), size=self.size)

    @property
    def may_swap(self) -> bool:
        """Whether a swap is legal in this position."""
        return len(self.moves) == 1 and self.winner == EMPTY

    @property
    def position(self) -> Positions:
        """The current position as a batch of size one."""
        board = np.array(self.cells, dtype=np.int8).reshape(1, self.size, self.size)
        return Positions(board, np.array([self.mover], dtype=np.int8))


def replay(moves: "tuple[int, ...] | list[int]", *, size: int) -> Game:
    """Return the game after these moves. Raise UsageError for the first illegal move."""
    check_size(size)
    cells, mover, problem = [EMPTY] * size**2, BLUE, ""
    boards: list[list[int]] = []
    for number, move in enumerate(moves, start=1):
        if move == SWAP:
            problem = "" if number == 2 else "only the second move may be a swap"
        elif not 0 <= move < size**2:
            problem = "it is not on the board"
        elif cells[move] != EMPTY:
            problem = "the cell is occupied"
        if problem:
            break
        if move == SWAP:
            # Swap pieces, not players: mirror the stone on the main diagonal and make it red, so that its position
            # relative to red's edges equals its former position relative to blue's edges.
            row, column = divmod(moves[0], size)
            cells = [EMPTY] * size**2
            cells[column * size + row] = RED
        else:
            cells[move] = mover
        boards.append(cells.copy())
        mover = other(mover)
    won = winners(np.array(boards, dtype=np.int8).reshape(-1, size, size)) if boards else np.zeros(1, dtype=np.int8)
    decided = int(np.argmax(won != EMPTY)) + 1 if won.any() else len(moves)
    if decided < len(moves):
        raise _illegal(decided + 1, moves[decided], size, f"{COLORS[won[decided - 1]]} has already won")
    if problem:
        raise _illegal(len(boards) + 1, moves[len(boards)], size, problem)
    return Game(size=size, moves=tuple(moves), cells=tuple(cells), mover=mover, winner=int(won[-1]))


def _illegal(number: int, move: int, size: int, why: str) -> UsageError:
    name = "swap" if move == SWAP else cell_name(move, size=size) if 0 <= move < size**2 else str(move)
    return UsageError(f"move {number} is not legal: {why}", got=name, try_="an empty cell, while nobody has won")
