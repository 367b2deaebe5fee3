"""Chains of stones and two-distances to the edges for batches of boards."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.recipes.hex.game.board import BLUE, EMPTY, NEIGHBORS, RED, Boards


def neighbor_max(values: NDArray[Any], join: np.ufunc = np.maximum) -> NDArray[Any]:
    """(..., row, column, board): all six neighbors of each cell joined; where nothing lies beside it, nothing is."""
    size = values.shape[-2]
    joined = values.copy() if join is np.minimum else np.zeros_like(values)
    for down, right in NEIGHBORS:
        to, of = _overlap(down, right, size), _overlap(-down, -right, size)
        join(joined[..., *to, :], values[..., *of, :], out=joined[..., *to, :])
    return joined


def chain_labels(stones: NDArray[np.bool_]) -> NDArray[np.int16]:
    """(row, column, board): the smallest cell of the chain that each stone belongs to; -1 without a stone."""
    size, _, batch = stones.shape
    nowhere = size * size
    numbers = np.arange(size * size, dtype=np.int16).reshape(size, size, 1)
    labels = np.where(stones, numbers, np.int16(nowhere))
    columns = np.arange(batch)
    while True:
        least = np.where(stones, neighbor_max(labels, np.minimum), np.int16(nowhere))
        # The smallest cell of my smallest cell: twice as far each time.
        flat = np.concatenate([least.reshape(nowhere, batch), np.full((1, batch), nowhere, dtype=np.int16)])
        least = flat[flat[:-1], columns].reshape(labels.shape)
        if np.array_equal(least, labels):
            return np.where(stones, least, np.int16(-1))
        labels = least


def _overlap(down: int, right: int, size: int) -> tuple[slice, slice]:
    """The cells that have another one (down, right) of them."""
    return _part(down, size), _part(right, size)


def _part(step: int, size: int) -> slice:
    return slice(max(0, -step), size - max(0, step))


_BOARDS_PER_PASS = 1024


def unreachable(size: int) -> int:
    """Stands for all that is out of reach."""
    return 2 * size


def edge_distances(boards: Boards) -> NDArray[np.int16]:
    """(4, batch, size, size): of each empty cell to top and bottom for blue, to left and right for red."""
    parts = [_edge_distances(boards[at : at + _BOARDS_PER_PASS]) for at in range(0, len(boards), _BOARDS_PER_PASS)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((4, *boards.shape), dtype=np.int16)


def _edge_distances(boards: Boards) -> NDArray[np.int16]:
    size, batch = boards.shape[-1], len(boards)
    cells = np.ascontiguousarray(boards.transpose(1, 2, 0))
    turned = cells.transpose(1, 0, 2)
    stones = np.concatenate([cells == BLUE, turned == RED], axis=2)
    empty = np.concatenate([cells == EMPTY, turned == EMPTY], axis=2)
    labels = chain_labels(stones)
    # From the first row; the board turned by 180 degrees gives the distance from the last.
    both = [np.concatenate([one, one[::-1, ::-1]], axis=2) for one in (stones, empty, labels)]
    first, last = np.split(_distance_from_first_row(*both), 2, axis=2)
    far_and_near = np.stack([first, last[::-1, ::-1]]).reshape(2, size, size, 2, batch)
    blue, red = far_and_near[..., 0, :], far_and_near[..., 1, :].transpose(0, 2, 1, 3)
    return np.concatenate([blue, red]).transpose(0, 3, 1, 2)


def _distance_from_first_row(
    stones: NDArray[np.bool_], empty: NDArray[np.bool_], labels: NDArray[np.int16]
) -> NDArray[np.int16]:
    """(row, column, board): the distance from the first row."""
    size = len(stones)
    groups = _ChainIndex.of(labels)
    distance = np.full(stones.shape, unreachable(size), dtype=np.int16)
    at_edge = np.zeros((1, *stones.shape), dtype=np.int16)
    at_edge[:, 0] = stones[0]
    is_near = neighbor_max(groups.share(at_edge))[0] > 0
    is_near[0] = True
    new = is_near & empty
    left, level = empty & ~new, 1
    # A larger number for a larger cell, and a larger one for a smaller cell.
    numbers = np.arange(1, size * size + 1, dtype=np.int16).reshape(1, size, size, 1)
    numbers = np.concatenate([numbers, numbers[:, ::-1, ::-1]])
    reached = numbers * new
    while new.any() and level < unreachable(size):
        distance[new] = level
        level += 1
        beside = neighbor_max(reached)
        np.maximum(beside, neighbor_max(groups.share(beside)), out=beside)
        new = left & (beside[0] > 0) & (beside[0] + beside[1] != size * size + 1)
        left &= ~new
        reached += numbers * new
    return distance


@dataclass(frozen=True, slots=True)
class _ChainIndex:
    """The stones of all boards, chain after chain."""

    places: NDArray[np.int64]
    """Where the stones are in the flat array."""
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, labels: NDArray[np.int16]) -> "_ChainIndex":
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
