"""How does one play well without a net? By two-distance: a cell that is near to all four edges is good for both."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import BLUE, Boards
from whet.hex.distance import edge_distances
from whet.hex.player import Analysis
from whet.hex.rules import Positions, legal

_WINS = 2
"""The potential of a cell beside both edges."""


@dataclass(frozen=True, slots=True)
class TwoDistancePlayer:
    """Plays where the way through is shortest for itself and for the other."""

    name: str = "two-distance"
    sharpness: float = 0.5
    """A move that is better by one is played e ** sharpness times as often. Fitted to 13x13 games, as the next two."""
    tempo: float = 1.0
    steepness: float = 0.3
    """The chance of the mover is a logistic function of the difference of the potentials."""

    def analyse(self, positions: Positions) -> Analysis:
        """By the potentials of both players; a move that wins at once or keeps the other from it goes first."""
        own, others = potentials(positions)
        wins, must = own == _WINS, others == _WINS
        score = -(own + others) + 1000.0 * must + 1_000_000.0 * wins
        score = np.where(legal(positions.boards), self.sharpness * score, -np.inf)
        share = np.exp(score - score.max(axis=1, keepdims=True))
        policy = share / share.sum(axis=1, keepdims=True)
        behind = own.min(axis=1) - others.min(axis=1)
        value = 1 / (1 + np.exp(self.steepness * (behind - self.tempo)))
        value = np.where(wins.any(axis=1), 1.0, np.where(must.sum(axis=1) > 1, 0.0, value))
        return Analysis(policy.astype(np.float32), value.astype(np.float32))


def potentials(positions: Positions) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """(batch, cells) for the mover and for the other: how far each empty cell is from both of their edges together."""
    blue, red = _both(positions.boards)
    is_blue = (positions.movers == BLUE)[:, None]
    return np.where(is_blue, blue, red), np.where(is_blue, red, blue)


def _both(boards: Boards) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    top, bottom, left, right = edge_distances(boards).reshape(4, len(boards), -1)
    return top + bottom, left + right
