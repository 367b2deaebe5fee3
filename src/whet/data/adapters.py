"""Data sources: tensors in memory, map-style datasets and iterables as global batches.

`open_source` selects the adapter for the user's data. To support a new kind of data, add a subclass of `AbstractSource`
and a branch in `open_source`.
"""

import copy
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final, runtime_checkable

import numpy as np
import torch

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, MicroBatch, Position, Ragged, map_field
from whet.data.columns import Columns, as_columns
from whet.data.order import ordered_batches
from whet.data.sample import DatasetReader, sample_digest
from whet.data.split import BatchSplitter, LengthMode, RankShare, split_samples
from whet.data.workers import PlannedBatches, Workers
from whet.device.abstract import AbstractDevice

_MAX_HASHED_BYTES = 64 * 1024**2
_ROWS_IN_FINGERPRINT = 64
_SAMPLES_IN_FINGERPRINT = 8


class AbstractSource(ABC):
    """A source of global batches, starting at any position, and of their micro-batches."""

    num_samples: int | None
    """Number of samples in one epoch; None for an iterable."""
    is_exact: bool = True
    """Whether a resumed run sees exactly the same samples."""

    @abstractmethod
    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        """Yield the remaining global batches of the epoch at `position`."""

    @abstractmethod
    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, length_mode: LengthMode) -> Iterator[MicroBatch]:
        """Split a global batch. The micro-batches are on the device if the data is."""

    def fingerprint(self) -> str | None:
        """Return a hash that identifies the data; None if it is unknown. Large data is hashed in part."""
        return None

    def state(self) -> dict[str, Any]:
        """Return the state of an iterable. Other sources have none, because their order is a pure function."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call for the log of the run, as kinds and fields."""
        return []

    def close(self) -> None:
        """Stop worker processes, if there are any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig:
    """The plan's settings for reading samples."""

    workers: int = 0
    start: str = "fork"
    """The start method of workers: fork or spawn."""
    prefetch: int = 2
    """Number of global batches that each worker reads ahead."""


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
    """Open tensors (a tuple or dict of them), a map-style dataset, or an iterable as a source of global batches.

    `share` is the part of each batch that this rank computes; all of it by default.
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
        "cannot train on this data",
        got=type(data).__name__,
        try_="a tuple or dict of tensors, a map-style dataset, or an iterable of samples",
    )


def check_dataset_size(num_samples: int | None, global_batch_size: int) -> None:
    """Raise for data with less than one global batch. The size of an iterable is unknown, so it always passes."""
    if num_samples is None:
        return
    if num_samples == 0:
        raise UsageError("the data is empty", got="0 samples", try_="data with at least one global batch")
    if num_samples < global_batch_size:
        raise UsageError(
            "the data is smaller than one global batch",
            got=f"{num_samples} samples, global_batch_size={global_batch_size}",
            try_=f"global_batch_size={num_samples}",
        )


# --- tensors ---------------------------------------------------------------------------------------------------------


@final
class TensorSource(AbstractSource):
    """Columns in memory. On the device if they fit, so that training copies nothing."""

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
        # Hashed on the host, before the columns move to the device.
        self._fingerprint = _hash_columns(columns, self.num_samples)
        if is_resident:
            columns = {name: map_field(name, column, device.put) for name, column in columns.items()}
        send = device.put_async if is_resident else lambda rows: rows
        self._splitter = BatchSplitter(columns, send=send, is_on_device=is_resident)
        self._ordered_batches = partial(
            ordered_batches, self.num_samples, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle
        )
        self._share = share or RankShare()

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for ids, after, is_last in self._ordered_batches(position):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last)

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, length_mode: LengthMode) -> Iterator[MicroBatch]:
        if self._share.size == 1:
            return self._splitter.micro_batches(batch.ids, batch.ids, micro_batch=micro_batch, length_mode=length_mode)
        part = self._share.of(len(batch), self._splitter.lengths_of(batch.ids))
        mine = batch.ids[part.indices]
        micro_batches = self._splitter.micro_batches(mine, mine, micro_batch=micro_batch, length_mode=length_mode)
        return self._share.equalize(micro_batches, part, num_samples=len(batch), micro_batch=micro_batch)

    def fingerprint(self) -> str:
        return self._fingerprint


def _hash_columns(columns: Columns, num_samples: int) -> str:
    """Hash the data. Large data is hashed by evenly spaced rows, so some changes are not detected."""
    digest = hashlib.sha256(str(num_samples).encode())
    parts = {n: (c.values, c.starts) if isinstance(c, Ragged) else (c,) for n, c in columns.items()}
    is_small = sum(p.numel() * p.element_size() for ps in parts.values() for p in ps) <= _MAX_HASHED_BYTES
    rows = sorted({num_samples * index // _ROWS_IN_FINGERPRINT for index in range(_ROWS_IN_FINGERPRINT)})
    for name, column in columns.items():
        tensors = parts[name] if is_small else [column[row] for row in rows if row < num_samples]
        digest.update(f"{name} {[(tuple(t.shape), t.dtype) for t in tensors]}".encode())
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- map-style datasets ----------------------------------------------------------------------------------------------


class MapStyleDataset(Protocol):
    """A dataset with a length and integer indices."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@final
