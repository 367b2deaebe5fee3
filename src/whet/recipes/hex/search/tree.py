"""What is known of many games, each a tree of positions? Arrays over games, nodes and moves, as movers see them."""

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import Boards

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
