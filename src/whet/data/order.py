"""The order of samples: a pure function of (seed, epoch, position), the same on every device and for every split.

Samples are sorted by a hash of (seed, epoch, sample). The hash does not change between library versions, unlike a
shuffle, so there is no loader state to save.
"""

from collections.abc import Iterator

import numpy as np

from whet.data.batch import Position

# The constants of SplitMix64: its increment (2^64 divided by the golden ratio) and its two multipliers.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the ids of all samples in the order of one epoch.

    >>> epoch_order(6, seed=0, epoch=0).tolist(), epoch_order(6, seed=0, epoch=1).tolist()
    ([4, 0, 3, 2, 1, 5], [4, 3, 5, 2, 0, 1])
    """
    ids = np.arange(num_samples, dtype=np.int64)
    if not shuffle:
        return ids
    keys = _scramble(ids.astype(np.uint64) + np.uint64(mix_seed(seed, epoch)))
    return np.argsort(keys, kind="stable")


def ordered_batches(
    num_samples: int, position: Position, *, global_batch_size: int, seed: int, shuffle: bool
) -> Iterator[tuple[np.ndarray, Position, bool]]:
    """Yield the ids of each remaining global batch of an epoch, the position after it, and whether it is the last.

    The last batch may be smaller.
    """
    order = epoch_order(num_samples, seed=seed, epoch=position.epoch, shuffle=shuffle)
    for start in range(position.samples, num_samples, global_batch_size):
        end = min(start + global_batch_size, num_samples)
        is_last = end == num_samples
        after = Position(epoch=position.epoch + 1) if is_last else Position(epoch=position.epoch, samples=end)
        yield order[start:end], after, is_last


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed for everything random in one sample of one epoch (augmentation, masking)."""
    return mix_seed(seed, epoch, sample)


def mix_seed(*parts: int) -> int:
    """Combine several numbers into one well-distributed 64-bit number, by steps of SplitMix64."""
    state = 0
    for part in parts:
        state = int(_scramble(np.array([(state + part * _GOLDEN + _GOLDEN) & _MASK], dtype=np.uint64))[0])
    return state


def _scramble(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al. 2014) to an array. The arithmetic wraps at 64 bits."""
    with np.errstate(over="ignore"):
        mixed = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX[0])
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX[1])
        return mixed ^ (mixed >> np.uint64(31))
