"""Where global batches come from: tables of tensors, map-style datasets, or streams with an order of their own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import Field, GlobalBatch, MicroBatch, Packed, Position, Put, Ragged
from whet.data.columns import Columns, stack_samples
from whet.data.order import epoch_order
from whet.data.split import LengthMode, PackedTotals, RankShare, padded_length, split_indices


class AbstractSource(ABC):
    """Global batches from a position on, and how one becomes micro-batches."""

    num_samples: int | None
    """Samples of one epoch; None for a stream."""
    is_exact: bool = True
    """Whether a resumed run sees the very same samples."""

    @abstractmethod
    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        """The global batches of the epoch that `position` lies in, from there on."""

    @abstractmethod
    def micro_batches(self, batch: GlobalBatch, *, micro_batch: int, how: LengthMode) -> Iterator[MicroBatch]:
        """The pieces of a global batch; on the device already where the data lies there."""

    def fingerprint(self) -> str | None:
        """What tells this data from other data, as far as that is cheap; None where nothing can be said."""
        return None

    def state(self) -> dict[str, Any]:
        """What a stream needs to go on; a pure order needs nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes a saved state back."""

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """What happened while reading and should be told: kinds of events and their fields."""
        return []

    def close(self) -> None:
        """Ends workers, where there are any."""


def ordered_batches(
    num_samples: int, position: Position, *, global_batch_size: int, seed: int, shuffle: bool
) -> Iterator[tuple[np.ndarray, Position, bool]]:
    """Ids of the rest of an epoch, cut into global batches; the last one may be short."""
    order = epoch_order(num_samples, seed=seed, epoch=position.epoch, shuffle=shuffle)
    for start in range(position.samples, num_samples, global_batch_size):
        end = min(start + global_batch_size, num_samples)
        is_last = end == num_samples
        after = Position(epoch=position.epoch + 1) if is_last else Position(epoch=position.epoch, samples=end)
        yield order[start:end], after, is_last


class BatchSplitter:
    """Cuts rows out of columns, piece by piece, and hands each piece over as a micro-batch."""

    def __init__(self, columns: Columns, *, send: Put, is_there: bool = False) -> None:
        """`send` brings row numbers to where the columns lie, which may be the device."""
        self._columns = columns
        self._send = send
        self._is_there = is_there
        # On the host, so that shapes are known without asking the device.
        self._lengths = {n: c.lengths.cpu().numpy() for n, c in columns.items() if isinstance(c, Ragged)}
        self._longest = {name: int(lengths.max(initial=1)) for name, lengths in self._lengths.items()}
        self._totals: dict[tuple[str, int], PackedTotals] = {}

    def micro_batches(
        self, rows: np.ndarray, ids: np.ndarray, *, micro_batch: int, how: LengthMode
    ) -> Iterator[MicroBatch]:
        """The pieces of the chosen rows; `ids` are the samples' ids, row by row."""
        if len(rows) <= micro_batch and not self._lengths:
            yield self._whole(rows, ids)
            return
        pieces = list(self._pieces(rows, micro_batch=micro_batch, how=how))
        totals = {name: self._total(name, rows, pieces) for name in self._lengths} if how == "packed few" else {}
        for piece in pieces:
            chosen = self._send(torch.from_numpy(rows[piece]))
            fields = {name: self._take(name, rows[piece], chosen, how) for name in self._columns}
            for name, (fill, total) in totals.items():
                fields[name] = self._filled(name, fields[name], fill, total)
            first_index = piece.start if isinstance(piece, slice) else None
            yield MicroBatch(fields=fields, ids=ids[piece], first_index=first_index, is_there=self._is_there)

    def _whole(self, rows: np.ndarray, ids: np.ndarray) -> MicroBatch:
        """All rows at once, where all are of one shape: with small steps every call counts."""
        chosen = self._send(torch.from_numpy(rows))
        fields = {name: self._take(name, rows, chosen, "fixed") for name in self._columns}
        return MicroBatch(fields=fields, ids=ids, is_there=self._is_there)

    def lengths_of(self, rows: np.ndarray) -> np.ndarray | None:
        """How long the samples in these rows are, all columns together; None where all are of one shape."""
        return np.sum([lengths[rows] for lengths in self._lengths.values()], axis=0) if self._lengths else None

    def _pieces(self, rows: np.ndarray, *, micro_batch: int, how: LengthMode) -> Iterator[slice | np.ndarray]:
        lengths = self.lengths_of(rows)
        if lengths is not None:
            return split_indices(lengths, micro_batch=micro_batch, how=how)
        return (slice(start, start + micro_batch) for start in range(0, len(rows), micro_batch))

    def _take(self, name: str, rows: np.ndarray, chosen: Tensor, how: LengthMode) -> Field:
        column = self._columns[name]
        if isinstance(column, Tensor):
            # On the host twice as fast as column[chosen].
            return column.index_select(0, chosen) if column.is_cpu else column[chosen]
        lengths = self._lengths[name][rows]
        if how == "packed":
            return column.packed(chosen, max_length=int(lengths.max()), total=int(lengths.sum()))
        if how == "packed few":
            return column.packed(chosen, max_length=self._longest[name], total=int(lengths.sum()))
        return column.padded(chosen, length=padded_length(lengths, how=how, max_length=self._longest[name]))

    def _total(self, name: str, rows: np.ndarray, pieces: Sequence[slice | np.ndarray]) -> tuple[PackedTotals, int]:
        """What all pieces of a global batch are filled up to: one total, so that a step has few shapes."""
        num_samples = max(len(rows[piece]) for piece in pieces)
        fill = self._totals.get((name, num_samples))
        if fill is None:
            fill = self._totals[name, num_samples] = PackedTotals.of(self._lengths[name], num_samples=num_samples)
        return fill, fill.total(max(int(self._lengths[name][rows[piece]].sum()) for piece in pieces))

    def _filled(self, name: str, field: Field, fill: PackedTotals, total: int) -> Packed:
        column = self._columns[name]
        assert isinstance(field, Packed)
        assert isinstance(column, Ragged)
        return column.filled(field, total=total, num_fillers=fill.num_fillers(len(field.values), total=total))


def split_samples(
    batch: GlobalBatch, *, micro_batch: int, how: LengthMode, ragged: set[str], share: RankShare
) -> Iterator[MicroBatch]:
    """Micro-batches of samples that were read one by one; they lie on the host."""
    cutter = BatchSplitter(stack_samples(batch.samples, ragged=ragged), send=lambda rows: rows)
    if share.size == 1:
        return cutter.micro_batches(np.arange(len(batch)), batch.ids, micro_batch=micro_batch, how=how)
    part = share.of(len(batch))
    rows = np.arange(len(part.places))
    micro_batches = cutter.micro_batches(rows, batch.ids[part.places], micro_batch=micro_batch, how=how)
    return share.evened(micro_batches, part, num_samples=len(batch), micro_batch=micro_batch)


def check_dataset_size(num_samples: int | None, global_batch_size: int) -> None:
    """Data to train on holds at least one global batch; a stream shows only later whether it does."""
    if num_samples is None:
        return
    if num_samples == 0:
        raise UsageError("the data is empty", got="0 samples", try_="data with at least one global batch")
    if num_samples < global_batch_size:
        raise UsageError(
            "the data is shorter than one global batch",
            got=f"{num_samples} samples, global_batch_size={global_batch_size}",
            try_=f"global_batch_size={num_samples}",
        )
