"""Data sources: tensors in memory, map-style datasets and iterables as global batches."""

import copy
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, MicroBatch, Position, Ragged, map_field
from whet.data.columns import Columns, as_columns
from whet.data.sample import DatasetReader, sample_digest
from whet.data.source import AbstractSource, BatchSplitter, ordered_batches, split_samples
from whet.data.split import LengthMode, RankShare
from whet.data.workers import PlannedBatches, Workers
from whet.device.abstract import AbstractDevice

_SAMPLES_IN_FINGERPRINT = 8


class MapStyleDataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """How samples are read: the plan's decision."""

    workers: int = 0
    start: str = "fork"
    """How workers start: fork or spawn."""
    prefetch: int = 2
    """Global batches that each worker reads ahead."""


@final
class MapStyleSource(AbstractSource):
    def __init__(
        self,
        dataset: MapStyleDataset,
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        loading: LoaderConfig | None = None,
        share: RankShare | None = None,
    ) -> None:
        self.num_samples: int = len(dataset)
        self._planned = partial(
            ordered_batches, self.num_samples, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle
        )
        self._share = share or RankShare()
        self._to_read = self._planned if self._share.size == 1 else partial(_rank_batches, self._planned, self._share)
        self._read = DatasetReader(dataset, seed)
        self._ragged: set[str] = set()
        self._fingerprint: tuple[str | None] | None = None
        self._loading = loading or LoaderConfig()
        self.workers = self._make_workers(self._loading.workers) if self._loading.workers else None

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        read = self._read_here if self.workers is None else self.workers.batches
        for (ids, after, is_last), samples in zip(self._planned(position), read(position), strict=True):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last, samples=tuple(samples))

    def _read_here(self, position: Position) -> Iterator[list[Any]]:
        for ids, _, _ in self._to_read(position):
            # A sample is asked for with its epoch, so that its randomness is known wherever it is read.
            yield [self._read((position.epoch, int(sample))) for sample in ids]

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, how: LengthMode) -> Iterator[MicroBatch]:
        return split_samples(batch, micro_batch=micro_batch, how=how, ragged=self._ragged, share=self._share)

    def fingerprint(self) -> str | None:
        """Of a few samples spread over the data; None for data that gives another sample each time it is asked."""
        if self._fingerprint is None:
            parts = _SAMPLES_IN_FINGERPRINT - 1
            chosen = sorted({(self.num_samples - 1) * part // parts for part in range(parts + 1)})
            self._fingerprint = (self._look_at(chosen) if self.num_samples else None,)
        return self._fingerprint[0]

    def _look_at(self, ids: list[int]) -> str | None:
        if self._loading.workers:
            found = self._make_workers(1).looked_at(ids)
        else:
            found = [sample_digest(self._read((0, number))) for number in (*ids, ids[0])]
        is_same_again = found is not None and found[-1] == found[0]
        known = [str(self.num_samples).encode(), *(found or ())]
        return hashlib.sha256(b"".join(known)).hexdigest() if is_same_again else None

    def _make_workers(self, count: int) -> Workers:
        how = self._loading
        return Workers(self._read, self._to_read, count=count, start=how.start, prefetch=how.prefetch)

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Workers that were lost since the last time."""
        if self.workers is None:
            return []
        told, self.workers.news = self.workers.news, []
        return told

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


def _rank_batches(
    planned: PlannedBatches, share: RankShare, position: Position
) -> Iterator[tuple[np.ndarray, Position, bool]]:
    """Of each global batch what this process computes: the rest is read elsewhere."""
    for ids, after, is_last in planned(position):
        yield ids[share.of(len(ids)).places], after, is_last


@runtime_checkable
class StatefulIterable(Protocol):
    """An iterable that can say where it stands."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@final
class IterableSource(AbstractSource):
    num_samples = None

    def __init__(self, samples: Iterable[Any], *, global_batch_size: int, share: RankShare | None = None) -> None:
        self._samples = samples
        self._share = share or RankShare()
        self._global_batch_size = global_batch_size
        self._is_restored = False
        self._ragged: set[str] = set()
        self._state: dict[str, Any] = {}
        self.is_exact = isinstance(samples, StatefulIterable)

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        iterator = iter(self._samples)
        if not self._is_restored:
            # Without a state the consumed samples are read again and dropped: exact if the order is the same again.
            next(itertools.islice(iterator, position.samples, position.samples), None)
        self._is_restored = False
        start = position.samples
        ahead = self._read(iterator)
        while ahead:
            # Whether a batch is the last shows only behind it; the state is the one before that look.
            state = copy.deepcopy(self._samples.state_dict()) if isinstance(self._samples, StatefulIterable) else {}
            batch, ahead = ahead, self._read(iterator)
            # Behind the last batch the next epoch begins anew: a state would say that everything was read.
            self._state = state if ahead else {}
            end = start + len(batch)
            after = Position(epoch=position.epoch, samples=end) if ahead else Position(epoch=position.epoch + 1)
            # Every process reads all of it: an iterable cannot be asked for a part.
            mine = (
                batch if self._share.size == 1 else tuple(batch[place] for place in self._share.of(len(batch)).places)
            )
            yield GlobalBatch(ids=np.arange(start, end), after=after, is_last_of_epoch=not ahead, samples=mine)
            start = end
        if start == 0:
            raise UsageError("the data is empty", got="an iterable without samples", try_="data that can be read again")

    def state(self) -> dict[str, Any]:
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        if state and isinstance(self._samples, StatefulIterable):
            self._samples.load_state_dict(state)
            self._is_restored = True

    def _read(self, iterator: Iterator[Any]) -> tuple[Any, ...]:
        return tuple(itertools.islice(iterator, self._global_batch_size))

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, how: LengthMode) -> Iterator[MicroBatch]:
        return split_samples(batch, micro_batch=micro_batch, how=how, ragged=self._ragged, share=self._share)


_MAX_HASHED_BYTES = 64 * 1024**2
_ROWS_IN_FINGERPRINT = 64


@final
class TensorSource(AbstractSource):
    def __init__(
        self,
        columns: Columns,
        device: AbstractDevice,
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        is_resident: bool = True,
        share: RankShare | None = None,
    ) -> None:
        self.num_samples: int = len(next(iter(columns.values())))
        self._fingerprint = _hash_columns(columns, self.num_samples)
        if is_resident:
            columns = {name: map_field(name, column, device.put) for name, column in columns.items()}
        self._cutter = BatchSplitter(
            columns, send=device.send if is_resident else lambda rows: rows, is_there=is_resident
        )
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._share = share or RankShare()

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for ids, after, is_last in ordered_batches(
            self.num_samples,
            position,
            global_batch_size=self._global_batch_size,
            seed=self._seed,
            shuffle=self._shuffle,
        ):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last)

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, how: LengthMode) -> Iterator[MicroBatch]:
        if self._share.size == 1:
            return self._cutter.micro_batches(batch.ids, batch.ids, micro_batch=micro_batch, how=how)
        part = self._share.of(len(batch), self._cutter.lengths_of(batch.ids))
        mine = batch.ids[part.places]
        micro_batches = self._cutter.micro_batches(mine, mine, micro_batch=micro_batch, how=how)
        return self._share.evened(micro_batches, part, num_samples=len(batch), micro_batch=micro_batch)

    def fingerprint(self) -> str:
        return self._fingerprint


