"""Who has joined their edges, on many boards at once? A flood from one edge, a row of each board in one machine word.

The words of one row of all boards lie side by side, so that each step is one call of numpy for thousands of boards.
Floods go down and up over the rows until nothing changes; boards that are decided leave early.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import BLUE, EMPTY, RED, Boards

_AT_ONCE = 16_384
"""Boards whose words fit into a core's cache."""

Words = NDArray[Any]
"""(rows, boards) of uint16 or uint32: bit c is column c."""


def winners(boards: Boards) -> NDArray[np.int8]:
    """(batch,): BLUE, RED, or EMPTY where nobody has joined their edges. A board with two winners says BLUE."""
    found = np.full(len(boards), EMPTY, dtype=np.int8)
    for begin in range(0, len(boards), _AT_ONCE):
        some = boards[begin : begin + _AT_ONCE]
        part = found[begin : begin + _AT_ONCE]
        size = some.shape[-1]
        # Cells first: a cell of all boards is one contiguous line.
        cells = np.ascontiguousarray(some.reshape(len(some), -1).T).view(np.uint8).reshape(size, size, len(some))
        part[joins(_packed(cells >> 1, by_column=True))] = RED
        part[joins(_packed(cells & 1, by_column=False))] = BLUE
    return found


def joins(stones: Words) -> NDArray[np.bool_]:
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
