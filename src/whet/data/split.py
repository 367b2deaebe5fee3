"""Split a global batch between ranks and into micro-batches.

However a batch is split, the optimizer step sees the same samples with the same weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from whet.data.batch import MicroBatch

LengthMode = Literal["fixed", "sorted", "few shapes", "packed", "packed few"]

_NUM_PADDED_LENGTHS = 4
"""Few enough that compiled graphs stay few; padding to quarters of the longest wastes an eighth on average.

Rows repeat by themselves: a micro-batch is full, the rest of a global batch, or the rest of an epoch's last one. So a
column of a table has at most three times as many shapes in a whole run. Rows cannot be filled up: a loss that is a mean
would count them.
"""


def split_indices(lengths: np.ndarray, *, micro_batch: int, how: LengthMode) -> Iterator[np.ndarray]:
    """The places in the global batch that go through together; `lengths` are those of its samples.

    Inside a piece the samples keep their order, so that a batch that is not cut stays as it is.

    >>> [piece.tolist() for piece in cut(np.array([5, 1, 4, 2]), micro_batch=2, how="sorted")]
    [[1, 3], [0, 2]]

    Packed to few totals, pieces are of about the same total, so that they share one:

    >>> [piece.tolist() for piece in cut(np.array([5, 1, 4, 2]), micro_batch=2, how="packed few")]
    [[0, 1], [2, 3]]
    """
    if how == "packed few":
        yield from _balanced(lengths, num_pieces=-(-len(lengths) // micro_batch))
        return
    order = np.arange(len(lengths)) if how == "fixed" else np.argsort(lengths, kind="stable")
    for start in range(0, len(lengths), micro_batch):
        yield np.sort(order[start : start + micro_batch])


def padded_length(lengths: np.ndarray, *, how: LengthMode, max_length: int) -> int:
    """What samples of these lengths are filled up to: the longest, or the next of a few lengths.

    >>> [padded_length(np.array([n]), how="few shapes", max_length=64) for n in (1, 16, 17, 60, 64)]
    [16, 16, 32, 64, 64]
    """
    longest = int(lengths.max())
    if how != "few shapes":
        return longest
    grain = -(-max_length // _NUM_PADDED_LENGTHS)
    return min(max_length, -(-longest // grain) * grain)


def _balanced(lengths: np.ndarray, *, num_pieces: int) -> Iterator[np.ndarray]:
    """Dealt out like cards, the longest last, there and back: no piece differs from another by more than one sample."""
    order = np.argsort(lengths, kind="stable")
    turn = np.arange(len(lengths)) % (2 * num_pieces)
    piece_of = np.minimum(turn, 2 * num_pieces - 1 - turn)
    for piece in range(num_pieces):
        yield np.sort(order[piece_of == piece])


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTotals:
    """The few totals that packed micro-batches are filled up to: multiples of a grain.

    The total of n samples scatters by the deviation of one times the root of n. Half of that as the grain makes about
    twelve totals in a run; an eighth of the mean total is the most, so that at most a sixteenth is filler on average.
    """

    grain: int
    longest: int

    @classmethod
    def of(cls, lengths: np.ndarray, *, num_samples: int) -> "PackedTotals":
        """For micro-batches of so many samples out of a column of these lengths.

        >>> Totals.of(np.array([10, 30, 50, 70]), num_samples=32).grain
        64
        """
        scatter = float(lengths.std()) * num_samples**0.5 / 2
        wanted = min(scatter, float(lengths.mean()) * num_samples / 8)
        # Matrix products like rows in eights, and in 64s where there are many.
        unit = 64 if wanted >= 64 else 8
        return cls(grain=max(unit, round(wanted / unit) * unit), longest=max(1, int(lengths.max(initial=1))))

    def total(self, real: int) -> int:
        """The next one."""
        return -(-real // self.grain) * self.grain

    def num_fillers(self, real: int, *, total: int) -> int:
        """How many fillers a micro-batch has: as many for all totals, so that they are no shapes of their own."""
        return max(-(-self.grain // self.longest) + 1, -(-(total - real) // self.longest))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """Places in a global batch that one process computes."""

    places: np.ndarray
    counts: bool = True
    """False where there was nothing left for it: it computes one sample that counts nothing, as the others wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """One process among those that share each global batch."""

    rank: int = 0
    size: int = 1

    def of(self, num_samples: int, lengths: np.ndarray | None = None) -> RankPart:
        """Dealt like cards, back and forth, from the shortest sample to the longest: even work in even numbers.

        >>> [Share(rank=rank, size=2).of(5).places.tolist() for rank in (0, 1)]
        [[0, 3, 4], [1, 2]]
        """
        if self.size == 1:
            return RankPart(places=np.arange(num_samples))
        order = np.arange(num_samples) if lengths is None else np.argsort(lengths, kind="stable")
        rounds, turns = np.divmod(np.arange(num_samples), self.size)
        owners = np.where(rounds % 2 == 0, turns, self.size - 1 - turns)
        mine = np.sort(order[owners == self.rank])
        return RankPart(places=mine) if len(mine) else RankPart(places=order[:1], counts=False)

    def evened(
        self, micro_batches: Iterator[MicroBatch], part: RankPart, *, num_samples: int, micro_batch: int
    ) -> Iterator[MicroBatch]:
        """The same micro-batches, as many as every process has: a missing one is the last again, and counts nothing."""
        expected = num_micro_batches(num_samples, micro_batch=micro_batch, size=self.size)
        made, last = 0, None
        for micro in micro_batches:
            last = micro if part.counts else replace(micro, counts=False)
            made += 1
            yield last
        assert last is not None, "a part has at least one sample"
        for _ in range(made, expected):
            yield replace(last, counts=False)


def num_micro_batches(num_samples: int, *, micro_batch: int, size: int) -> int:
    """How many micro-batches the process with most samples makes of a global batch.

    >>> num_micros(9, micro_batch=2, size=2)
    3
    """
    largest = -(-num_samples // size)
    return -(-largest // micro_batch)
