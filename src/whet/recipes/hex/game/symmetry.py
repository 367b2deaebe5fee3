"""Which positions are the same game? Four symmetries: as it is, turned by 180 degrees, and mirrored on each diagonal.

A mirrored board swaps the edges, so it swaps the colors as well, stones and mover. The mover's chances stay.
"""

from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, RED, Cells
from whet.recipes.hex.game.rules import Positions

IDENTITY, TURNED, MIRRORED, MIRRORED_TURNED = range(4)
"""MIRRORED is on the diagonal from a1, MIRRORED_TURNED on the other."""
SYMMETRIES = (IDENTITY, TURNED, MIRRORED, MIRRORED_TURNED)
"""Each is its own inverse, and i then j is i ^ j."""

T = TypeVar("T", bound=np.generic)
Symmetries = int | NDArray[np.int64]
"""One for all positions, or one for each."""


@cache
def cell_maps(size: int) -> NDArray[np.int64]:
    """(4, cells): where each symmetry takes each cell."""
    row, column = np.divmod(np.arange(size * size), size)
    maps = np.stack([row * size + column, (size - 1 - row) * size + size - 1 - column, column * size + row])
    maps = np.concatenate([maps, maps[TURNED][maps[MIRRORED]][None]])
    maps.flags.writeable = False
    return maps


def transform(positions: Positions, symmetry: Symmetries) -> Positions:
    """The same positions seen otherwise."""
    which = _each(symmetry, len(positions))
    size = positions.size
    cells = transform_policy(positions.boards.reshape(len(positions), size**2), symmetry, size=size)
    is_mirrored = which >= MIRRORED
    swapped = np.array([EMPTY, RED, BLUE], dtype=np.int8)
    cells = np.where(is_mirrored[:, None], swapped[cells], cells)
    movers = np.where(is_mirrored, swapped[positions.movers], positions.movers)
    return Positions(cells.reshape(positions.boards.shape), movers)


def transform_moves(moves: Cells, symmetry: Symmetries, *, size: int) -> Cells:
    """(batch,): where each move goes; a number below zero (no move) stays."""
    moves = np.asarray(moves)
    moved = cell_maps(size)[_each(symmetry, len(moves)), np.maximum(moves, 0)]
    return np.where(moves < 0, moves, moved)


def transform_policy(policy: NDArray[T], symmetry: Symmetries, *, size: int) -> NDArray[T]:
    """(batch, cells): what each cell has, on the cell it goes to."""
    # Each symmetry is its own inverse: where a cell goes is where its new content comes from.
    return np.take_along_axis(policy, cell_maps(size)[_each(symmetry, len(policy))], axis=1)


def mover_view(positions: Positions) -> tuple[Positions, NDArray[np.int64]]:
    """The same positions with blue to move everywhere, and the symmetry that was used on each (and leads back)."""
    symmetry = np.where(positions.movers == RED, MIRRORED, IDENTITY).astype(np.int64)
    return transform(positions, symmetry), symmetry


def _each(symmetry: Symmetries, count: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.asarray(symmetry, dtype=np.int64), (count,))