class MapStyleSource(AbstractSource):
    """Samples that are read one by one, in this process or by workers, each with a separate random seed."""

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
        read = self._read_in_process if self.workers is None else self.workers.batches
        for (ids, after, is_last), samples in zip(self._planned(position), read(position), strict=True):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last, samples=tuple(samples))

    def _read_in_process(self, position: Position) -> Iterator[list[Any]]:
        for ids, _, _ in self._to_read(position):
            # The epoch is part of the request, because the random seed of a sample depends on it.
            yield [self._read((position.epoch, int(sample))) for sample in ids]

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, length_mode: LengthMode) -> Iterator[MicroBatch]:
        return split_samples(
            batch, micro_batch=micro_batch, length_mode=length_mode, ragged=self._ragged, share=self._share
        )

    def fingerprint(self) -> str | None:
        """Hash a few evenly spaced samples. Return None if the dataset returns different samples on each read."""
        if self._fingerprint is None:
            parts = _SAMPLES_IN_FINGERPRINT - 1
            ids = sorted({(self.num_samples - 1) * part // parts for part in range(parts + 1)})
            self._fingerprint = (self._hash_samples(ids) if self.num_samples else None,)
        return self._fingerprint[0]

    def _hash_samples(self, ids: list[int]) -> str | None:
        if self._loading.workers:
            # Read in a worker: reading may open files, and workers that are forked later must not inherit them.
            digests = self._make_workers(1).sample_digests(ids)
        else:
            digests = [sample_digest(self._read((0, number))) for number in (*ids, ids[0])]
        # The first sample is read twice. If the results differ, the data is random and cannot be identified.
        is_repeatable = digests is not None and digests[-1] == digests[0]
        known = [str(self.num_samples).encode(), *(digests or ())]
        return hashlib.sha256(b"".join(known)).hexdigest() if is_repeatable else None

    def _make_workers(self, count: int) -> Workers:
        loading = self._loading
        return Workers(self._read, self._to_read, count=count, start=loading.start, prefetch=loading.prefetch)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return an event for each worker that was lost since the last call."""
        if self.workers is None:
            return []
        events, self.workers.events = self.workers.events, []
        return events

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


def _rank_batches(
    planned: PlannedBatches, share: RankShare, position: Position
) -> Iterator[tuple[np.ndarray, Position, bool]]:
    """Yield the samples of this rank for each global batch."""
    for ids, after, is_last in planned(position):
        yield ids[share.of(len(ids)).indices], after, is_last


# --- iterables -------------------------------------------------------------------------------------------------------


@runtime_checkable
class StatefulIterable(Protocol):
    """An iterable that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@final
class IterableSource(AbstractSource):
    """An iterable, which decides the order of samples. A resume restores its state or skips consumed samples."""

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
            # Without a saved state, read the consumed samples again and drop them. This is exact if the order is fixed.
            next(itertools.islice(iterator, position.samples, position.samples), None)
        self._is_restored = False
        start = position.samples
        ahead = self._read(iterator)
        while ahead:
            # Read one batch ahead to know whether this one is the last. Save the state first: it must not include the
            # batch that is read ahead.
            state = copy.deepcopy(self._samples.state_dict()) if isinstance(self._samples, StatefulIterable) else {}
            batch, ahead = ahead, self._read(iterator)
            # After the last batch there is no state to save: the next epoch starts from the beginning.
            self._state = state if ahead else {}
            end = start + len(batch)
            after = Position(epoch=position.epoch, samples=end) if ahead else Position(epoch=position.epoch + 1)
            # Every rank reads all samples and keeps its part, because an iterable has no random access.
            mine = (
                batch if self._share.size == 1 else tuple(batch[index] for index in self._share.of(len(batch)).indices)
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

    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, length_mode: LengthMode) -> Iterator[MicroBatch]:
        return split_samples(
            batch, micro_batch=micro_batch, length_mode=length_mode, ragged=self._ragged, share=self._share
        )
