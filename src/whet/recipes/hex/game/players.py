"""The player interface, and players without a net: random and two-distance."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, Boards, Cells
from whet.recipes.hex.game.distance import edge_distances
from whet.recipes.hex.game.rules import Positions, legal


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

    def analyze(self, positions: Positions) -> Analysis:
        """What it thinks of positions of a size it knows; the games go on in all of them."""


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Every legal move alike."""

    name: str = "random"

    def analyze(self, positions: Positions) -> Analysis:
        """Knows nothing."""
        is_legal = legal(positions.boards)
        share = is_legal / np.maximum(1, is_legal.sum(axis=1, keepdims=True))
        return Analysis(share.astype(np.float32), np.full(len(positions), 0.5, dtype=np.float32))


def best_moves(policy: NDArray[np.float32]) -> Cells:
    """(batch,): the move of the largest share; of equals the first."""
    return policy.argmax(axis=1).astype(np.int64)


def draw_moves(policy: NDArray[np.float32], generator: np.random.Generator, *, temperature: float = 1.0) -> Cells:
    """(batch,): a move of each row, drawn by its share; a temperature below 1 favors the better ones, 0 the best."""
    if temperature <= 0:
        return best_moves(policy)
    with np.errstate(divide="ignore"):
        scores = np.log(policy.astype(np.float64)) / temperature
    # The largest of the scores with Gumbel noise is a draw by the shares.
    return (scores + generator.gumbel(size=scores.shape)).argmax(axis=1).astype(np.int64)


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

    def analyze(self, positions: Positions) -> Analysis:
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


NETLESS_PLAYERS: dict[str, Player] = {"random": RandomPlayer(), "two-distance": TwoDistancePlayer()}
PLAYABLE_SIZES = tuple(range(3, 20))
"""Boards that a person can be asked to play on."""
