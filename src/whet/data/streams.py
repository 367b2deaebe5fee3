"""Sources that decide the order of their samples: iterables, and DataLoaders over iterable datasets."""

import copy
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, MicroBatch, Position
from whet.data.loader import CollateFunction
from whet.data.order import mix_seed
from whet.data.read_ahead import StreamedBatch, read_ahead
from whet.data.sample import BadSampleError, DatasetReader, seeded_generator, seeded_rng
from whet.data.samplers import set_epoch
from whet.data.source import AbstractSource
from whet.data.split import LengthMode, RankShare, split_collated, split_samples
from whet.data.structure import batch_length

_END = object()
"""Marks the end of an epoch. It is not None, which a DataLoader may yield by mistake."""


@runtime_checkable
class StatefulIterable(Protocol):
    """An iterable that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@final
class IterableSource(AbstractSource):
    """An iterable of samples, which decides their order. A resume restores its state or skips consumed samples."""

    num_samples = None
    num_batches = None

    def __init__(
        self,
        samples: Iterable[Any],
        *,
        global_batch_size: int,
        seed: int = 0,
        share: RankShare | None = None,
        collate_fn: CollateFunction | None = None,
    ) -> None:
        self._samples = samples
        self.share = share or RankShare()
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._reader = DatasetReader(samples, seed, collate_fn=collate_fn)
        self._ragged: set[str] = set()
        self._has_state = isinstance(samples, StatefulIterable)
        self._state = self._stream_state()
        self._restored: dict[str, Any] | None = None

    def inexact_reason(self) -> str | None:
        return None if self._has_state else "a stream without a state"

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        epoch, start = position.epoch, position.samples
        set_epoch(self._samples, epoch)
        is_restored = self._restored is not None
        if self._restored is not None:
            # Again, because set_epoch may have moved the stream to the beginning of the epoch.
            self._samples.load_state_dict(copy.deepcopy(self._restored))  # type: ignore[attr-defined]
            self._restored = None
        iterator = iter(self._samples)
        if not is_restored:
            # Without a saved state, read the consumed samples again and drop them. This is exact if the order is fixed.
            skipped = 0
            while skipped < start and (batch := self._read(iterator, epoch, skipped, limit=start - skipped)):
                skipped += len(batch)
        first = self._read(iterator, epoch, start)
        if first is None and is_restored and start == 0:
            # Some streams save the end of an epoch as their state, and need another iterator for the next one.
            iterator = iter(self._samples)
            first = self._read(iterator, epoch, start)
        if first is None and start == 0:
            raise UsageError("the data is empty", got="an iterable without samples", try_="data that can be read again")
        for read in read_ahead(
            first, lambda start: self._read(iterator, epoch, start), position, length=len, state=self._stream_state
        ):
            # The state at the end of an epoch matters too: it may hold the number of the epoch.
            self._state = self._stream_state() if read.is_last else read.state
            yield self._global_batch(read, epoch)

    def _global_batch(self, read: StreamedBatch[tuple[Any, ...]], epoch: int) -> GlobalBatch:
        samples, ids = read.data, np.arange(read.start, read.end)
        collated = self._reader.collate(list(samples), epoch, read.after)
        if collated is not None:
            return GlobalBatch(ids=ids, after=read.after, is_last_of_epoch=read.is_last, collated=collated)
        # Every rank reads all samples and keeps its part, because an iterable has no random access.
        if self.share.size > 1:
            samples = tuple(samples[index] for index in self.share.of(len(samples)).indices)
        return GlobalBatch(ids=ids, after=read.after, is_last_of_epoch=read.is_last, samples=samples)

    def own_samples(self, batch: GlobalBatch) -> GlobalBatch:
        if batch.collated is not None:
            return batch
        return replace(batch, ids=batch.ids[self.share.of(len(batch)).indices])

    def state(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        if state and isinstance(self._samples, StatefulIterable):
            self._samples.load_state_dict(copy.deepcopy(state))
            self._state = self._restored = state

    def _stream_state(self) -> dict[str, Any]:
        return copy.deepcopy(self._samples.state_dict()) if isinstance(self._samples, StatefulIterable) else {}

    def _read(
        self, iterator: Iterator[Any], epoch: int, start: int, limit: int | None = None
    ) -> tuple[Any, ...] | None:
        # Seeded, so that what a stream draws depends on its position only, and does not move the draws of steps.
        with seeded_rng(mix_seed(self._seed, epoch, start)):
            samples = tuple(itertools.islice(iterator, min(limit or self._global_batch_size, self._global_batch_size)))
        return samples or None

    def split(
        self, batch: GlobalBatch, share: RankShare, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        if batch.collated is not None:
            return split_collated(batch, micro_batch=micro_batch, share=share)
        return split_samples(batch, micro_batch=micro_batch, length_mode=length_mode, ragged=self._ragged, share=share)


@final
class IterableLoaderSource(AbstractSource):
    """A DataLoader over an iterable dataset: its own batches, read by its own workers.

    The number of workers belongs to such a dataset, which usually divides itself between them.
    """

    num_samples = None

    def __init__(self, loader: DataLoader[Any], *, seed: int, share: RankShare | None = None) -> None:
        self._loader = loader
        self._seed = seed
        self.share = share or RankShare()
        self._is_restored = False
        self._state: dict[str, Any] = {}
        # StatefulDataLoader of torchdata has a state; torch's own loader has none.
        self._has_state = isinstance(loader, StatefulIterable)
        self.num_batches = None

    def inexact_reason(self) -> str | None:
        return None if self._has_state else "a stream without a state"

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        epoch, start = position.epoch, position.samples
        for owner in (self._loader.dataset, self._loader.sampler, self._loader.batch_sampler):
            set_epoch(owner, epoch)
        # Starting a loader draws the base seed of its workers, from its own generator if it has one.
        iterator = self._iterate(epoch)
        skipped = start if self._is_restored else 0
        first = self._read(iterator, epoch, skipped)
        if first is None and self._is_restored and start == 0:
            # Some loaders save the end of an epoch as their state, and need another iterator for the next one.
            iterator = self._iterate(epoch)
            first = self._read(iterator, epoch, skipped)
        self._is_restored = False
        while first is not None and skipped < start:
            skipped += batch_length(first)
            first = self._read(iterator, epoch, skipped)
        if first is None and start == 0:
            raise UsageError("the data is empty", got="a DataLoader without batches", try_="data with samples")
        for read in read_ahead(
            first,
            lambda start: self._read(iterator, epoch, start),
            position,
            length=batch_length,
            state=self._loader_state,
        ):
            # The state at the end of an epoch matters too: it may hold the number of the epoch.
            self._state = self._loader_state() if read.is_last else read.state
            ids = np.arange(read.start, read.end)
            yield GlobalBatch(ids=ids, after=read.after, is_last_of_epoch=read.is_last, collated=read.data)

    def _iterate(self, epoch: int) -> Iterator[Any]:
        mixed = mix_seed(self._seed, epoch)
        with seeded_rng(mixed), seeded_generator(self._loader.generator, mixed):
            return iter(self._loader)

    def _loader_state(self) -> dict[str, Any]:
        return copy.deepcopy(self._loader.state_dict()) if isinstance(self._loader, StatefulIterable) else {}

    def _read(self, iterator: Iterator[Any], epoch: int, start: int) -> Any:
        with seeded_rng(mix_seed(self._seed, epoch, start)):
            batch = next(iterator, _END)
        if batch is None:
            raise BadSampleError("the DataLoader returned no batch", got="None", try_="return the batch in collate_fn")
        return None if batch is _END else batch

    def state(self, position: Position) -> dict[str, Any]:  # noqa: ARG002
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        if state and isinstance(self._loader, StatefulIterable):
            self._loader.load_state_dict(copy.deepcopy(state))
            self._state, self._is_restored = state, True

    def split(
        self,
        batch: GlobalBatch,
        share: RankShare,
        *,
        micro_batch: int,
        length_mode: LengthMode,  # noqa: ARG002
    ) -> Iterator[MicroBatch]:
        return split_collated(batch, micro_batch=micro_batch, share=share)
