"""Data that lies in memory as columns: on the device if it fits, so that nothing is copied while training."""

from collections.abc import Iterator
from typing import final

from torch import Tensor

from whet.data.batch import GlobalBatch, Micro, Position
from whet.data.columns import Columns
from whet.data.cut import Lengths
from whet.data.ragged import Ragged
from whet.data.source import (
    AbstractSource,
    column_lengths,
    cut_columns,
    ordered_batches,
)
from whet.device.abstract import AbstractDevice


@final
class Table(AbstractSource):
    def __init__(
        self,
        columns: Columns,
        device: AbstractDevice,
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        is_resident: bool = True,
    ) -> None:
        self.num_samples = len(next(iter(columns.values())))
        self._lengths = column_lengths(columns)
        self._longest = 1 if self._lengths is None else int(self._lengths.max(initial=1))
        self._columns = {name: _put(device, column) for name, column in columns.items()} if is_resident else columns
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for ids, after, is_last in ordered_batches(
            self.num_samples or 0,
            position,
            global_batch_size=self._global_batch_size,
            seed=self._seed,
            shuffle=self._shuffle,
        ):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last)

    def micros(self, batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
        pieces = cut_columns(
            self._columns,
            batch.ids,
            micro_batch=micro_batch,
            how=how,
            lengths=self._lengths,
            longest=self._longest,
        )
        for piece, fields in pieces:
            yield Micro(fields=fields, ids=batch.ids[piece.order])


def _put(device: AbstractDevice, column: Tensor | Ragged) -> Tensor | Ragged:
    return device.put(column) if isinstance(column, Tensor) else column.moved(device.put)