def _hash_columns(columns: Columns, num_samples: int) -> str:
    """A hash of all the data, or of rows spread over it where it is large: then not every change is noticed."""
    digest = hashlib.sha256(str(num_samples).encode())
    parts = {n: (c.values, c.starts) if isinstance(c, Ragged) else (c,) for n, c in columns.items()}
    is_small = sum(p.numel() * p.element_size() for ps in parts.values() for p in ps) <= _MAX_HASHED_BYTES
    rows = sorted({num_samples * place // _ROWS_IN_FINGERPRINT for place in range(_ROWS_IN_FINGERPRINT)})
    for name, column in columns.items():
        tensors = parts[name] if is_small else [column[row] for row in rows if row < num_samples]
        digest.update(f"{name} {[(tuple(t.shape), t.dtype) for t in tensors]}".encode())
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def open_source(
    data: Any,
    device: AbstractDevice,
    *,
    global_batch_size: int,
    seed: int,
    shuffle: bool = True,
    is_resident: bool = True,
    loading: LoaderConfig | None = None,
    share: RankShare | None = None,
) -> AbstractSource:
    """Tensors (a tuple or dict of them), a map-style dataset, or an iterable, as a source of global batches.

    `share` says which part of each this process computes; all of it if not given.
    """
    columns = as_columns(data)
    if columns is not None:
        return TensorSource(
            columns,
            device,
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            is_resident=is_resident,
            share=share,
        )
    if callable(getattr(data, "__getitem__", None)) and callable(getattr(data, "__len__", None)):
        return MapStyleSource(
            data, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle, loading=loading, share=share
        )
    if isinstance(data, Iterable):
        return IterableSource(data, global_batch_size=global_batch_size, share=share)
    raise UsageError(
        "this cannot be trained on",
        got=type(data).__name__,
        try_="a tuple or dict of tensors, a map-style dataset, or an iterable of samples",
    )
