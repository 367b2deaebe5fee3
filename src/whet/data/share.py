"""Which samples of a global batch does this process compute? A pure function of the batch, so that nobody asks around.

The order of samples knows nothing of processes: one process or eight consume the same global batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from whet.data.batch import Micro


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Places in a global batch that one process computes."""

    places: np.ndarray
    counts: bool = True
    """False where there was nothing left for it: it computes one sample that counts nothing, as the others wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One process among those that share each global batch."""

    rank: int = 0
    size: int = 1

    def of(self, num_samples: int, lengths: np.ndarray | None = None) -> Part:
        """Dealt like cards, back and forth, from the shortest sample to the longest: even work in even numbers.

        >>> [Share(rank=rank, size=2).of(5).places.tolist() for rank in (0, 1)]
        [[0, 3, 4], [1, 2]]
        """
        if self.size == 1:
            return Part(places=np.arange(num_samples))
        order = np.arange(num_samples) if lengths is None else np.argsort(lengths, kind="stable")
        rounds, turns = np.divmod(np.arange(num_samples), self.size)
        owners = np.where(rounds % 2 == 0, turns, self.size - 1 - turns)
        mine = np.sort(order[owners == self.rank])
        return Part(places=mine) if len(mine) else Part(places=order[:1], counts=False)

    def evened(self, micros: Iterator[Micro], part: Part, *, num_samples: int, micro_batch: int) -> Iterator[Micro]:
        """The same micro-batches, as many as every process has: a missing one is the last again, and counts nothing."""
        expected = num_micros(num_samples, micro_batch=micro_batch, size=self.size)
        made, last = 0, None
        for micro in micros:
            last = micro if part.counts else replace(micro, counts=False)
            made += 1
            yield last
        assert last is not None, "a part has at least one sample"
        for _ in range(made, expected):
            yield replace(last, counts=False)


def num_micros(num_samples: int, *, micro_batch: int, size: int) -> int:
    """How many micro-batches the process with most samples makes of a global batch.

    >>> num_micros(9, micro_batch=2, size=2)
    3
    """
    largest = -(-num_samples // size)
    return -(-largest // micro_batch)
