"""The four symmetries of Hex: identity, rotation by 180 degrees, and reflection across each diagonal.

A reflection exchanges the edges, so it also exchanges the colors of the stones and of the mover. The mover's chance of
winning does not change.
"""

from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, RED, Cells
from whet.recipes.hex.game.rules import Positions

IDENTITY, TURNED, MIRRORED, MIRRORED_TURNED = range(4)
"""MIRRORED reflects across the diagonal through a1, MIRRORED_TURNED across the other diagonal."""
SYMMETRIES = (IDENTITY, TURNED, MIRRORED, MIRRORED_TURNED)
"""All symmetries. Each is its own inverse, and the composition of i and j is i ^ j."""

T = TypeVar("T", bound=np.generic)
Symmetries = int | NDArray[np.int64]
"""One symmetry for all positions, or one per position."""


@cache
def cell_maps(size: int) -> NDArray[np.int64]:
    """Return the image of each cell under each symmetry, (4, cells)."""
    row, column = np.divmod(np.arange(size * size), size)
    maps = np.stack([row * size + column, (size - 1 - row) * size + size - 1 - column, column * size + row])
    maps = np.concatenate([maps, maps[TURNED][maps[MIRRORED]][None]])
    maps.flags.writeable = False
    return maps


def transform(positions: Positions, symmetry: Symmetries) -> Positions:
    """Apply one symmetry to each position."""
    which = _each(symmetry, len(positions))
    size = positions.size
    cells = transform_policy(positions.boards.reshape(len(positions), size**2), symmetry, size=size)
    is_mirrored = which >= MIRRORED
    swapped = np.array([EMPTY, RED, BLUE], dtype=np.int8)
    cells = np.where(is_mirrored[:, None], swapped[cells], cells)
    movers = np.where(is_mirrored, swapped[positions.movers], positions.movers)
    return Positions(cells.reshape(positions.boards.shape), movers)


def transform_moves(moves: Cells, symmetry: Symmetries, *, size: int) -> Cells:
    """Apply symmetries to moves, (batch,). Negative values such as NO_MOVE do not change."""
    moves = np.asarray(moves)
    moved = cell_maps(size)[_each(symmetry, len(moves)), np.maximum(moves, 0)]
    return np.where(moves < 0, moves, moved)


def transform_policy(policy: NDArray[T], symmetry: Symmetries, *, size: int) -> NDArray[T]:
    """Apply symmetries to values per cell, (batch, cells)."""
    # A gather can replace the scatter: each symmetry is its own inverse, so the image of a cell is also the source of
    # its value.
    return np.take_along_axis(policy, cell_maps(size)[_each(symmetry, len(policy))], axis=1)


def mover_view(positions: Positions) -> tuple[Positions, NDArray[np.int64]]:
    """Transform positions so that blue is to move. Return them, and the symmetry that was applied to each, (batch,)."""
    symmetry = np.where(positions.movers == RED, MIRRORED, IDENTITY).astype(np.int64)
    return transform(positions, symmetry), symmetry


def _each(symmetry: Symmetries, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.asarray(symmetry, dtype=np.int64), (count,))
