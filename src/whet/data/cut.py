"""How a global batch is cut into pieces: by size, sorted by length, padded to few shapes, or packed.

Whatever the cut, the step sees the same samples with the same weights.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

Lengths = Literal["fixed", "sorted", "few shapes", "packed"]

_NUM_SHAPES = 4
"""Few enough that compiled graphs stay few; padding to quarters of the longest wastes an eighth on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows that go through at once; `order` is their place in the global batch."""

    order: np.ndarray
    length: int
    """What they are padded to, or the longest of them where they are packed."""
    total: int
    """The sum of their lengths."""
    is_packed: bool


def cut(lengths: np.ndarray, *, micro_batch: int, how: Lengths, max_length: int) -> tuple[Piece, ...]:
    """The pieces of a global batch whose samples have these lengths."""
    count = len(lengths)
    order = np.arange(count) if how == "fixed" else np.argsort(lengths, kind="stable")
    pieces = []
    for start in range(0, count, micro_batch):
        rows = order[start : start + micro_batch]
        longest = int(lengths[rows].max())
        pieces.append(
            Piece(
                order=rows,
                length=_round_up(longest, max_length) if how == "few shapes" else longest,
                total=int(lengths[rows].sum()),
                is_packed=how == "packed",
            )
        )
    return tuple(pieces)


def _round_up(length: int, max_length: int) -> int:
    """The next of a few lengths.

    >>> [_round_up(length, 64) for length in (1, 16, 17, 60, 64)]
    [16, 16, 32, 64, 64]
    """
    grain = -(-max_length // _NUM_SHAPES)
    return min(max_length, -(-length // grain) * grain)
