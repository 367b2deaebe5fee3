"""How a global batch is cut into pieces: by size, sorted by length, padded to few shapes, or packed.

Whatever the cut, the step sees the same samples with the same weights.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

Lengths = Literal["fixed", "sorted", "few shapes", "packed"]

_NUM_SHAPES = 4
"""Few enough that compiled graphs stay few; padding to quarters of the longest wastes an eighth on average.

Rows repeat by themselves: a micro-batch is full, the rest of a global batch, or the rest of an epoch's last one. So a
column of a table has at most three times as many shapes in a whole run. Rows cannot be filled up: a loss that is a mean
would count them.
"""


def cut(lengths: np.ndarray, *, micro_batch: int, how: Lengths) -> Iterator[np.ndarray]:
    """The places in the global batch that go through together; `lengths` are those of its samples.

    Inside a piece the samples keep their order, so that a batch that is not cut stays as it is.

    >>> [piece.tolist() for piece in cut(np.array([5, 1, 4, 2]), micro_batch=2, how="sorted")]
    [[1, 3], [0, 2]]
    """
    order = np.arange(len(lengths)) if how == "fixed" else np.argsort(lengths, kind="stable")
    for start in range(0, len(lengths), micro_batch):
        yield np.sort(order[start : start + micro_batch])


def padded_length(lengths: np.ndarray, *, how: Lengths, max_length: int) -> int:
    """What samples of these lengths are filled up to: the longest, or the next of a few lengths.

    >>> [padded_length(np.array([n]), how="few shapes", max_length=64) for n in (1, 16, 17, 60, 64)]
    [16, 16, 32, 64, 64]
    """
    longest = int(lengths.max())
    if how != "few shapes":
        return longest
    grain = -(-max_length // _NUM_SHAPES)
    return min(max_length, -(-longest // grain) * grain)
