"""The rules of Hex for batches of boards of one size: legal moves and winners."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, RED, Boards, Cells, check_size

Colors = NDArray[np.int8]
"""(batch,): EMPTY (no player), BLUE or RED."""


@dataclass(frozen=True, slots=True)
class Positions:
    """A batch of boards and the players to move. After a swap, the stones alone do not determine the mover."""

    boards: Boards
    """(batch, size, size): EMPTY, BLUE, RED."""
    movers: Colors
    """(batch,): the player to move, BLUE or RED."""

    @property
    def size(self) -> int:
        """Number of cells along a side."""
        return int(self.boards.shape[-1])

    def __len__(self) -> int:
        return len(self.boards)

    def take(self, index: "NDArray[np.int64] | NDArray[np.bool_] | slice") -> "Positions":
        return Positions(self.boards[index], self.movers[index])


def start(batch: int, *, size: int) -> Positions:
    """Return empty boards with blue to move."""
    boards = np.zeros((batch, check_size(size), size), dtype=np.int8)
    return Positions(boards, np.full(batch, BLUE, dtype=np.int8))


def legal(boards: Boards) -> NDArray[np.bool_]:
    """Return which moves are legal, (batch, cells). The games must not be finished."""
    return np.asarray(boards == EMPTY).reshape(len(boards), boards.shape[-1] ** 2)


def play(positions: Positions, moves: Cells) -> Positions:
    """Return the positions after one legal move on each board."""
    cells = positions.boards.reshape(len(positions), positions.size**2).copy()
    cells[np.arange(len(positions)), moves] = positions.movers
    return Positions(cells.reshape(positions.boards.shape), (BLUE + RED - positions.movers).astype(np.int8))


# --- Winners ----------------------------------------------------------------------------------------------------------
#
# Flood fill from one edge. A row of a board is one machine word, and the same row of all boards is contiguous, so one
# numpy call processes thousands of boards. Sweep down and up until nothing changes. Drop decided boards early.

_BOARDS_PER_PASS = 16_384
"""Number of boards processed at once. They fit into the cache of a core."""

Words = NDArray[Any]
"""(rows, boards) of uint16 or uint32. Bit c is column c."""


def winners(boards: Boards) -> NDArray[np.int8]:
    """Return the winners, (batch,): BLUE, RED or EMPTY. An illegal board with two winners counts as BLUE."""
    result = np.full(len(boards), EMPTY, dtype=np.int8)
    for begin in range(0, len(boards), _BOARDS_PER_PASS):
        chunk = boards[begin : begin + _BOARDS_PER_PASS]
        part = result[begin : begin + _BOARDS_PER_PASS]
        size = chunk.shape[-1]
        # Make cells the first axis, so that one cell of all boards is contiguous in memory.
        cells = np.ascontiguousarray(chunk.reshape(len(chunk), -1).T).view(np.uint8).reshape(size, size, len(chunk))
        part[connects(_pack_rows(cells >> 1, by_column=True))] = RED
        part[connects(_pack_rows(cells & 1, by_column=False))] = BLUE
    return result


def connects(stones: Words) -> NDArray[np.bool_]:
    """Return whether the stones connect the first row to the last, (boards,)."""
    size, count = stones.shape
    connected = np.zeros(count, dtype=np.bool_)
    active = np.arange(count)
    reached = np.zeros_like(stones)
    reached[0] = stones[0]
    while True:
        for row in range(1, size):
            above = reached[row - 1]
            # A cell has two neighbors in the row above, in the same column and in the next, hence the shift by one bit.
            reached[row] = _fill(stones[row], (above | (above >> 1) | reached[row]) & stones[row], size=size)
        is_connected = reached[-1] != 0
        connected[active[is_connected]] = True
        before = reached.copy()
        for row in range(size - 2, -1, -1):
            below = reached[row + 1]
            reached[row] = _fill(stones[row], (below | (below << 1) | reached[row]) & stones[row], size=size)
        is_active = (reached != before).any(axis=0) & ~is_connected
        if not is_active.any():
            return connected
        # Compacting the arrays costs a copy, so do it only if many boards are finished.
        if is_active.mean() < 0.7:
            active, stones, reached = active[is_active], stones[:, is_active], reached[:, is_active]


def _fill(stones: Words, seeds: Words, *, size: int) -> Words:
    """Return all stones of a row that are in an unbroken line with a seed. Seeds must be stones."""
    # Fill toward higher bits: the carry of an addition propagates from the lowest seed of a line to its end.
    filled = stones & (~(stones + seeds) | seeds)
    lines, shift = stones.copy(), 1
    while True:  # Fill toward lower bits, doubling the distance in each iteration.
        filled |= lines & (filled >> shift)
        shift *= 2
        if shift >= size:
            return filled
        lines &= lines >> (shift // 2)


def _pack_rows(stones: NDArray[Any], *, by_column: bool) -> Words:
    """Pack zeros and ones, (row, column, board), into one word per row, or per column, which transposes the board."""
    size, _, count = stones.shape
    # The additions in _fill discard the carry out of the highest bit, so 16 columns fit into 16 bits.
    words: Words = np.zeros((size, count), dtype=np.uint16 if size <= 16 else np.uint32)
    for bit in range(size - 1, -1, -1):
        words <<= 1
        words |= stones[bit] if by_column else stones[:, bit]
    return words


# --- The mover's perspective -----------------------------------------------------------------------------------------
#
# Nets and searches get every board as if blue were to move: if red is to move, the board is mirrored and its colors are
# swapped. Of the four symmetries of the game, only the rotation by 180 degrees then remains to be learned.

_SWAPPED_COLORS = np.array([EMPTY, RED, BLUE], dtype=np.int8)


def place_stones(boards: Boards, moves: Cells) -> Boards:
    """Return copies of the boards with one more stone of the mover. The perspective does not change."""
    after = boards.copy()
    after.reshape(len(after), after.shape[-1] ** 2)[np.arange(len(after)), moves] = BLUE
    return after


def flip_perspective(boards: Boards) -> Boards:
    """Return the boards from the opponent's perspective."""
    return _SWAPPED_COLORS[boards.transpose(0, 2, 1)]


def mover_has_won(boards: Boards) -> NDArray[np.bool_]:
    """Return whether the player from whose perspective the board is given has won, (batch,)."""
    return np.asarray(winners(boards) == BLUE)


def as_positions(boards: Boards) -> Positions:
    """Return boards from the mover's perspective as positions with blue to move."""
    return Positions(boards, np.full(len(boards), BLUE, dtype=np.int8))
