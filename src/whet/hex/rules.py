"""Who is to move, what is legal, and what comes after? For any number of boards of one size at once."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.hex.board import BLUE, EMPTY, RED, Boards, Cells, check_size

Colours = NDArray[np.int8]
"""One for each board: EMPTY (nobody), BLUE or RED."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Boards and who is to move on each: after a swap the stones alone do not tell."""

    boards: Boards
    """(batch, size, size): EMPTY, BLUE, RED."""
    movers: Colours
    """(batch,): BLUE or RED."""

    @property
    def size(self) -> int:
        """Cells on a side."""
        return int(self.boards.shape[-1])

    def __len__(self) -> int:
        return len(self.boards)

    def take(self, index: "NDArray[np.int64] | NDArray[np.bool_] | slice") -> "Positions":
        """Some of them."""
        return Positions(self.boards[index], self.movers[index])


def start(batch: int, *, size: int) -> Positions:
    """Empty boards, blue to move."""
    boards = np.zeros((batch, check_size(size), size), dtype=np.int8)
    return Positions(boards, np.full(batch, BLUE, dtype=np.int8))


def legal(boards: Boards) -> NDArray[np.bool_]:
    """(batch, cells): where a stone may be put while the game goes on."""
    return np.asarray(boards == EMPTY).reshape(len(boards), boards.shape[-1] ** 2)


def play(positions: Positions, moves: Cells) -> Positions:
    """The positions after one move on each; a move onto a stone or beside the board is refused."""
    cells = positions.boards.reshape(len(positions), positions.size**2).copy()
    index = np.arange(len(positions))
    moves = np.asarray(moves)
    is_outside = (moves < 0) | (moves >= cells.shape[1])
    is_taken = cells[index, np.where(is_outside, 0, moves)] != EMPTY
    if (is_outside | is_taken).any():
        first = int(np.argmax(is_outside | is_taken))
        raise UsageError("not a legal move", got=f"cell {int(moves[first])} on board {first}", try_="an empty cell")
    cells[index, moves] = positions.movers
    return Positions(cells.reshape(positions.boards.shape), (BLUE + RED - positions.movers).astype(np.int8))


def may_swap(positions: Positions) -> NDArray[np.bool_]:
    """Where red, before its first stone, may take over blue's."""
    num_stones = (positions.boards != EMPTY).sum(axis=(1, 2))
    return np.asarray((num_stones == 1) & (positions.movers == RED) & (positions.boards == BLUE).any(axis=(1, 2)))


def swap(positions: Positions) -> Positions:
    """Red takes over blue's first stone, and blue is to move.

    The pieces are swapped, not the players: the stone is mirrored on the long diagonal and turns red, so that it is to
    red's edges what it was to blue's.
    """
    if not may_swap(positions).all():
        first = int(np.argmin(may_swap(positions)))
        raise UsageError("only red may swap, as its first move", got=f"board {first}", try_="an empty cell")
    boards = np.where(positions.boards.transpose(0, 2, 1) == BLUE, RED, EMPTY).astype(np.int8)
    return Positions(boards, np.full(len(boards), BLUE, dtype=np.int8))
