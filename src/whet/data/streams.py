"""Sources that define their own sample order: iterables, and DataLoaders over iterable datasets."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, final

import numpy as np
from torch.utils.data import DataLoader

from whet.data.batch import GlobalBatch, Position
from whet.data.loader import CollateFunction
from whet.data.order import mix_seed
from whet.data.sample import BadSampleError, DatasetReader, seeded_generator, seeded_rng
from whet.data.source import AbstractSource
from whet.data.split import RankShare
from whet.data.stream_reader import StreamReader
from whet.data.structure import batch_length

_END = object()
"""Marks the end of an epoch. None is not suitable, because a DataLoader may yield it by mistake."""


class _StreamedSource(AbstractSource):
    """A source that is read in its own order. A resume restores its state, or skips the consumed samples."""

    num_samples = None
    num_batches = None
    _reader: StreamReader[Any]

    def inexact_reason(self) -> str | None:
        return None if self._reader.has_state else "a stream without a state"

    def state(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        return self._reader.state

    def load_state(self, state: dict[str, Any]) -> None:
        self._reader.load_state(state)


@final
class IterableSource(_StreamedSource):
    """A source that reads an iterable of samples in its own order."""

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        global_batch_size: int,
        seed: int = 0,
        share: RankShare | None = None,
        collate_fn: CollateFunction | None = None,
    ) -> None:
        super().__init__(share)
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._dataset = DatasetReader(samples, seed, collate_fn=collate_fn)
        self._reader = StreamReader(samples, iterate=lambda _: iter(samples), read=self._read, length=len)

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for read in self._reader.batches(position):
            samples, ids = read.data, np.arange(read.start, read.end)
            collated = self._dataset.collate(list(samples), position.epoch, read.after)
            # An iterable has no random access, so every rank reads all samples and keeps its own part.
            kept = () if collated is not None else tuple(samples[index] for index in self.share.of(len(ids)).indices)
            yield GlobalBatch(ids=ids, after=read.after, is_last_of_epoch=read.is_last, samples=kept, collated=collated)

    def _read(self, iterator: Iterator[Any], epoch: int, start: int, limit: int | None) -> tuple[Any, ...] | None:
        # Seed the generators, so that the random draws of a stream depend only on its position and do not affect those
        # of steps.
        with seeded_rng(mix_seed(self._seed, epoch, start)):
            samples = tuple(itertools.islice(iterator, min(limit or self._global_batch_size, self._global_batch_size)))
        return samples or None


@final
class IterableLoaderSource(_StreamedSource):
    """A DataLoader over an iterable dataset: its own batches, read by its own workers.

    The number of workers is kept, because such a dataset usually divides itself between its workers. torchdata's
    StatefulDataLoader can save its state; torch's own loader cannot.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int, share: RankShare | None = None) -> None:
        super().__init__(share)
        self._loader = loader
        self._seed = seed
        self._reader = StreamReader(
            loader,
            iterate=self._iterate,
            read=self._read,
            length=batch_length,
            epoch_owners=(loader.dataset, loader.sampler, loader.batch_sampler),
        )

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for read in self._reader.batches(position):
            ids = np.arange(read.start, read.end)
            yield GlobalBatch(ids=ids, after=read.after, is_last_of_epoch=read.is_last, collated=read.data)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        # A loader that starts draws the base seed of its workers, from its own generator if it has one.
        mixed = mix_seed(self._seed, epoch)
        with seeded_rng(mixed), seeded_generator(self._loader.generator, mixed):
            return iter(self._loader)

    def _read(self, iterator: Iterator[Any], epoch: int, start: int, limit: int | None) -> Any:  # noqa: ARG002
        with seeded_rng(mix_seed(self._seed, epoch, start)):
            batch = next(iterator, _END)
        if batch is None:
            raise BadSampleError("the DataLoader returned no batch", got="None", try_="return the batch in collate_fn")
        return None if batch is _END else batch
