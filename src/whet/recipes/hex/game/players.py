"""Interface of players, and the players without a net: random and two-distance."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, Cells
from whet.recipes.hex.game.distance import edge_distances
from whet.recipes.hex.game.rules import Positions, legal


@dataclass(frozen=True, slots=True)
class Analysis:
    """A player's evaluation of positions."""

    policy: NDArray[np.float32]
    """(batch, cells): the probability of each move, which is 0 for occupied cells."""
    value: NDArray[np.float32]
    """(batch,): the probability that the mover wins."""


class Player(Protocol):
    """Interface of players. Analyses are deterministic."""

    @property
    def name(self) -> str:
        """Displayed name, such as `random`, `two-distance` or the name of a run."""

    def analyze(self, positions: Positions) -> Analysis:
        """Evaluate positions. The games must not be finished."""


@dataclass(frozen=True, slots=True)
class RandomPlayer:
    """Plays uniformly random legal moves."""

    name: str = "random"

    def analyze(self, positions: Positions) -> Analysis:
        is_legal = legal(positions.boards)
        policy = is_legal / np.maximum(1, is_legal.sum(axis=1, keepdims=True))
        return Analysis(policy.astype(np.float32), np.full(len(positions), 0.5, dtype=np.float32))


def best_moves(policy: NDArray[np.float32]) -> Cells:
    """Return the most probable moves, (batch,). Among equal moves, choose the first."""
    return policy.argmax(axis=1).astype(np.int64)


def draw_moves(policy: NDArray[np.float32], generator: np.random.Generator, *, temperature: float = 1.0) -> Cells:
    """Sample moves from a policy, (batch,). Lower temperatures favor better moves, and 0 selects the best."""
    if temperature <= 0:
        return best_moves(policy)
    with np.errstate(divide="ignore"):
        scores = np.log(policy.astype(np.float64)) / temperature
    # Gumbel-max trick: the argmax of log-probabilities plus Gumbel noise is a sample from the distribution.
    return (scores + generator.gumbel(size=scores.shape)).argmax(axis=1).astype(np.int64)


_WINNING = 2
"""Potential (sum of the distances to both edges) of a winning move."""
_SHARPNESS, _TEMPO, _STEEPNESS = 0.5, 1.0, 0.3
"""Parameters fitted to 13x13 games. A move whose score is better by 1 is e ** _SHARPNESS times as probable, and the
value is a logistic function of the difference between the players' smallest potentials."""


@dataclass(frozen=True, slots=True)
class TwoDistancePlayer:
    """Prefers cells with small two-distances to the edges for both players."""

    name: str = "two-distance"

    def analyze(self, positions: Positions) -> Analysis:
        # Moves that win immediately come first, followed by moves that prevent an immediate win of the opponent.
        own, opponent = potentials(positions)
        wins, must = own == _WINNING, opponent == _WINNING
        score = -(own + opponent) + 1000.0 * must + 1_000_000.0 * wins
        score = np.where(legal(positions.boards), _SHARPNESS * score, -np.inf)
        weights = np.exp(score - score.max(axis=1, keepdims=True))
        policy = weights / weights.sum(axis=1, keepdims=True)
        behind = own.min(axis=1) - opponent.min(axis=1)
        value = 1 / (1 + np.exp(_STEEPNESS * (behind - _TEMPO)))
        value = np.where(wins.any(axis=1), 1.0, np.where(must.sum(axis=1) > 1, 0.0, value))
        return Analysis(policy.astype(np.float32), value.astype(np.float32))


def potentials(positions: Positions) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Return the sums of the two-distances to both edges for the mover and the opponent, each (batch, cells)."""
    top, bottom, left, right = edge_distances(positions.boards).reshape(4, len(positions), -1)
    blue, red = top + bottom, left + right
    is_blue = (positions.movers == BLUE)[:, None]
    return np.where(is_blue, blue, red), np.where(is_blue, red, blue)


NETLESS_PLAYERS: dict[str, Player] = {"random": RandomPlayer(), "two-distance": TwoDistancePlayer()}
PLAYABLE_SIZES = tuple(range(3, 20))
"""Board sizes that users can choose from."""
