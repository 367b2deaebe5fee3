"""What can every player be asked, with a net or without? How good each move is, and who will win."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import Cells
from whet.hex.rules import Positions, legal


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a player thinks of some positions."""

    policy: NDArray[np.float32]
    """(batch, cells): the share of each move; 0 where a stone lies, and each row sums to 1 unless the board is full."""
    value: NDArray[np.float32]
    """(batch,): the chance that the mover wins, 0 to 1."""


class Player(Protocol):
    """Anybody who can play; the same positions give the same analysis."""

    @property
    def name(self) -> str:
        """As shown to people: `random`, `two-distance`, the name of a run."""

    def analyse(self, positions: Positions) -> Analysis:
        """What it thinks of positions of a size it knows; the games go on in all of them."""


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Every legal move alike."""

    name: str = "random"

    def analyse(self, positions: Positions) -> Analysis:
        """Knows nothing."""
        is_legal = legal(positions.boards)
        share = is_legal / np.maximum(1, is_legal.sum(axis=1, keepdims=True))
        return Analysis(share.astype(np.float32), np.full(len(positions), 0.5, dtype=np.float32))


def best_moves(policy: NDArray[np.float32]) -> Cells:
    """(batch,): the move of the largest share; of equals the first."""
    return policy.argmax(axis=1).astype(np.int64)


def draw_moves(policy: NDArray[np.float32], generator: np.random.Generator, *, temperature: float = 1.0) -> Cells:
    """(batch,): a move of each row, drawn by its share; a temperature below 1 favours the better ones, 0 the best."""
    if temperature <= 0:
        return best_moves(policy)
    with np.errstate(divide="ignore"):
        scores = np.log(policy.astype(np.float64)) / temperature
    # The largest of the scores with Gumbel noise is a draw by the shares.
    return (scores + generator.gumbel(size=scores.shape)).argmax(axis=1).astype(np.int64)
