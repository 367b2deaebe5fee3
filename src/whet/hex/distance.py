"""How many moves is a cell away from an edge, if the opponent answers each of them?

The two-distance of Queenbee (van Rijswijck, 2002): a cell beside the edge is at 1; another is one further than the
second nearest of its neighbours, because the opponent will take the nearest. A chain of own stones makes all cells
around it neighbours, and a chain at the edge belongs to the edge.

A cell is within k + 1 if two different neighbours are within k. Two of a set are different if its smallest and its
largest cell number are, so two maxima for each cell and each chain are enough, for all boards at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import BLUE, EMPTY, RED, Boards
from whet.hex.groups import around, chains

_AT_ONCE = 1024


def far(size: int) -> int:
    """Stands for all that is out of reach."""
    return 2 * size


def edge_distances(boards: Boards) -> NDArray[np.int16]:
    """(4, batch, size, size): of each empty cell to top and bottom for blue, to left and right for red."""
    parts = [_edge_distances(boards[at : at + _AT_ONCE]) for at in range(0, len(boards), _AT_ONCE)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((4, *boards.shape), dtype=np.int16)


def _edge_distances(boards: Boards) -> NDArray[np.int16]:
    size, batch = boards.shape[-1], len(boards)
    cells = np.ascontiguousarray(boards.transpose(1, 2, 0))
    turned = cells.transpose(1, 0, 2)
    stones = np.concatenate([cells == BLUE, turned == RED], axis=2)
    empty = np.concatenate([cells == EMPTY, turned == EMPTY], axis=2)
    labels = chains(stones)
    # From the first row; the board turned by 180 degrees gives the distance from the last.
    both = [np.concatenate([one, one[::-1, ::-1]], axis=2) for one in (stones, empty, labels)]
    first, last = np.split(_spread(*both), 2, axis=2)
    far_and_near = np.stack([first, last[::-1, ::-1]]).reshape(2, size, size, 2, batch)
    blue, red = far_and_near[..., 0, :], far_and_near[..., 1, :].transpose(0, 2, 1, 3)
    return np.concatenate([blue, red]).transpose(0, 3, 1, 2)


def _spread(stones: NDArray[np.bool_], empty: NDArray[np.bool_], labels: NDArray[np.int16]) -> NDArray[np.int16]:
    """(row, column, board): the distance from the first row."""
    size = len(stones)
    groups = _Chains.of(labels)
    distance = np.full(stones.shape, far(size), dtype=np.int16)
    at_edge = np.zeros((1, *stones.shape), dtype=np.int16)
    at_edge[:, 0] = stones[0]
    is_near = around(groups.share(at_edge))[0] > 0
    is_near[0] = True
    new = is_near & empty
    left, level = empty & ~new, 1
    # A larger number for a larger cell, and a larger one for a smaller cell.
    numbers = np.arange(1, size * size + 1, dtype=np.int16).reshape(1, size, size, 1)
    numbers = np.concatenate([numbers, numbers[:, ::-1, ::-1]])
    reached = numbers * new
    while new.any() and level < far(size):
        distance[new] = level
        level += 1
        beside = around(reached)
        np.maximum(beside, around(groups.share(beside)), out=beside)
        new = left & (beside[0] > 0) & (beside[0] + beside[1] != size * size + 1)
        left &= ~new
        reached += numbers * new
    return distance


@dataclass(frozen=True, slots=True)
class _Chains:
    """The stones of all boards, chain after chain."""

    places: NDArray[np.int64]
    """Where the stones are in the flat array."""
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, labels: NDArray[np.int16]) -> "_Chains":
        batch = labels.shape[-1]
        flat = labels.reshape(-1)
        places = np.flatnonzero(flat >= 0)
        names = places % batch * labels[..., 0].size + flat[places]
        order = np.argsort(names, kind="stable")
        begins = np.flatnonzero(np.diff(names[order], prepend=-1))
        return cls(places[order], begins, np.diff(begins, append=len(places)))

    def share(self, values: NDArray[Any]) -> NDArray[Any]:
        """(kinds, row, column, board): the largest value of each chain on each of its stones, 0 elsewhere."""
        shared = np.zeros_like(values)
        if len(self.places):
            for value, into in zip(values.reshape(len(values), -1), shared.reshape(len(values), -1), strict=True):
                largest = np.maximum.reduceat(value[self.places], self.begins)
                into[self.places] = np.repeat(largest, self.lengths)
        return shared
