"""Sample orders and their division into global batches.

The orders in this module are pure functions of (seed, epoch, position). They are the same on every device and for every
split, so no loader state has to be saved. They are computed with a hash which, unlike the shuffle of a library, does
not change between versions. `data/samplers.py` contains the orders of users' samplers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple, final

import numpy as np

from whet.data.batch import Position

# The constants of SplitMix64: its increment (2^64 divided by the golden ratio) and its two multipliers.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_COLLATE = 0xC011A7E
"""Separates the seeds of collate functions from the seeds of samples."""


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the ids of all samples in the order of an epoch.

    >>> epoch_order(6, seed=0, epoch=0).tolist(), epoch_order(6, seed=0, epoch=1).tolist()
    ([4, 0, 3, 2, 1, 5], [4, 3, 5, 2, 0, 1])
    """
    ids = np.arange(num_samples, dtype=np.int64)
    if not shuffle:
        return ids
    keys = _scramble(ids.astype(np.uint64) + np.uint64(mix_seed(seed, epoch)))
    return np.argsort(keys, kind="stable")


class PlannedBatch(NamedTuple):
    """The samples of one global batch, before they are read."""

    ids: np.ndarray
    keys: np.ndarray
    """The key that seeds each sample together with the epoch: its id, or its index in the epoch if samples may
    repeat."""
    after: Position
    """The position after the optimizer has consumed this batch."""
    is_last: bool
    """Whether it is the last batch of the epoch."""
    all_ids: np.ndarray
    """The sample ids of all ranks. `ids` are those of this rank."""


class SampleOrder(ABC):
    """The order of samples in an epoch, and their division into global batches."""

    num_samples: int | None
    """Number of samples per epoch including repetitions, or None if it is not known in advance."""
    num_batches: int | None
    """Number of global batches per epoch, or None if it is not known in advance."""
    num_dropped: int = 0
    """Number of samples per epoch that belong to no batch, because they do not fill one (drop_last)."""
    inexact_reason: str | None = None
    """Why a resumed run may get a different order, or None if it gets the same."""

    @abstractmethod
    def batches(self, position: Position) -> Iterator[PlannedBatch]:
        """Yield the global batches of an epoch that remain after `position`."""

    def state(self, epoch: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the state that other processes and a resume need to repeat the order of this epoch, as plain JSON."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore an order from what `state` returned."""


@final
class SeededOrder(SampleOrder):
    """Shuffled or sequential samples in batches of equal size: a pure function of (seed, epoch, position)."""

    def __init__(
        self, dataset_size: int, *, batch_size: int, seed: int, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self._size, self._batch_size = dataset_size, batch_size
        self._seed, self._shuffle = seed, shuffle
        self.num_dropped = dataset_size % batch_size if drop_last else 0
        self.num_samples: int = dataset_size - self.num_dropped
        self.num_batches: int = -(-self.num_samples // batch_size)

    def batches(self, position: Position) -> Iterator[PlannedBatch]:
        order = epoch_order(self._size, seed=self._seed, epoch=position.epoch, shuffle=self._shuffle)
        return _divide(order[: self.num_samples], position, batch_size=self._batch_size)


@final
class RepeatingOrder(SampleOrder):
    """A fixed number of draws per epoch, with or without replacement, like RandomSampler(num_samples=...)."""

    def __init__(
        self,
        dataset_size: int,
        *,
        num_draws: int,
        replacement: bool,
        batch_size: int,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        self._size, self._replacement = dataset_size, replacement
        self._batch_size, self._seed = batch_size, seed
        self._shuffled: tuple[tuple[int, int], np.ndarray] | None = None
        """The latest shuffled pass: its epoch and number, and its order."""
        self.num_dropped = num_draws % batch_size if drop_last else 0
        self.num_samples: int = num_draws - self.num_dropped
        self.num_batches: int = -(-self.num_samples // batch_size)

    def batches(self, position: Position) -> Iterator[PlannedBatch]:
        epoch, start = position.epoch, position.samples
        # Draw batch by batch: the 10^10 samples that minGPT draws do not fit into memory.
        while start < self.num_samples:
            end = min(start + self._batch_size, self.num_samples)
            is_last = end == self.num_samples
            after = Position(epoch=epoch + 1) if is_last else Position(epoch=epoch, samples=end)
            keys = np.arange(start, end)
            ids = self._draw(epoch, keys)
            yield PlannedBatch(ids=ids, keys=keys, after=after, is_last=is_last, all_ids=ids)
            start = end

    def _draw(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the ids of the samples at these indices of the epoch's order."""
        if self._replacement:
            mixed = _scramble(places.astype(np.uint64) + np.uint64(mix_seed(self._seed, epoch)))
            return (mixed % np.uint64(self._size)).astype(np.int64)
        # The order consists of shuffled passes over the complete data, one after another.
        passes = places // self._size
        return np.concatenate(
            [self._pass(epoch, int(number))[places[passes == number] % self._size] for number in np.unique(passes)]
        )

    def _pass(self, epoch: int, number: int) -> np.ndarray:
        if self._shuffled is None or self._shuffled[0] != (epoch, number):
            seed = mix_seed(self._seed, epoch, number) % 2**63
            self._shuffled = (epoch, number), epoch_order(self._size, seed=seed, epoch=0)
        return self._shuffled[1]


def _divide(order: np.ndarray, position: Position, *, batch_size: int) -> Iterator[PlannedBatch]:
    """Yield the batches of an epoch after `position`. The last one may be smaller."""
    # Count from the position instead of 0, because a resumed run may have another batch size.
    ends = np.arange(position.samples + batch_size, len(order) + batch_size, batch_size).clip(max=len(order))
    return divide_at(order, ends, position)


def divide_at(
    order: np.ndarray, ends: np.ndarray, position: Position, *, keys: np.ndarray | None = None
) -> Iterator[PlannedBatch]:
    """Yield the batches of an epoch after `position`.

    `ends` has the index after the last sample of each batch of the epoch. `keys` are the keys that seed the samples, by
    default their ids.
    """
    keys = order if keys is None else keys
    first = int(np.searchsorted(ends, position.samples, side="right"))
    start = position.samples
    for number in range(first, len(ends)):
        end = int(ends[number])
        is_last = number == len(ends) - 1
        after = Position(epoch=position.epoch + 1) if is_last else Position(epoch=position.epoch, samples=end)
        ids = order[start:end]
        own_keys = ids if keys is order else keys[start:end]
        yield PlannedBatch(ids=ids, keys=own_keys, after=after, is_last=is_last, all_ids=ids)
        start = end


def sample_seed(seed: int, epoch: int, key: int) -> int:
    """Return the seed for all randomness in one sample of one epoch (augmentation, masking)."""
    return mix_seed(seed, epoch, key)


def collate_seed(seed: int, epoch: int, after: Position) -> int:
    """Return the seed for all randomness in a collate function. `after` identifies the batch within its epoch."""
    return mix_seed(seed, epoch, after.epoch - epoch, after.samples, _COLLATE)


def mix_seed(*parts: int) -> int:
    """Combine numbers into one well-distributed 64-bit number with SplitMix64 steps."""
    state = 0
    for part in parts:
        state = int(_scramble(np.array([(state + part * _GOLDEN + _GOLDEN) & _MASK], dtype=np.uint64))[0])
    return state


def _scramble(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014) to an array, with 64-bit wraparound."""
    with np.errstate(over="ignore"):
        mixed = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX[0])
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX[1])
        return mixed ^ (mixed >> np.uint64(31))
