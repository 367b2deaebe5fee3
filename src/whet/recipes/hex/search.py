"""Monte Carlo tree search (PUCT) over many games at once."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import Boards
from whet.recipes.hex.game.rules import flip_perspective, mover_has_won, place_stones

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
UNKNOWN = -1


def tree_bytes(size: int, *, num_nodes: int) -> int:
    """What one tree takes: a board, three numbers and a child for each cell of each node."""
    return num_nodes * size * size * (1 + 3 * 4 + 8)


class Trees:
    """One tree for each board; node 0 is its root. Every node was judged once, or is decided."""

    def __init__(self, roots: Boards, *, num_nodes: int) -> None:
        games, size = len(roots), roots.shape[-1]
        cells = size * size
        self.boards = np.zeros((games, num_nodes, size, size), dtype=np.int8)
        self.priors = np.zeros((games, num_nodes, cells), dtype=np.float32)
        self.visits = np.zeros((games, num_nodes, cells), dtype=np.float32)
        self.wins = np.zeros((games, num_nodes, cells), dtype=np.float32)
        """What visits found, summed: the mover's probability of winning by that move."""
        self.children = np.full((games, num_nodes, cells), UNKNOWN, dtype=np.int64)
        self.values = np.zeros((games, num_nodes), dtype=np.float32)
        """The mover's probability of winning, as it was judged."""
        self.is_lost = np.zeros((games, num_nodes), dtype=bool)
        """The other player has joined its edges."""
        self.sizes = np.ones(games, dtype=np.int64)
        self.boards[:, 0] = roots

    def add(self, games: Ints, parents: Ints, moves: Ints, boards: Boards) -> Ints:
        """A new node for each game below a move of its parent; the nodes' numbers."""
        nodes = self.sizes[games]
        self.boards[games, nodes] = boards
        self.children[games, parents, moves] = nodes
        self.sizes[games] += 1
        return nodes


Evaluator = Callable[[Boards], tuple[Floats, Floats]]
"""Boards in the mover's view to shares of moves (B, N * N) and the mover's probability of winning (B)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOptions:
    """How far is looked, and how curiously."""

    simulations: int = 64
    curiosity: float = 1.25
    """PUCT's constant: how much an unlikely or little visited move is worth a look; wins count 0 to 1."""
    caution: float = 0.1
    """How much worse than its position a move is thought to be before it was looked at."""
    noise_fraction: float = 0.0
    """Of the root's priors; for self-play."""
    noise_concentration: float = 10.0
    """Of the Dirichlet noise, over all legal moves together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeSearchResult:
    """What a search found for each board."""

    visits: Floats
    """(B, N * N): how often each move was looked at; the sum is the number of simulations."""
    win: Floats
    """(B): the mover's probability of winning, as the visits saw it."""

    @property
    def best(self) -> Ints:
        """The move that was looked at most."""
        return self.visits.argmax(1)

    @property
    def shares(self) -> Floats:
        """The share of visits of each move."""
        return self.visits / np.maximum(self.visits.sum(1, keepdims=True), 1)


def search_moves(
    boards: Boards, judge: Evaluator, how: SearchOptions, *, draw: np.random.Generator | None = None
) -> TreeSearchResult:
    """Looks ahead from undecided boards in the mover's view; `draw` is needed for noise only."""
    trees = Trees(boards, num_nodes=how.simulations + 1)
    games = np.arange(len(boards))
    _evaluate_nodes(trees, games, np.zeros(len(boards), dtype=np.int64), judge)
    if how.noise_fraction > 0:
        assert draw is not None
        add_noise(trees, how, draw)
    for _ in range(how.simulations):
        path = _descend(trees, how)
        leaves, is_new = _expand(trees, path)
        if is_new.any():
            _evaluate_nodes(trees, games[is_new], leaves[is_new], judge)
        _back_up(trees, path, trees.values[games, leaves])
    visits = trees.visits[:, 0]
    return TreeSearchResult(visits=visits.copy(), win=trees.wins[:, 0].sum(1) / np.maximum(visits.sum(1), 1))


