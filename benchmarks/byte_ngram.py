"""An interpolated Kneser-Ney n-gram model of bytes, the baseline for chat models.

Each order subtracts a discount from its counts (n1 / (n1 + 2 n2), Ney et al. 1994) and gives the freed mass to the
order below, which counts in how many contexts a byte occurred, not how often; the lowest order covers all 256 bytes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_BYTES = 256


@dataclass(frozen=True)
class _Order:
    """Counts of one length: sorted codes of (context, byte), and of contexts alone."""

    grams: Array
    counts: Array
    contexts: Array
    totals: Array
    kinds: Array
    """Number of different bytes after each context."""
    discount: float


class ByteModel:
    """Probabilities of bytes given up to `order` - 1 previous ones."""

    def __init__(self, texts: list[bytes], *, order: int = 5) -> None:
        self.order = order
        self._orders: list[_Order] = []
        above: Array | None = None
        for length in range(order, 0, -1):
            if above is None:
                grams, counts = np.unique(_codes(texts, length), return_counts=True)
            else:
                # Continuation counts: in how many contexts the shorter gram occurs.
                grams, counts = np.unique(above % np.uint64(_BYTES**length), return_counts=True)
            above = grams
            self._orders.insert(0, _order(grams, counts))

    def log2(self, text: bytes) -> Array:
        """Return log2 of the probability of each byte; 0 for the first order - 1 bytes."""
        length = len(text)
        chances = np.full(length, 1 / _BYTES)
        for size, known in enumerate(self._orders, 1):
            codes = _codes([text], size)
            where = np.arange(size - 1, length)
            chances[where] = _interpolated(known, codes, chances[where])
        result = np.log2(chances)
        result[: self.order - 1] = 0
        return result


def _interpolated(known: _Order, codes: Array, below: Array) -> Array:
    counts = _looked_up(known.grams, known.counts, codes)
    contexts = codes // np.uint64(_BYTES)
    totals = _looked_up(known.contexts, known.totals, contexts)
    kinds = _looked_up(known.contexts, known.kinds, contexts)
    is_known = totals > 0
    safe = np.maximum(totals, 1)
    own = np.maximum(counts - known.discount, 0) / safe
    return np.where(is_known, own + known.discount * kinds / safe * below, below)


def _order(grams: Array, counts: Array) -> _Order:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once and twice else 0.5
    contexts, first = np.unique(grams // np.uint64(_BYTES), return_index=True)
    totals = np.add.reduceat(counts, first)
    kinds = np.diff(np.append(first, len(grams)))
    return _Order(grams, counts, contexts, totals, kinds, discount)


def _codes(texts: list[bytes], length: int) -> Array:
    """Encode every sequence of `length` bytes as a number; the last byte is the lowest."""
    codes = []
    for text in texts:
        data = np.frombuffer(text, dtype=np.uint8).astype(np.uint64)
        if len(data) < length:
            continue
        code = np.zeros(len(data) - length + 1, dtype=np.uint64)
        for place in range(length):
            code = code * np.uint64(_BYTES) + data[place : len(data) - length + 1 + place]
        codes.append(code)
    return np.concatenate(codes) if codes else np.empty(0, dtype=np.uint64)


def _looked_up(keys: Array, values: Array, wanted: Array) -> Array:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
