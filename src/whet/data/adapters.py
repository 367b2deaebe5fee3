"""Data sources that yield global batches from tensors, map-style datasets, DataLoaders and iterables.

`open_source` selects the source for the user's data. To support a new kind of data, add a subclass of `AbstractSource`
and a branch in `open_source`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from whet.base.errors import UsageError
from whet.data.batch import DictBatch, GlobalBatch, MicroBatch, Position, Ragged, map_field
from whet.data.columns import Columns, MakeData, as_columns, as_rows, columns_type, rows_to_collate, select_column
from whet.data.loader import CollateFunction, is_iterable_loader, loader_columns, loader_order
from whet.data.order import PlannedBatch, SampleOrder, SeededOrder
from whet.data.recorded import RecordedBatches, RecordedSource
from whet.data.sample import DatasetReader, SampleIdentity
from whet.data.samplers import StreamedOrder

# Re-export these names, so that callers can import them together with `open_source`.
from whet.data.source import AbstractSource
from whet.data.split import BatchSplitter, LengthMode, RankShare
from whet.data.streams import IterableLoaderSource, IterableSource
from whet.data.workers import Workers
from whet.device.abstract import AbstractDevice

_MAX_HASHED_BYTES = 64 * 1024**2
_ROWS_IN_FINGERPRINT = 64
_SAMPLES_IN_FINGERPRINT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadingConfig:
    """The plan's settings for reading samples."""

    workers: int = 0
    start: str = "fork"
    """Start method of worker processes: "fork" or "spawn"."""
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
    loading: LoadingConfig | None = None,
    share: RankShare | None = None,
    collate_fn: CollateFunction | None = None,
    pad_token_id: int | None = None,
) -> AbstractSource:
    """Open tensors, a map-style dataset, a DataLoader or an iterable as a source of global batches.

    A DataLoader keeps its own batch size, order and collate function. `share` is the part of each batch that this rank
    computes, by default all of it. `pad_token_id` pads tokenized samples (`input_ids`) that have no collate function.
    """
    if isinstance(data, RecordedBatches):
        return RecordedSource(data, device, is_resident=is_resident)
    if isinstance(data, DataLoader):
        return _open_loader(data, device, seed=seed, is_resident=is_resident, loading=loading, share=share)
    if collate_fn is not None:
        data = rows_to_collate(data)
    columns = None if collate_fn is not None else as_columns(data)
    if columns is not None:
        size = len(next(iter(columns.values())))
        order = SeededOrder(size, batch_size=global_batch_size, seed=seed, shuffle=shuffle)
        make_data = columns_type(data)
        return TensorSource(columns, device, order, is_resident=is_resident, share=share, make_data=make_data)
    dataset = as_rows(data)
    if is_map_style(dataset):
        order = SeededOrder(len(dataset), batch_size=global_batch_size, seed=seed, shuffle=shuffle)
        reader = DatasetReader(dataset, seed, collate_fn=collate_fn)
        return MapStyleSource(reader, order, size=len(dataset), loading=loading, share=share, pad_token_id=pad_token_id)
    if isinstance(data, Iterable):
        return IterableSource(data, global_batch_size=global_batch_size, seed=seed, share=share, collate_fn=collate_fn)
    raise UsageError(
        "cannot train on this data",
        got=type(data).__name__,
        try_="a DataLoader, a tuple or dict of tensors, a map-style dataset, or an iterable of samples",
    )


def _open_loader(
    loader: DataLoader[Any],
    device: AbstractDevice,
    *,
    seed: int,
    is_resident: bool,
    loading: LoadingConfig | None,
    share: RankShare | None,
) -> AbstractSource:
    if is_iterable_loader(loader):
        return IterableLoaderSource(loader, seed=seed, share=share)
    order = loader_order(loader, seed=seed)
    columns = loader_columns(loader)
    if columns is not None:
        # The default collate function stacks rows of tensors, so rows need not be read one by one.
        return TensorSource(columns, device, order, is_resident=is_resident, share=share, make_data=as_list)
    worker_init_fn = loader.worker_init_fn if loader.num_workers else None
    reader = DatasetReader(loader.dataset, seed, collate_fn=loader.collate_fn, worker_init_fn=worker_init_fn)
    return MapStyleSource(reader, order, size=len(loader.dataset), loading=loading, share=share)  # type: ignore[arg-type]


def as_list(fields: Mapping[str, Any]) -> list[Any]:
    """Return the fields as a list, like torch's default collate function for tuples."""
    return list(fields.values())


def is_map_style(data: Any) -> bool:
    """Return whether the data has a length and integer indices."""
    return callable(getattr(data, "__getitem__", None)) and callable(getattr(data, "__len__", None))