Path = list[tuple[Ints, Ints, Ints]]
"""From the root: games that are still on the way, their nodes, and the moves they take."""


def _descend(trees: Trees, how: SearchOptions) -> Path:
    """To a move that was never taken, or to a decided position."""
    games = np.arange(len(trees.sizes))
    nodes = np.zeros(len(games), dtype=np.int64)
    path: Path = []
    while len(games):
        moves = _choose(trees, games, nodes, how)
        path.append((games, nodes, moves))
        below = trees.children[games, nodes, moves]
        goes_on = below != UNKNOWN
        goes_on[goes_on] = ~trees.is_lost[games[goes_on], below[goes_on]]
        games, nodes = games[goes_on], below[goes_on]
    return path


def _choose(trees: Trees, games: Ints, nodes: Ints, how: SearchOptions) -> Ints:
    visits = trees.visits[games, nodes]
    guess = np.maximum(trees.values[games, nodes] - how.caution, 0)[:, None]
    value = np.where(visits > 0, trees.wins[games, nodes] / np.maximum(visits, 1), guess)
    looks = np.sqrt(visits.sum(1, keepdims=True) + 1)
    score = value + how.curiosity * trees.priors[games, nodes] * looks / (1 + visits)
    is_taken = trees.boards[games, nodes].reshape(len(games), -1) != 0
    return np.where(is_taken, -np.inf, score).argmax(1)


def _expand(trees: Trees, path: Path) -> tuple[Ints, NDArray[np.bool_]]:
    """Each game's last node, made where it was not there, and whether it is new and undecided."""
    num_games = len(trees.sizes)
    leaves = np.zeros(num_games, dtype=np.int64)
    is_new = np.zeros(num_games, dtype=bool)
    for games, nodes, moves in path:
        below = trees.children[games, nodes, moves]
        is_there = below != UNKNOWN
        leaves[games[is_there]] = below[is_there]
        made, parents, taken = games[~is_there], nodes[~is_there], moves[~is_there]
        if not len(made):
            continue
        after = place_stones(trees.boards[made, parents], taken)
        new = trees.add(made, parents, taken, flip_perspective(after))
        # Lost for whoever would move now: its value stays 0.
        trees.is_lost[made, new] = mover_has_won(after)
        leaves[made] = new
        is_new[made] = ~trees.is_lost[made, new]
    return leaves, is_new


def _evaluate_nodes(trees: Trees, games: Ints, nodes: Ints, judge: Evaluator) -> None:
    shares, wins = judge(trees.boards[games, nodes])
    trees.priors[games, nodes] = shares
    trees.values[games, nodes] = wins


def _back_up(trees: Trees, path: Path, values: Floats) -> None:
    """A leaf's value to every move on the way to it; each mover sees the opposite of the next."""
    length = np.zeros(len(values), dtype=np.int64)
    for games, _, _ in path:
        length[games] += 1
    for depth, (games, nodes, moves) in enumerate(path):
        is_other = (length[games] - depth) % 2 == 1
        trees.wins[games, nodes, moves] += np.where(is_other, 1 - values[games], values[games])
        trees.visits[games, nodes, moves] += 1


def add_noise(trees: Trees, how: SearchOptions, draw: np.random.Generator) -> None:
    """Dirichlet noise on the priors of the roots, so that self-play tries what the net does not think of."""
    is_legal = trees.boards[:, 0].reshape(len(trees.sizes), -1) == 0
    concentration = how.noise_concentration / is_legal.sum(1, keepdims=True)
    noise = draw.gamma(np.where(is_legal, concentration, 1.0)) * is_legal
    noise /= np.maximum(noise.sum(1, keepdims=True), 1e-30)
    trees.priors[:, 0] = (1 - how.noise_fraction) * trees.priors[:, 0] + how.noise_fraction * noise
