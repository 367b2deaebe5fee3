"""How do players take turns when each sees the board as its own? Blue is always to move: red's boards are mirrored.

Two boards that differ by the mirror and the colours look the same to their movers, so of the game's four symmetries
only the half turn is left to learn, and a search needs no colours.
"""

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import BLUE, EMPTY, RED, Boards, Cells
from whet.hex.connecting import winners
from whet.hex.rules import Positions

_SWAPPED = np.array([EMPTY, RED, BLUE], dtype=np.int8)


def with_stones(boards: Boards, moves: Cells) -> Boards:
    """Copies with the mover's stone put on each, still as the mover sees them."""
    after = boards.copy()
    after.reshape(len(after), after.shape[-1] ** 2)[np.arange(len(after)), moves] = BLUE
    return after


def passed_on(boards: Boards) -> Boards:
    """The boards as the other player sees them."""
    return _SWAPPED[boards.transpose(0, 2, 1)]


def has_won(boards: Boards) -> NDArray[np.bool_]:
    """Whether whoever sees each board as its own has joined its edges."""
    return np.asarray(winners(boards) == BLUE)


def as_positions(boards: Boards) -> Positions:
    """Boards as their movers see them, for a player who asks about colours."""
    return Positions(boards, np.full(len(boards), BLUE, dtype=np.int8))