def source_columns(data: Any) -> Columns | None:
    """Return the columns of data that is in memory (tensors, or a DataLoader over tensors), or None for other data."""
    return loader_columns(data) if isinstance(data, DataLoader) else as_columns(data)


def count_data(data: Any, *, global_batch_size: int) -> tuple[int | None, int | None]:
    """Return the numbers of samples and of global batches per epoch. A number that is not known in advance is None."""
    if isinstance(data, DataLoader):
        if is_iterable_loader(data):
            return None, None
        order = loader_order(data, seed=0)
        return order.num_samples, order.num_batches
    columns = as_columns(data)
    if columns is not None:
        size = len(next(iter(columns.values())))
    elif is_map_style(rows := as_rows(data)):
        size = len(rows)
    else:
        return None, None
    return size, -(-size // global_batch_size)


def check_dataset_size(source: AbstractSource, global_batch_size: int, *, is_loader: bool = False) -> None:
    """Raise an error if the data has less than one global batch.

    The size of an iterable is unknown, so it always passes. The batch of a DataLoader may be smaller than its batch
    size, because the loader decides that.
    """
    if source.num_batches == 0 or source.num_samples == 0:
        raise _no_batch_error(source, global_batch_size, is_loader=is_loader)
    if source.num_samples is not None and source.num_samples < global_batch_size and not is_loader:
        raise UsageError(
            "the data is smaller than one global batch",
            got=f"{source.num_samples} sample{'s' if source.num_samples > 1 else ''}, "
            f"global_batch_size={global_batch_size}",
            try_=f"global_batch_size={source.num_samples}",
        )


def _no_batch_error(source: AbstractSource, global_batch_size: int, *, is_loader: bool) -> UsageError:
    """Return the error for data without samples, or with fewer than drop_last=True needs for one batch."""
    if source.num_dropped:
        size = source.num_dropped
        return UsageError(
            "the DataLoader has no full batch",
            got=f"{size} sample{'s' if size > 1 else ''}, batch_size={global_batch_size}, drop_last=True",
            try_=f"drop_last=False or batch_size={size}",
        )
    samples = "0 samples" if source.num_samples == 0 else "no batches"
    got = f"a DataLoader over {samples}" if is_loader else samples
    return UsageError("the data is empty", got=got, try_="data with at least one sample: print(len(dataset))")


# --- tensors ---------------------------------------------------------------------------------------------------------


@final
class TensorSource(AbstractSource):
    """Columns in memory. They are kept on the device if they fit, so that training copies nothing."""

    is_in_memory = True

    def __init__(
        self,
        columns: Columns,
        device: AbstractDevice,
        order: SampleOrder,
        *,
        is_resident: bool = True,
        share: RankShare | None = None,
        make_data: MakeData = DictBatch,
    ) -> None:
        super().__init__(share)
        self._order = order
        self.num_samples, self.num_batches = order.num_samples, order.num_batches
        self.num_dropped = order.num_dropped
        # Hash on the host, before the columns move to the device.
        self._fingerprint = _hash_columns(columns, len(next(iter(columns.values()))))
        if is_resident:
            columns = {name: map_field(name, column, device.put) for name, column in columns.items()}
        send = device.put_async if is_resident and not device.is_cpu else lambda rows: rows
        self._splitter = BatchSplitter(columns, send=send, is_on_device=is_resident, make_data=make_data)
        self._columns, self._make_data = columns, make_data

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for planned in self._order.batches(position):
            yield GlobalBatch(ids=planned.ids, after=planned.after, is_last_of_epoch=planned.is_last)

    def state(self, position: Position) -> dict[str, Any]:
        return self._order.state(position.epoch)

    def load_state(self, state: dict[str, Any]) -> None:
        self._order.load_state(state)

    def split(
        self, batch: GlobalBatch, share: RankShare, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        if share.size == 1:
            return self._splitter.micro_batches(batch.ids, batch.ids, micro_batch=micro_batch, length_mode=length_mode)
        part = share.of(len(batch), self._splitter.lengths_of(batch.ids))
        mine = batch.ids[part.indices]
        micro_batches = self._splitter.micro_batches(mine, mine, micro_batch=micro_batch, length_mode=length_mode)
        return share.equalize(micro_batches, part, num_samples=len(batch), micro_batch=micro_batch)

    def record(self, batches: Sequence[GlobalBatch]) -> RecordedBatches:
        recorded = RecordedBatches(batches=tuple(batches), make_data=self._make_data)
        rows = recorded.known_ids().tolist()
        chosen = {name: select_column(column, rows) for name, column in self._columns.items()}
        return replace(recorded, columns={name: map_field(name, column, Tensor.cpu) for name, column in chosen.items()})

    def fingerprint(self) -> str:
        return self._fingerprint

    def inexact_reason(self) -> str | None:
        return self._order.inexact_reason


def _hash_columns(columns: Columns, num_samples: int) -> str:
    """Hash the data. Only evenly spaced rows of large data are hashed, so some changes are not detected."""
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


@final
class MapStyleSource(AbstractSource):
    """Samples that are read one by one, in this process or by workers, each with its own random seed."""

    def __init__(
        self,
        reader: DatasetReader,
        order: SampleOrder,
        *,
        size: int,
        loading: LoadingConfig | None = None,
        share: RankShare | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__(share, pad_token_id=pad_token_id)
        self.num_samples, self.num_batches = order.num_samples, order.num_batches
        self.num_dropped = order.num_dropped
        self._reader, self._order, self._size = reader, order, size
        # A collate function gets the whole batch on every rank, because padding and mixing depend on all samples.
        is_shared = self.share.size > 1 and not reader.has_collate
        self._to_read = RankOrder(order, self.share) if is_shared else order
        self._identity: SampleIdentity | None = None
        self._loading = loading or LoadingConfig()
        if isinstance(order, StreamedOrder):
            # Workers would read ahead of a sampler that depends on the state of training.
            self._loading = replace(self._loading, workers=0)
        self.workers = self._make_workers(self._loading.workers) if self._loading.workers else None

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        if self.workers is None:
            for planned in self._to_read.batches(position):
                samples, collated = self._read(position.epoch, planned)
                yield self._global_batch(planned, samples, collated)
            return
        for planned, (samples, collated) in zip(
            self._order.batches(position), self.workers.batches(position), strict=True
        ):
            yield self._global_batch(planned, samples, collated)

    def _read(self, epoch: int, planned: PlannedBatch) -> tuple[list[Any], Any]:
        pairs = zip(planned.ids, planned.keys, strict=True)
        samples = [self._reader.read(epoch, int(sample), int(key)) for sample, key in pairs]
        return samples, self._reader.collate(samples, epoch, planned.after)

    def _global_batch(self, planned: PlannedBatch, samples: list[Any], collated: Any) -> GlobalBatch:
        return GlobalBatch(
            ids=planned.all_ids,
            after=planned.after,
            is_last_of_epoch=planned.is_last,
            samples=tuple(samples) if collated is None else (),
            collated=collated,
        )

    def record(self, batches: Sequence[GlobalBatch]) -> RecordedBatches:
        return RecordedBatches(batches=tuple(batches), pad_token_id=self._pad_token_id)

    def state(self, position: Position) -> dict[str, Any]:
        return self._order.state(position.epoch)

    def load_state(self, state: dict[str, Any]) -> None:
        self._order.load_state(state)

    def fingerprint(self) -> str | None:
        """Hash a few evenly spaced samples. Return None if the dataset returns different samples on each read."""
        identity = self._identify()
        known = [str(self._size).encode(), *identity.digests]
        return hashlib.sha256(b"".join(known)).hexdigest() if identity.digests and identity.is_repeatable else None

    def inexact_reason(self) -> str | None:
        identity = self._identify()
        if not identity.is_repeatable:
            return "the dataset returns another sample each time that it is read"
        if not identity.is_collate_repeatable:
            return "the collate function returns another batch each time that it is called"
        return self._order.inexact_reason

    def _identify(self) -> SampleIdentity:
        if self._identity is None:
            parts = _SAMPLES_IN_FINGERPRINT - 1
            ids = sorted({(self._size - 1) * part // parts for part in range(parts + 1)}) if self._size else []
            if self._loading.workers and ids:
                # Read in a worker, because reading may open files that workers forked later must not inherit.
                self._identity = self._make_workers(1).identify(ids)
            else:
                self._identity = self._reader.identify(ids)
        return self._identity

    def _make_workers(self, count: int) -> Workers:
        loading = self._loading
        return Workers(self._reader, self._to_read, count=count, start=loading.start, prefetch=loading.prefetch)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return one event for each worker that was lost since the last call."""
        if self.workers is None:
            return []
        events, self.workers.events = self.workers.events, []
        return events

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


@final
class RankOrder(SampleOrder):
    """The order of one rank's samples within the global batches of an order."""

    def __init__(self, order: SampleOrder, share: RankShare) -> None:
        self._order, self.share = order, share
        self.num_samples, self.num_batches = order.num_samples, order.num_batches

    def batches(self, position: Position) -> Iterator[PlannedBatch]:
        for planned in self._order.batches(position):
            mine = self.share.of(len(planned.ids)).indices
            yield planned._replace(ids=planned.ids[mine], keys=planned.keys[mine], all_ids=planned.ids)

    def state(self, epoch: int) -> dict[str, Any]:
        return self._order.state(epoch)

    def load_state(self, state: dict[str, Any]) -> None:
        self._order.load_state(state)
