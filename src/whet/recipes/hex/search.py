"""Monte Carlo tree search (PUCT) over many games at once. The new leaves of all games are evaluated in one batch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import Boards
from whet.recipes.hex.game.rules import flip_perspective, mover_has_won, place_stones

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
# Marks a move that has not been tried, and thus has no child node.
UNKNOWN = -1
# PUCT exploration constant, for values from 0 to 1.
_EXPLORATION = 1.25
# The value of an unvisited move is the value of its position minus this constant.
_FIRST_PLAY_REDUCTION = 0.1
# Total concentration of the Dirichlet noise over all legal moves.
_NOISE_CONCENTRATION = 10.0


def tree_bytes(size: int, *, num_nodes: int) -> int:
    """Return the bytes of one tree. A node stores a board, and three floats and a child index per cell."""
    return num_nodes * size * size * (1 + 3 * 4 + 8)


class Trees:
    """One search tree per game. Node 0 is the root. Every node has been evaluated once, or is a finished game."""

    def __init__(self, roots: Boards, *, num_nodes: int) -> None:
        games, size = len(roots), roots.shape[-1]
        cells = size * size
        self.boards = np.zeros((games, num_nodes, size, size), dtype=np.int8)
        self.priors = np.zeros((games, num_nodes, cells), dtype=np.float32)
        self.visits = np.zeros((games, num_nodes, cells), dtype=np.float32)
        self.wins = np.zeros((games, num_nodes, cells), dtype=np.float32)
        """Sum of the mover's win probability over all visits of each move."""
        self.children = np.full((games, num_nodes, cells), UNKNOWN, dtype=np.int64)
        self.values = np.zeros((games, num_nodes), dtype=np.float32)
        """The mover's win probability, from the net. It is 0 if the game is over."""
        self.is_lost = np.zeros((games, num_nodes), dtype=bool)
        """Whether the game is over. The mover has then lost, because the opponent has just connected their edges."""
        self.sizes = np.ones(games, dtype=np.int64)
        self.boards[:, 0] = roots

    def add(self, games: Ints, parents: Ints, moves: Ints, boards: Boards) -> Ints:
        """Add one node to each of these games, as the child that a move leads to. Return the new node indices."""
        nodes = self.sizes[games]
        self.boards[games, nodes] = boards
        self.children[games, parents, moves] = nodes
        self.sizes[games] += 1
        return nodes


Evaluator = Callable[[Boards], tuple[Floats, Floats]]
"""Maps boards from the mover's perspective to a policy, (B, N * N), and the mover's win probability, (B,)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    simulations: int = 64
    noise_fraction: float = 0.0
    """Weight of the Dirichlet noise in the priors of the root. It is used for self-play."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSearchResult:
    visits: Floats
    """(B, N * N): visit counts of the moves. Their sum is the number of simulations."""
    win: Floats
    """(B,): the mover's mean win probability over all visits."""

    @property
    def shares(self) -> Floats:
        """Fraction of the visits of each move, (B, N * N)."""
        return self.visits / np.maximum(self.visits.sum(1, keepdims=True), 1)


def search_moves(
    boards: Boards, evaluate: Evaluator, options: SearchOptions, *, draw: np.random.Generator | None = None
) -> TreeSearchResult:
    """Run a search from each board. Boards must be undecided and in the mover's perspective.

    `draw` is required only if `options.noise_fraction` is above 0.
    """
    trees = Trees(boards, num_nodes=options.simulations + 1)
    games = np.arange(len(boards))
    _evaluate_nodes(trees, games, np.zeros(len(boards), dtype=np.int64), evaluate)
    if options.noise_fraction > 0:
        assert draw is not None
        add_noise(trees, options, draw)
    for _ in range(options.simulations):
        path = _descend(trees)
        leaves, is_new = _expand(trees, path)
        if is_new.any():
            _evaluate_nodes(trees, games[is_new], leaves[is_new], evaluate)
        _back_up(trees, path, trees.values[games, leaves])
    visits = trees.visits[:, 0]
    return TreeSearchResult(visits=visits.copy(), win=trees.wins[:, 0].sum(1) / np.maximum(visits.sum(1), 1))


