"""Where global batches come from: tables of tensors, map-style datasets, or streams with an order of their own."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import Field, GlobalBatch, Micro, Position
from whet.data.columns import Columns, stack_samples
from whet.data.cut import Lengths, Piece, cut
from whet.data.order import epoch_order
from whet.data.ragged import Ragged


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
    def micros(self, batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
        """The pieces of a global batch; on the device already where the data lies there."""

    def state(self) -> dict[str, Any]:
        """What a stream needs to go on; a pure order needs nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes a saved state back."""

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


def cut_columns(
    columns: Columns, rows: np.ndarray, *, micro_batch: int, how: Lengths, lengths: np.ndarray | None, longest: int
) -> Iterator[tuple[Piece, dict[str, Field]]]:
    """The chosen rows of columns, piece by piece."""
    own = np.ones(len(rows), dtype=np.int64) if lengths is None else lengths[rows]
    for piece in cut(own, micro_batch=micro_batch, how="fixed" if lengths is None else how, max_length=longest):
        chosen = torch.from_numpy(rows[piece.order])
        yield piece, {name: _take(column, chosen, piece) for name, column in columns.items()}


def _take(column: Tensor | Ragged, rows: Tensor, piece: Piece) -> Field:
    if isinstance(column, Tensor):
        return column[rows.to(column.device)]
    rows = rows.to(column.values.device)
    if piece.is_packed:
        return column.packed(rows, max_length=piece.length, total=piece.total)
    return column.padded(rows, length=piece.length)


def micros_of_samples(batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
    """Micro-batches of samples that were read one by one."""
    columns = stack_samples(batch.samples)
    lengths = column_lengths(columns)
    longest = 1 if lengths is None else int(lengths.max())
    rows = np.arange(len(batch))
    pieces = cut_columns(columns, rows, micro_batch=micro_batch, how=how, lengths=lengths, longest=longest)
    for piece, fields in pieces:
        yield Micro(fields=fields, ids=batch.ids[piece.order])


def column_lengths(columns: Columns) -> np.ndarray | None:
    """The lengths of samples by the first ragged column; None where all have one shape."""
    ragged = next((column for column in columns.values() if isinstance(column, Ragged)), None)
    return None if ragged is None else ragged.lengths.cpu().numpy()


def refuse_too_short(num_samples: int | None, global_batch_size: int) -> None:
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
