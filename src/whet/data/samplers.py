"""Sample orders from the user's sampler.

A sampler with a length (`SamplerOrder`) is read once per epoch, with all generators seeded by (seed, epoch), and its
indices are saved in the checkpoint. The order of an epoch therefore does not depend on earlier draws, and a resumed run
repeats it. A sampler without a length or with a `state_dict()` (`StreamedOrder`) is read batch by batch. Its state is
saved; without a state, a resumed run skips the consumed batches.
"""

import base64
import contextlib
import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from torch.utils.data import Dataset

from whet.base.errors import UsageError
from whet.data.batch import Position
from whet.data.order import PlannedBatch, SampleOrder, divide_at, mix_seed
from whet.data.sample import seeded_generator, seeded_rng
from whet.data.stream_reader import StreamReader, set_epoch

_SAMPLER = 0x5A3B1E
"""Separates the seeds of samplers from the seeds of samples."""


@final
class SamplerOrder(SampleOrder):
    """The order of a sampler or batch sampler that has a length."""

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int,
        batch_size: int | None,
        drop_last: bool = False,
        num_rows: int | None = None,
    ) -> None:
        """Divide the indices of `sampler` into batches. If `batch_size` is None, `sampler` is a batch sampler.

        `num_rows` is the number of rows if the data is columns in memory.
        """
        self._sampler, self._seed, self._num_rows = sampler, seed, num_rows
        self._batch_size, self._drop_last = batch_size, drop_last
        self._drawn: tuple[int, np.ndarray, np.ndarray] | None = None
        """The latest epoch that was drawn: its number, its indices, and the ends of its batches."""
        self._original = copy_sampler(sampler)
        """A copy of the sampler in the state that a new process has, or None if it cannot be copied."""
        length = len(sampler)
        if batch_size is None:
            self.num_samples, self.num_batches = None, length
        else:
            self.num_dropped = length % batch_size if drop_last else 0
            self.num_samples = length - self.num_dropped
            self.num_batches = -(-self.num_samples // batch_size)

    def batches(self, position: Position) -> Iterator[PlannedBatch]:
        indices, ends = self._epoch(position.epoch)
        # A sample may occur more than once, so its seed depends on its place in the epoch.
        yield from divide_at(indices, ends, position, keys=np.arange(len(indices)))

    def state(self, epoch: int) -> dict[str, Any]:
        if self._drawn is None or self._drawn[0] != epoch:
            # The epoch has not been drawn. A save must not draw it, because the user may change the sampler until it
            # begins.
            return {"inexact": self.inexact_reason}
        _, indices, ends = self._drawn
        return {"epoch": epoch, "indices": _encode(indices), "ends": _encode(ends), "inexact": self.inexact_reason}

    def load_state(self, state: dict[str, Any]) -> None:
        self.inexact_reason = state.get("inexact")
        self._drawn = None
        if "epoch" in state:
            self._drawn = int(state["epoch"]), _decode(state["indices"]), _decode(state["ends"])

    def largest_batch(self) -> int | None:
        """Return the size of the largest batch of the first epoch, or None if the sampler cannot be copied."""
        if self._original is None:
            return None
        _, ends = self._draw(copy_sampler(self._original), 0)
        return int(np.diff(ends, prepend=0).max(initial=0)) or None

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        if self._drawn is None or self._drawn[0] != epoch:
            drawn = self._draw(self._sampler, epoch)
            check_rows(drawn[0], self._num_rows)
            self.inexact_reason = self.inexact_reason or self._difference(drawn, epoch)
            self._drawn = epoch, *drawn
        return self._drawn[1:]

    def _draw(self, sampler: Any, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        set_epoch(sampler, epoch)
        with _seeded_sampler(sampler, mix_seed(self._seed, epoch, _SAMPLER)):
            drawn = _read_all(sampler)
        if self._batch_size is None:
            batches = [as_indices(batch) for batch in drawn if len(batch)]
            indices = np.concatenate(batches) if batches else np.empty(0, dtype=np.int64)
            return from_start(indices, self._num_rows), np.cumsum([len(batch) for batch in batches], dtype=np.int64)
        indices = from_start(as_indices(drawn), self._num_rows)
        if self._drop_last:
            indices = indices[: len(indices) - len(indices) % self._batch_size]
        step = self._batch_size
        return indices, np.arange(step, len(indices) + step, step).clip(max=len(indices))

    def _difference(self, drawn: tuple[np.ndarray, np.ndarray], epoch: int) -> str | None:
        """Return why a new process with a new sampler would not draw the same epoch, or None if it would."""
        name = type(self._sampler).__name__
        if self._original is None:
            return f"{name} cannot be copied, so it is not known whether its order can be repeated"
        first, second = copy_sampler(self._original), copy_sampler(self._original)
        # A stateful sampler can repeat its first epoch, but not the one after it.
        pairs = [(drawn, self._draw(first, epoch)), (self._draw(first, epoch + 1), self._draw(second, epoch + 1))]
        if all(np.array_equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)):
            return None
        return f"the order of {name} depends on more than the seed and the epoch, and it has no state_dict()"


@final
class StreamedOrder(SampleOrder):
    """The order of a sampler that has no length or saves its own state, which is read batch by batch.

    The batches are read in this process, because the sampler may depend on the state of training.
    """

    num_samples = None

    def __init__(
        self,
        sampler: Any,
        *,
        seed: int,
        batch_size: int | None,
        drop_last: bool = False,
        num_rows: int | None = None,
    ) -> None:
        self._sampler, self._seed, self._num_rows = sampler, seed, num_rows
        self._batch_size, self._drop_last = batch_size, drop_last
        self._reader = StreamReader(sampler, iterate=self._iterate, read=self._read, length=len)
        if not self._reader.has_state:
            self.inexact_reason = f"{type(sampler).__name__} has no length and no state_dict()"
        self.num_batches = None
        if hasattr(sampler, "__len__"):
            length = len(sampler)
            size = batch_size or 1
            self.num_batches = length // size if drop_last else -(-length // size)

    def batches(self, position: Position) -> Iterator[PlannedBatch]:
        for read in self._reader.batches(position):
            ids, keys = read.data, np.arange(read.start, read.end)
            yield PlannedBatch(ids=ids, keys=keys, after=read.after, is_last=read.is_last, all_ids=ids)

    def state(self, epoch: int) -> dict[str, Any]:  # noqa: ARG002
        return self._reader.state

    def load_state(self, state: dict[str, Any]) -> None:
        self._reader.load_state(state)

    def _iterate(self, _epoch: int) -> Iterator[Any]:
        with seeded_rng(mix_seed(self._seed, _SAMPLER)):
            return iter(self._sampler)

    def _read(self, iterator: Iterator[Any], epoch: int, start: int, limit: int | None) -> np.ndarray | None:  # noqa: ARG002
        mixed = mix_seed(self._seed, epoch, start, _SAMPLER)
        # A sampler that saves its own state includes the state of its generator.
        with seeded_rng(mixed) if self._reader.has_state else _seeded_sampler(self._sampler, mixed):
            if self._batch_size is None:
                batch: Sequence[Any] = next(iterator, ())
            else:
                batch = list(itertools.islice(iterator, self._batch_size))
        if self._batch_size is not None and self._drop_last and len(batch) < self._batch_size:
            return None
        if not len(batch):
            return None
        indices = from_start(as_indices(batch), self._num_rows)
        check_rows(indices, self._num_rows)
        return indices


def copy_sampler(sampler: Any) -> Any:
    """Return a copy of a sampler that shares its dataset, or None if it cannot be copied."""
    attributes = getattr(sampler, "__dict__", {})
    owned = {**attributes, **getattr(attributes.get("sampler"), "__dict__", {})}
    # Share the dataset, because it may be large and drawing an order does not change it.
    shared = {id(v): v for n, v in owned.items() if isinstance(v, Dataset) or n in ("data_source", "dataset")}
    try:
        return copy.deepcopy(sampler, shared)
    except Exception:
        return None


def from_start(indices: np.ndarray, num_rows: int | None) -> np.ndarray:
    """Return indices of rows counted from the first one. Negative indices count from the end, as in a list."""
    return indices if num_rows is None else np.where(indices < 0, indices + num_rows, indices)


def check_rows(indices: np.ndarray, num_rows: int | None) -> None:
    """Raise UsageError for an index that the data does not have."""
    if num_rows is None or not len(indices) or (indices.min() >= 0 and indices.max() < num_rows):
        return
    wrong = indices.max() if indices.max() >= num_rows else indices.min()
    raise UsageError(
        "the sampler yields an index that the dataset does not have",
        got=f"{wrong}; the dataset has {num_rows:,} samples",
        try_=f"indices from 0 to {num_rows - 1:,}",
    )


def as_indices(drawn: Sequence[Any]) -> np.ndarray:
    """Return the indices drawn by a sampler. Raise an error for keys that are not integers."""
    try:
        return np.fromiter((operator.index(index) for index in drawn), dtype=np.int64)
    except TypeError as error:
        raise UsageError(
            "a sampler must yield the integer indices of samples",
            got=f"{str(drawn[0])[:40]}: {error}",
            try_="a dataset that maps integers to its own keys",
        ) from None


@contextlib.contextmanager
def _seeded_sampler(sampler: Any, seed: int) -> Iterator[None]:
    """Seed all generators, including the sampler's own, on entry, and restore them on exit."""
    inner = getattr(sampler, "sampler", None)
    with (
        seeded_rng(seed),
        seeded_generator(getattr(inner, "generator", None), seed),
        seeded_generator(getattr(sampler, "generator", None), seed),
    ):
        yield


def _read_all(sampler: Any) -> list[Any]:
    """Read a sampler completely, so that nothing else draws from the generators in between."""
    limit = 2 * len(sampler) + 1_000_000
    drawn = list(itertools.islice(iter(sampler), limit))
    if len(drawn) == limit:
        raise UsageError(
            "the sampler yields more than its length says",
            got=f"len(sampler) is {len(sampler):,}, and it yielded {limit:,} indices",
            try_="a sampler that ends, or one without __len__ and max_steps=N",
        )
    return drawn


def _encode(numbers: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<i8").tobytes()).decode("ascii")


def _decode(text: str) -> np.ndarray:
    # Copy the array, because torch warns about arrays that are not writable.
    return np.frombuffer(base64.b64decode(text), dtype="<i8").copy()
