"""Hex boards: int8 arrays of shape (size, size). Blue connects top and bottom, red connects left and right."""

import numpy as np
from numpy.typing import NDArray

from whet.base.errors import UsageError

# Columns are named by letters, so a board has at most 26.
MIN_SIZE, MAX_SIZE = 2, 26
EMPTY, BLUE, RED = 0, 1, 2
"""The values of a cell. Blue moves first."""
COLORS = ("empty", "blue", "red")
NEIGHBORS = ((0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1))
"""Offsets (row, column) of the six neighbors of a cell."""

Boards = NDArray[np.int8]
Cells = NDArray[np.int64]
"""Cell numbers in row-major order: row * size + column."""
NO_MOVE, SWAP = -1, -2
"""Special values in lists of moves. NO_MOVE is padding. With SWAP, red takes over blue's first stone (see `replay`)."""


def check_size(size: int) -> int:
    """Return the size if it is valid. Raise UsageError otherwise."""
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UsageError("invalid board size", got=f"size {size}", try_=f"{MIN_SIZE} to {MAX_SIZE}")
    return size


def other(color: int) -> int:
    """Return the opponent's color."""
    return BLUE + RED - color


def cell_name(cell: int, *, size: int) -> str:
    """Return the name of a cell: a letter for the column and a number for the row, counted from the top left.

    >>> cell_name(0, size=5), cell_name(5 * 3 + 2, size=5)
    ('a1', 'c4')
    """
    row, column = divmod(int(cell), size)
    return f"{chr(ord('a') + column)}{row + 1}"


def parse_cell(name: str, *, size: int) -> int:
    """Return the number of the cell with this name. Raise UsageError if there is none.

    >>> parse_cell("C4", size=5)
    17
    """
    word = name.strip().lower()
    column, number = ord(word[0]) - ord("a") if word else -1, word[1:]
    if 0 <= column < size and number.isascii() and number.isdigit() and len(number) < 3 and 1 <= int(number) <= size:
        return (int(number) - 1) * size + column
    last = cell_name(size * size - 1, size=size)
    raise UsageError("no such cell", got=repr(name[:40]), try_=f"a1 to {last}: a letter for the column, then the row")
