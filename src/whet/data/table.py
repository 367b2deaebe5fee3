"""Data that lies in memory as columns: on the device if it fits, so that nothing is copied while training."""

import hashlib
from collections.abc import Iterator
from typing import final

import torch

from whet.data.batch import GlobalBatch, Micro, Position
from whet.data.columns import Columns
from whet.data.cut import Lengths
from whet.data.ragged import Ragged, moved
from whet.data.share import Share
from whet.data.source import AbstractSource, Cutter, ordered_batches
from whet.device.abstract import AbstractDevice

_MOST_HASHED_BYTES = 64 * 1024**2
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
        share: Share | None = None,
    ) -> None:
        self.num_samples: int = len(next(iter(columns.values())))
        self._fingerprint = _fingerprint(columns, self.num_samples)
        if is_resident:
            columns = {name: moved(name, column, device.put) for name, column in columns.items()}
        self._cutter = Cutter(columns, send=device.send if is_resident else lambda rows: rows, is_there=is_resident)
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._share = share or Share()

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
        if self._share.size == 1:
            return self._cutter.micros(batch.ids, batch.ids, micro_batch=micro_batch, how=how)
        part = self._share.of(len(batch), self._cutter.lengths_of(batch.ids))
        mine = batch.ids[part.places]
        micros = self._cutter.micros(mine, mine, micro_batch=micro_batch, how=how)
        return self._share.evened(micros, part, num_samples=len(batch), micro_batch=micro_batch)

    def fingerprint(self) -> str:
        return self._fingerprint


def _fingerprint(columns: Columns, num_samples: int) -> str:
    """A hash of all the data, or of rows spread over it where it is large: then not every change is noticed."""
    digest = hashlib.sha256(str(num_samples).encode())
    parts = {n: (c.values, c.starts) if isinstance(c, Ragged) else (c,) for n, c in columns.items()}
    is_small = sum(p.numel() * p.element_size() for ps in parts.values() for p in ps) <= _MOST_HASHED_BYTES
    rows = sorted({num_samples * place // _ROWS_IN_FINGERPRINT for place in range(_ROWS_IN_FINGERPRINT)})
    for name, column in columns.items():
        tensors = parts[name] if is_small else [column[row] for row in rows if row < num_samples]
        digest.update(f"{name} {[(tuple(t.shape), t.dtype) for t in tensors]}".encode())
        for tensor in tensors:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
