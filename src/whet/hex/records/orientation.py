"""Which edges does the first player join in these games? Both readings are replayed; the one that ends games wins."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whet.base.model import FrozenModel
from whet.hex.board import EMPTY
from whet.hex.games import Verdict, as_moves, judge
from whet.hex.symmetry import MIRRORED, cell_maps


class Orientation(FrozenModel):
    """How the moves of a file are read."""

    is_mirrored: bool
    """Whether the first player joins left and right in the record: columns and rows are exchanged on reading."""
    num_complete: int
    """Games that end by their last stone in this reading."""
    num_complete_otherwise: int
    num_looked_at: int

    def told(self) -> str:
        """For people."""
        edges = "left and right: rows and columns exchanged" if self.is_mirrored else "top and bottom"
        counts = f"{self.num_complete:,} of {self.num_looked_at:,} games end so"
        return f"the first player joins {edges} ({counts}, {self.num_complete_otherwise:,} the other way)"


def find_orientation(games: Sequence[Sequence[int]], *, size: int) -> Orientation:
    """By which reading more games are played by the rules and won by their last stone; of equals the usual one."""
    moves = as_moves(games)
    usual, other = (num_complete(judge(read(moves, size=size, is_mirrored=way), size=size)) for way in (False, True))
    is_mirrored = other > usual
    return Orientation(
        is_mirrored=is_mirrored,
        num_complete=max(usual, other),
        num_complete_otherwise=min(usual, other),
        num_looked_at=len(games),
    )


def num_complete(verdict: Verdict) -> int:
    """How many games were played to their end."""
    return int((verdict.is_legal & (verdict.winners != EMPTY)).sum())


def read(moves: NDArray[np.int16], *, size: int, is_mirrored: bool) -> NDArray[np.int16]:
    """The moves with the first player on top and bottom; a swap stays one."""
    is_cell = (moves >= 0) & (moves < size * size)
    if not is_mirrored:
        return moves
    return np.where(is_cell, cell_maps(size)[MIRRORED][np.where(is_cell, moves, 0)], moves).astype(np.int16)
