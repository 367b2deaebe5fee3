"""Which stones hang together? Chains of many boards at once, by passing the smallest cell number on until all agree.

Boards lie (row, column, board) here: one cell of all boards is one contiguous line, which is what numpy is fast at.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from whet.hex.board import NEIGHBOURS


def around(values: NDArray[Any], join: np.ufunc = np.maximum) -> NDArray[Any]:
    """(..., row, column, board): all six neighbours of each cell joined; where nothing lies beside it, nothing is."""
    size = values.shape[-2]
    joined = values.copy() if join is np.minimum else np.zeros_like(values)
    for down, right in NEIGHBOURS:
        to, of = _overlap(down, right, size), _overlap(-down, -right, size)
        join(joined[..., *to, :], values[..., *of, :], out=joined[..., *to, :])
    return joined


def chains(stones: NDArray[np.bool_]) -> NDArray[np.int16]:
    """(row, column, board): the smallest cell of the chain that each stone belongs to; -1 without a stone."""
    size, _, batch = stones.shape
    nowhere = size * size
    numbers = np.arange(size * size, dtype=np.int16).reshape(size, size, 1)
    labels = np.where(stones, numbers, np.int16(nowhere))
    columns = np.arange(batch)
    while True:
        least = np.where(stones, around(labels, np.minimum), np.int16(nowhere))
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
