"""Chains of stones and two-distances to the edges, for batches of boards.

The two-distance comes from the program Queenbee (van Rijswijck, 2002). An empty cell next to the edge has distance 1.
The distance of any other empty cell is one more than that of its second-nearest neighbor, because the opponent will
block the nearest. All cells around a chain of the player's stones are neighbors of each other, and a chain that touches
the edge is part of the edge.

The distance of a cell is at most k + 1 if those of two different neighbors are at most k. A set contains two different
cells if its smallest and largest cell numbers differ. Two maxima per cell and chain are therefore enough, and they are
computed for all boards at once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, NEIGHBORS, RED, Boards


def neighbor_max(values: NDArray[Any], join: np.ufunc = np.maximum) -> NDArray[Any]:
    """Reduce the values of the six neighbors of each cell with `join`. Values are (..., row, column, board)."""
    size = values.shape[-2]
    # Start with a neutral value: 0 for the maximum of non-negative numbers, the cell's own value for the minimum.
    joined = values.copy() if join is np.minimum else np.zeros_like(values)
    for down, right in NEIGHBORS:
        to, of = _overlap(down, right, size), _overlap(-down, -right, size)
        join(joined[..., *to, :], values[..., *of, :], out=joined[..., *to, :])
    return joined


def chain_labels(stones: NDArray[np.bool_]) -> NDArray[np.int16]:
    """Label each stone with the smallest cell number of its chain, (row, column, board). Other cells get -1."""
    size, _, batch = stones.shape
    no_stone = size * size
    numbers = np.arange(size * size, dtype=np.int16).reshape(size, size, 1)
    labels = np.where(stones, numbers, np.int16(no_stone))
    columns = np.arange(batch)
    while True:
        least = np.where(stones, neighbor_max(labels, np.minimum), np.int16(no_stone))
        # Pointer jumping: replacing each label by the label of that cell doubles the reach in each iteration.
        flat = np.concatenate([least.reshape(no_stone, batch), np.full((1, batch), no_stone, dtype=np.int16)])
        least = flat[flat[:-1], columns].reshape(labels.shape)
        if np.array_equal(least, labels):
            return np.where(stones, least, np.int16(-1))
        labels = least


def _overlap(down: int, right: int, size: int) -> tuple[slice, slice]:
    """Return the slices of cells that have a neighbor at the offset (down, right)."""
    return _part(down, size), _part(right, size)


def _part(step: int, size: int) -> slice:
    return slice(max(0, -step), size - max(0, step))


_BOARDS_PER_PASS = 1024
"""Number of boards processed at once, which bounds memory."""


def unreachable(size: int) -> int:
    """Return the distance that marks unreachable cells."""
    return 2 * size


def edge_distances(boards: Boards) -> NDArray[np.int16]:
    """Return the two-distances to top and bottom (for blue), left and right (for red), as (4, batch, size, size)."""
    parts = [
        _edge_distances(boards[start : start + _BOARDS_PER_PASS]) for start in range(0, len(boards), _BOARDS_PER_PASS)
    ]
    return np.concatenate(parts, axis=1) if parts else np.zeros((4, *boards.shape), dtype=np.int16)


def _edge_distances(boards: Boards) -> NDArray[np.int16]:
    size, batch = boards.shape[-1], len(boards)
    # The board is the last axis, so that numpy processes one cell of all boards in a contiguous loop.
    cells = np.ascontiguousarray(boards.transpose(1, 2, 0))
    transposed = cells.transpose(1, 0, 2)
    stones = np.concatenate([cells == BLUE, transposed == RED], axis=2)
    empty = np.concatenate([cells == EMPTY, transposed == EMPTY], axis=2)
    labels = chain_labels(stones)
    # The distance from the last row is the distance from the first row of the board rotated by 180 degrees.
    both_ways = [np.concatenate([array, array[::-1, ::-1]], axis=2) for array in (stones, empty, labels)]
    first, last = np.split(_distance_from_first_row(*both_ways), 2, axis=2)
    distances = np.stack([first, last[::-1, ::-1]]).reshape(2, size, size, 2, batch)
    blue, red = distances[..., 0, :], distances[..., 1, :].transpose(0, 2, 1, 3)
    return np.concatenate([blue, red]).transpose(0, 3, 1, 2)


def _distance_from_first_row(
    stones: NDArray[np.bool_], empty: NDArray[np.bool_], labels: NDArray[np.int16]
) -> NDArray[np.int16]:
    """Return the distance from the first row, (row, column, board)."""
    size = len(stones)
    groups = _ChainIndex.of(labels)
    distance = np.full(stones.shape, unreachable(size), dtype=np.int16)
    at_edge = np.zeros((1, *stones.shape), dtype=np.int16)
    at_edge[:, 0] = stones[0]
    is_near = neighbor_max(groups.share(at_edge))[0] > 0
    is_near[0] = True
    new = is_near & empty
    remaining, level = empty & ~new, 1
    # The maxima of ascending and descending cell numbers give the largest and the smallest cell.
    numbers = np.arange(1, size * size + 1, dtype=np.int16).reshape(1, size, size, 1)
    numbers = np.concatenate([numbers, numbers[:, ::-1, ::-1]])
    reached = numbers * new
    while new.any() and level < unreachable(size):
        distance[new] = level
        level += 1
        nearby = neighbor_max(reached)
        np.maximum(nearby, neighbor_max(groups.share(nearby)), out=nearby)
        # The two numbers of a cell add up to size^2 + 1. Any other sum means that the two maxima are different cells.
        new = remaining & (nearby[0] > 0) & (nearby[0] + nearby[1] != size * size + 1)
        remaining &= ~new
        reached += numbers * new
    return distance


@dataclass(frozen=True, slots=True)
class _ChainIndex:
    """The stones of all boards, sorted by chain."""

    stones: NDArray[np.int64]
    """Indices of the stones in the flattened (row, column, board) array."""
    begins: NDArray[np.int64]
    """Position of the first stone of each chain in `stones`."""
    lengths: NDArray[np.int64]
    """Number of stones of each chain."""

    @classmethod
    def of(cls, labels: NDArray[np.int16]) -> "_ChainIndex":
        batch = labels.shape[-1]
        flat = labels.reshape(-1)
        stones = np.flatnonzero(flat >= 0)
        chain_ids = stones % batch * labels[..., 0].size + flat[stones]
        order = np.argsort(chain_ids, kind="stable")
        begins = np.flatnonzero(np.diff(chain_ids[order], prepend=-1))
        return cls(stones[order], begins, np.diff(begins, append=len(stones)))

    def share(self, values: NDArray[Any]) -> NDArray[Any]:
        """Set all stones of a chain to the largest value among them, and other cells to 0.

        Values and result are (kinds, row, column, board).
        """
        shared = np.zeros_like(values)
        if len(self.stones):
            for value, into in zip(values.reshape(len(values), -1), shared.reshape(len(values), -1), strict=True):
                largest = np.maximum.reduceat(value[self.stones], self.begins)
                into[self.stones] = np.repeat(largest, self.lengths)
        return shared
