"""Rules of Hex for batches of boards: legal moves, swap and winners."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError
from whet.recipes.hex.game.board import BLUE, EMPTY, RED, Boards, Cells, check_size

_BOARDS_PER_PASS = 16_384
"""Boards whose words fit into a core's cache."""

Words = NDArray[Any]
"""(rows, boards) of uint16 or uint32: bit c is column c."""


def winners(boards: Boards) -> NDArray[np.int8]:
    """(batch,): BLUE, RED, or EMPTY where nobody has joined their edges. A board with two winners says BLUE."""
    found = np.full(len(boards), EMPTY, dtype=np.int8)
    for begin in range(0, len(boards), _BOARDS_PER_PASS):
        some = boards[begin : begin + _BOARDS_PER_PASS]
        part = found[begin : begin + _BOARDS_PER_PASS]
        size = some.shape[-1]
        # Cells first: a cell of all boards is one contiguous line.
        cells = np.ascontiguousarray(some.reshape(len(some), -1).T).view(np.uint8).reshape(size, size, len(some))
        part[connects(_packed(cells >> 1, by_column=True))] = RED
        part[connects(_packed(cells & 1, by_column=False))] = BLUE
    return found


def connects(stones: Words) -> NDArray[np.bool_]:
    """(boards,): whether the stones join the first row and the last."""
    size, count = stones.shape
    joined = np.zeros(count, dtype=np.bool_)
    active = np.arange(count)
    reached = np.zeros_like(stones)
    reached[0] = stones[0]
    while True:
        for row in range(1, size):
            above = reached[row - 1]
            reached[row] = _fill(stones[row], (above | (above >> 1) | reached[row]) & stones[row], size=size)
        is_joined = reached[-1] != 0
        joined[active[is_joined]] = True
        before = reached.copy()
        for row in range(size - 2, -1, -1):
            below = reached[row + 1]
            reached[row] = _fill(stones[row], (below | (below << 1) | reached[row]) & stones[row], size=size)
        goes_on = (reached != before).any(axis=0) & ~is_joined
        if not goes_on.any():
            return joined
        if goes_on.mean() < 0.7:
            active, stones, reached = active[goes_on], stones[:, goes_on], reached[:, goes_on]


def _fill(stones: Words, seeds: Words, *, size: int) -> Words:
    """All stones of one row that are in an unbroken line with a seed; the seeds are stones."""
    # Upwards by the carry of one addition: it runs from the lowest seed of a line through to the line's end.
    filled = stones & (~(stones + seeds) | seeds)
    ways, shift = stones.copy(), 1
    while True:  # Downwards, twice as far each time.
        filled |= ways & (filled >> shift)
        shift *= 2
        if shift >= size:
            return filled
        ways &= ways >> (shift // 2)


def _packed(stones: NDArray[Any], *, by_column: bool) -> Words:
    """Ones and zeros (row, column, board) as words of rows, or of columns: the transposed board is Hex again."""
    size, _, count = stones.shape
    # A carry that leaves the word is no stone: 16 columns fit into 16 bits.
    words: Words = np.zeros((size, count), dtype=np.uint16 if size <= 16 else np.uint32)
    for bit in range(size - 1, -1, -1):
        words <<= 1
        words |= stones[bit] if by_column else stones[:, bit]
    return words


Colors = NDArray[np.int8]
"""One for each board: EMPTY (nobody), BLUE or RED."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Boards and who is to move on each: after a swap the stones alone do not tell."""

    boards: Boards
    """(batch, size, size): EMPTY, BLUE, RED."""
    movers: Colors
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


_SWAPPED_COLORS = np.array([EMPTY, RED, BLUE], dtype=np.int8)


def place_stones(boards: Boards, moves: Cells) -> Boards:
    """Copies with the mover's stone put on each, still as the mover sees them."""
    after = boards.copy()
    after.reshape(len(after), after.shape[-1] ** 2)[np.arange(len(after)), moves] = BLUE
    return after


def flip_perspective(boards: Boards) -> Boards:
    """The boards as the other player sees them."""
    return _SWAPPED_COLORS[boards.transpose(0, 2, 1)]


def mover_has_won(boards: Boards) -> NDArray[np.bool_]:
    """Whether whoever sees each board as its own has joined its edges."""
    return np.asarray(winners(boards) == BLUE)


def as_positions(boards: Boards) -> Positions:
    """Boards as their movers see them, for a player who asks about colors."""
    return Positions(boards, np.full(len(boards), BLUE, dtype=np.int8))
