"""Data that lies in memory as columns: on the device if it fits, so that nothing is copied while training."""

import hashlib
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from whet.data.batch import GlobalBatch, Micro, Position
from whet.data.columns import Columns
from whet.data.cut import Lengths
from whet.data.source import AbstractSource, Cutter, ordered_batches
from whet.device.abstract import AbstractDevice

_ROWS_IN_FINGERPRINT = 64


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
        self.num_samples: int = len(next(iter(columns.values())))
        self._fingerprint = _fingerprint(columns, self.num_samples)
        if is_resident:
            columns = {n: device.put(c) if isinstance(c, Tensor) else c.moved(device.put) for n, c in columns.items()}
        self._cutter = Cutter(columns, send=device.send if is_resident else lambda rows: rows)
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        for ids, after, is_last in ordered_batches(
            self.num_samples,
            position,
            global_batch_size=self._global_batch_size,
            seed=self._seed,
            shuffle=self._shuffle,
        ):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last)

    def micros(self, batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
        return self._cutter.micros(batch.ids, batch.ids, micro_batch=micro_batch, how=how)

    def fingerprint(self) -> str:
        return self._fingerprint


def _fingerprint(columns: Columns, num_samples: int) -> str:
    """A hash of names, shapes, types and some rows spread over the data: other data is noticed, not every change."""
    digest = hashlib.sha256(str(num_samples).encode())
    rows = sorted({num_samples * place // _ROWS_IN_FINGERPRINT for place in range(_ROWS_IN_FINGERPRINT)})
    for name, column in columns.items():
        values = [column[row].cpu() for row in rows if row < num_samples]
        digest.update(f"{name} {[(tuple(v.shape), v.dtype) for v in values]}".encode())
        for value in values:
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