Path = list[tuple[Ints, Ints, Ints]]
"""For each depth from the root: the games that reach it, their nodes, and the moves chosen there."""


def _descend(trees: Trees) -> Path:
    """Follow the moves with the highest score to a move that has not been tried, or to a finished game."""
    games = np.arange(len(trees.sizes))
    nodes = np.zeros(len(games), dtype=np.int64)
    path: Path = []
    # All games descend at the same time. A game is dropped from the arrays when it reaches its leaf.
    while len(games):
        moves = _choose(trees, games, nodes)
        path.append((games, nodes, moves))
        children = trees.children[games, nodes, moves]
        continues = children != UNKNOWN
        continues[continues] = ~trees.is_lost[games[continues], children[continues]]
        games, nodes = games[continues], children[continues]
    return path


def _choose(trees: Trees, games: Ints, nodes: Ints) -> Ints:
    visits = trees.visits[games, nodes]
    guess = np.maximum(trees.values[games, nodes] - _FIRST_PLAY_REDUCTION, 0)[:, None]
    value = np.where(visits > 0, trees.wins[games, nodes] / np.maximum(visits, 1), guess)
    # Without + 1, the priors would have no influence on the first visit, when all counts are 0.
    visit_term = np.sqrt(visits.sum(1, keepdims=True) + 1)
    score = value + _EXPLORATION * trees.priors[games, nodes] * visit_term / (1 + visits)
    is_occupied = trees.boards[games, nodes].reshape(len(games), -1) != 0
    return np.where(is_occupied, -np.inf, score).argmax(1)


def _expand(trees: Trees, path: Path) -> tuple[Ints, NDArray[np.bool_]]:
    """Add the leaf of each game if it does not exist. Return the leaves, and whether they must be evaluated."""
    num_games = len(trees.sizes)
    leaves = np.zeros(num_games, dtype=np.int64)
    is_new = np.zeros(num_games, dtype=bool)
    for games, nodes, moves in path:
        children = trees.children[games, nodes, moves]
        exists = children != UNKNOWN
        leaves[games[exists]] = children[exists]
        growing, parents, played = games[~exists], nodes[~exists], moves[~exists]
        if not len(growing):
            continue
        after = place_stones(trees.boards[growing, parents], played)
        new = trees.add(growing, parents, played, flip_perspective(after))
        # If the move won the game, the next mover has lost, so the value of the node stays 0.
        trees.is_lost[growing, new] = mover_has_won(after)
        leaves[growing] = new
        is_new[growing] = ~trees.is_lost[growing, new]
    return leaves, is_new


def _evaluate_nodes(trees: Trees, games: Ints, nodes: Ints, evaluate: Evaluator) -> None:
    policy, values = evaluate(trees.boards[games, nodes])
    trees.priors[games, nodes] = policy
    trees.values[games, nodes] = values


def _back_up(trees: Trees, path: Path, values: Floats) -> None:
    """Add the value of each leaf to the moves that led to it, from the perspective of the player who made the move."""
    length = np.zeros(len(values), dtype=np.int64)
    for games, _, _ in path:
        length[games] += 1
    for depth, (games, nodes, moves) in enumerate(path):
        # Values are from the perspective of the mover at the leaf. Movers alternate with depth.
        is_opponent = (length[games] - depth) % 2 == 1
        trees.wins[games, nodes, moves] += np.where(is_opponent, 1 - values[games], values[games])
        trees.visits[games, nodes, moves] += 1


def add_noise(trees: Trees, options: SearchOptions, draw: np.random.Generator) -> None:
    """Mix Dirichlet noise into the priors of the roots, so that self-play tries moves with low priors."""
    is_legal = trees.boards[:, 0].reshape(len(trees.sizes), -1) == 0
    concentration = _NOISE_CONCENTRATION / is_legal.sum(1, keepdims=True)
    # Normalized gamma samples are a Dirichlet sample. Illegal moves get a valid dummy shape parameter and are masked.
    noise = draw.gamma(np.where(is_legal, concentration, 1.0)) * is_legal
    noise /= np.maximum(noise.sum(1, keepdims=True), 1e-30)
    trees.priors[:, 0] = (1 - options.noise_fraction) * trees.priors[:, 0] + options.noise_fraction * noise
