"""Split a global batch between ranks and into micro-batches.

Every split gives the optimizer step the same samples with the same weights.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.data.batch import DictBatch, Field, GlobalBatch, MapTensor, MicroBatch, Packed, Padded, Ragged
from whet.data.columns import Columns, MakeData, stack_nested, stack_samples
from whet.data.padding import pad_tokens
from whet.data.structure import flatten, row_obstacle, select_rows

LengthMode = Literal["fixed", "unpadded", "sorted", "bucketed", "packed", "packed_bucketed"]
"""Values of the setting `lengths`: in order, the same for a model that skips padding itself (`step/unpadding.py`),
sorted, padded to a few lengths, packed, packed to a few totals."""

_NUM_PADDED_LENGTHS = 4
"""Number of padded lengths. A small number keeps the number of compiled graphs small.

Padding to quarters of the maximum length wastes an eighth on average. The number of rows has at most three values: that
of a full micro-batch, the last one of a global batch, and the last one of an epoch. A column therefore has at most 3 *
4 shapes in a run. Rows cannot be padded, because a mean loss would count them.
"""


# --- splitting between ranks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPart:
    """The samples of a global batch that one rank computes, as indices."""

    indices: np.ndarray
    is_counted: bool = True
    """False if there is no sample for this rank.

    It then computes one with weight 0, because the other ranks wait for it.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """One of several ranks that share each global batch.

    The part of a rank depends only on the batch, so ranks need not communicate. The order of samples does not depend on
    the number of ranks: one rank and eight ranks consume the same global batches.
    """

    rank: int = 0
    size: int = 1

    def of(self, num_samples: int, lengths: np.ndarray | None = None) -> RankPart:
        """Return the part of this rank.

        Samples are dealt back and forth in the order of their lengths, so that all ranks have about equal work.

        >>> [RankShare(rank=rank, size=2).of(5).indices.tolist() for rank in (0, 1)]
        [[0, 3, 4], [1, 2]]
        """
        if self.size == 1:
            return RankPart(indices=np.arange(num_samples))
        order = np.arange(num_samples) if lengths is None else np.argsort(lengths, kind="stable")
        # Alternate the direction (0 1 1 0 0 1 ...), so that no rank gets the longer sample in every round.
        rounds, turns = np.divmod(np.arange(num_samples), self.size)
        owners = np.where(rounds % 2 == 0, turns, self.size - 1 - turns)
        mine = np.sort(order[owners == self.rank])
        return RankPart(indices=mine) if len(mine) else RankPart(indices=order[:1], is_counted=False)

    def equalize(
        self, micro_batches: Iterator[MicroBatch], part: RankPart, *, num_samples: int, micro_batch: int
    ) -> Iterator[MicroBatch]:
        """Yield the same number of micro-batches on every rank.

        If a rank has fewer, its last one is repeated with weight 0.
        """
        expected = num_micro_batches(num_samples, micro_batch=micro_batch, size=self.size)
        made, last = 0, None
        for micro in micro_batches:
            last = micro if part.is_counted else replace(micro, is_counted=False)
            made += 1
            yield last
        assert last is not None, "a part has at least one sample"
        for _ in range(made, expected):
            yield replace(last, is_counted=False)


def num_micro_batches(num_samples: int, *, micro_batch: int, size: int) -> int:
    """Return the number of micro-batches on the rank with the most samples of a global batch.

    >>> num_micro_batches(9, micro_batch=2, size=2)
    3
    """
    largest = -(-num_samples // size)
    return -(-largest // micro_batch)


# --- splitting by length ---------------------------------------------------------------------------------------------


def split_indices(lengths: np.ndarray, *, micro_batch: int, length_mode: LengthMode) -> Iterator[np.ndarray]:
    """Yield the indices of each micro-batch. `lengths` are the lengths of the samples in a global batch.

    Samples keep their order within a micro-batch, so a batch that is not split is unchanged.

    >>> [piece.tolist() for piece in split_indices(np.array([5, 1, 4, 2]), micro_batch=2, length_mode="sorted")]
    [[1, 3], [0, 2]]

    With "packed_bucketed", micro-batches have about the same total length:

    >>> pieces = split_indices(np.array([5, 1, 4, 2]), micro_batch=2, length_mode="packed_bucketed")
    >>> [piece.tolist() for piece in pieces]
    [[0, 1], [2, 3]]
    """
    if length_mode == "packed_bucketed":
        yield from _balanced(lengths, num_pieces=-(-len(lengths) // micro_batch))
        return
    order = np.arange(len(lengths)) if length_mode in ("fixed", "unpadded") else np.argsort(lengths, kind="stable")
    for start in range(0, len(lengths), micro_batch):
        yield np.sort(order[start : start + micro_batch])


def _balanced(lengths: np.ndarray, *, num_pieces: int) -> Iterator[np.ndarray]:
    """Deal samples back and forth in the order of their lengths.

    The sizes of the pieces differ by at most one sample.
    """
    order = np.argsort(lengths, kind="stable")
    # turn counts from 0 to 2n-1. Its second half maps to the pieces in reverse order.
    turn = np.arange(len(lengths)) % (2 * num_pieces)
    piece_of = np.minimum(turn, 2 * num_pieces - 1 - turn)
    for piece in range(num_pieces):
        yield np.sort(order[piece_of == piece])


def padded_length(lengths: np.ndarray, *, length_mode: LengthMode, max_length: int) -> int:
    """Return the length to which samples are padded: their maximum, or the next of a few lengths.

    >>> [padded_length(np.array([n]), length_mode="bucketed", max_length=64) for n in (1, 16, 17, 60, 64)]
    [16, 16, 32, 64, 64]
    """
    longest = int(lengths.max())
    if length_mode != "bucketed":
        return longest
    # -(-a // b) rounds the quotient up.
    grain = -(-max_length // _NUM_PADDED_LENGTHS)
    return min(max_length, -(-longest // grain) * grain)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTotals:
    """The total lengths to which packed micro-batches are extended with fillers: multiples of `grain`.

    The total length of n samples has a standard deviation of sqrt(n) times that of a sample. A grain of half that much
    gives about twelve totals in a run. The grain is at most an eighth of the mean total, so that fillers account for at
    most a sixteenth on average.
    """

    grain: int
    max_length: int

    @classmethod
    def of(cls, lengths: np.ndarray, *, num_samples: int) -> "PackedTotals":
        """Choose the grain for micro-batches of `num_samples` samples from a column with these lengths.

        >>> PackedTotals.of(np.array([10, 30, 50, 70]), num_samples=32).grain
        64
        """
        spread = float(lengths.std()) * num_samples**0.5 / 2
        wanted = min(spread, float(lengths.mean()) * num_samples / 8)
        # Matrix products are fastest if the number of rows is a multiple of 8, or of 64 for many rows.
        unit = 64 if wanted >= 64 else 8
        return cls(grain=max(unit, round(wanted / unit) * unit), max_length=max(1, int(lengths.max(initial=1))))

    def total(self, real: int) -> int:
        """Return the smallest total that is at least `real` tokens."""
        return -(-real // self.grain) * self.grain

    def num_fillers(self, real: int, *, total: int) -> int:
        """Return the number of fillers, which is the same for all totals if possible, so that it adds no shapes."""
        return max(-(-self.grain // self.max_length) + 1, -(-(total - real) // self.max_length))


# --- micro-batches ---------------------------------------------------------------------------------------------------


class BatchSplitter:
    """Selects rows of columns and splits them into micro-batches."""

    def __init__(
        self, columns: Columns, *, send: MapTensor, is_on_device: bool = False, make_data: MakeData = DictBatch
    ) -> None:
        """Initialize for `columns`.

        `send` copies row numbers to the memory of the columns, which may be on the device.
        """
        self._columns = columns
        self._make_data = make_data
        self._send = send
        self._is_on_device = is_on_device
        # Keep the lengths on the host, so that shapes are known without waiting for the device.
        self._lengths = {n: c.lengths.cpu().numpy() for n, c in columns.items() if isinstance(c, Ragged)}
        self._max_length = {name: int(lengths.max(initial=1)) for name, lengths in self._lengths.items()}
        self._totals: dict[tuple[str, int], PackedTotals] = {}

    def micro_batches(
        self, rows: np.ndarray, ids: np.ndarray, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches of the selected rows. `ids` are their sample ids."""
        if len(rows) <= micro_batch and not self._lengths:
            # The fast path for small steps with columns of one shape.
            selected = self._send(torch.from_numpy(rows))
            fields: dict[str, Field] = {}
            for name, column in self._columns.items():
                assert isinstance(column, Tensor)
                # On the CPU, index_select is twice as fast as indexing.
                fields[name] = column.index_select(0, selected) if column.is_cpu else column[selected]
            whole = MicroBatch(fields=fields, ids=ids, is_on_device=self._is_on_device, make_data=self._make_data)
            return iter((whole,))
        return self._split(rows, ids, micro_batch=micro_batch, length_mode=length_mode)

    def _split(
        self, rows: np.ndarray, ids: np.ndarray, *, micro_batch: int, length_mode: LengthMode
    ) -> Iterator[MicroBatch]:
        # With "packed_bucketed", all pieces share one total, which must be known before the first piece.
        pieces = list(self._pieces(rows, micro_batch=micro_batch, length_mode=length_mode))
        totals = (
            {name: self._total(name, rows, pieces) for name in self._lengths}
            if length_mode == "packed_bucketed"
            else {}
        )
        for piece in pieces:
            selected = self._send(torch.from_numpy(rows[piece]))
            fields = {name: self._select(name, rows[piece], selected, length_mode) for name in self._columns}
            for name, (packing, total) in totals.items():
                fields[name] = self._filled(name, fields[name], packing, total)
            first_index = piece.start if isinstance(piece, slice) else None
            yield MicroBatch(
                fields=fields,
                ids=ids[piece],
                first_index=first_index,
                is_on_device=self._is_on_device,
                make_data=self._make_data,
            )

    def lengths_of(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the lengths of these samples, summed over the columns, or None if all samples have the same shape."""
        return np.sum([lengths[rows] for lengths in self._lengths.values()], axis=0) if self._lengths else None

    def _pieces(self, rows: np.ndarray, *, micro_batch: int, length_mode: LengthMode) -> Iterator[slice | np.ndarray]:
        lengths = self.lengths_of(rows)
        if lengths is not None:
            return split_indices(lengths, micro_batch=micro_batch, length_mode=length_mode)
        return (slice(start, start + micro_batch) for start in range(0, len(rows), micro_batch))

    def _select(self, name: str, rows: np.ndarray, selected: Tensor, length_mode: LengthMode) -> Field:
        column = self._columns[name]
        if isinstance(column, Tensor):
            return column.index_select(0, selected) if column.is_cpu else column[selected]
        lengths = self._lengths[name][rows]
        if length_mode == "packed":
            return column.packed(selected, max_length=int(lengths.max()), total=int(lengths.sum()))
        if length_mode == "packed_bucketed":
            return column.packed(selected, max_length=self._max_length[name], total=int(lengths.sum()))
        return column.padded(
            selected, length=padded_length(lengths, length_mode=length_mode, max_length=self._max_length[name])
        )

    def _total(self, name: str, rows: np.ndarray, pieces: Sequence[slice | np.ndarray]) -> tuple[PackedTotals, int]:
        """Return the total length that all micro-batches of a global batch share, so that a step has few shapes."""
        num_samples = max(len(rows[piece]) for piece in pieces)
        packing = self._totals.get((name, num_samples))
        if packing is None:
            packing = PackedTotals.of(self._lengths[name], num_samples=num_samples)
            self._totals[name, num_samples] = packing
        return packing, packing.total(max(int(self._lengths[name][rows[piece]].sum()) for piece in pieces))

    def _filled(self, name: str, field: Field, packing: PackedTotals, total: int) -> Packed:
        column = self._columns[name]
        assert isinstance(field, Packed)
        assert isinstance(column, Ragged)
        return column.filled(field, total=total, num_fillers=packing.num_fillers(len(field.values), total=total))


def split_samples(
    batch: GlobalBatch,
    *,
    micro_batch: int,
    length_mode: LengthMode,
    ragged: set[str],
    share: RankShare,
    pad_token_id: int | None = None,
) -> Iterator[MicroBatch]:
    """Split samples that were read one by one. The micro-batches are on the host."""
    part = share.of(len(batch))
    ids, rows = batch.ids[part.indices], np.arange(len(part.indices))
    padded = pad_tokens(batch.samples, pad_token_id=pad_token_id)
    stacked = None if padded is not None else stack_samples(batch.samples, ragged=ragged)
    if stacked is None:
        nested = stack_nested(batch.samples, ragged=ragged) if padded is None else padded
        size = micro_batch if row_obstacle(nested, len(rows)) is None else len(rows)
        micro_batches = _split_rows(nested, rows, ids, num_samples=len(rows), micro_batch=size)
    else:
        columns, make_data = stacked
        splitter = BatchSplitter(columns, send=lambda rows: rows, make_data=make_data)
        micro_batches = splitter.micro_batches(rows, ids, micro_batch=micro_batch, length_mode=length_mode)
    if share.size == 1:
        return micro_batches
    return share.equalize(micro_batches, part, num_samples=len(batch), micro_batch=micro_batch)


def take_samples(batch: GlobalBatch, rows: np.ndarray) -> GlobalBatch:
    """Return a batch with only these rows."""
    collated = None if batch.collated is None else select_rows(batch.collated, rows, len(batch))
    samples = tuple(batch.samples[row] for row in rows) if batch.samples else ()
    return replace(batch, ids=batch.ids[rows], samples=samples, collated=collated)


def split_collated(batch: GlobalBatch, *, micro_batch: int, share: RankShare) -> Iterator[MicroBatch]:
    """Split a collated batch along dimension 0. A batch that cannot be divided is yielded whole."""
    num_samples, part = len(batch), share.of(len(batch))
    obstacle = row_obstacle(batch.collated, num_samples)
    if obstacle is not None and share.size > 1:
        raise UsageError(
            "several processes cannot share this batch: it cannot be divided into samples",
            got=obstacle,
            try_="a collate function whose tensors and lists have one row per sample, or --nproc 1",
        )
    size = micro_batch if obstacle is None else num_samples
    ids = batch.ids[part.indices]
    micro_batches = _split_rows(batch.collated, part.indices, ids, num_samples=num_samples, micro_batch=size)
    if share.size == 1:
        return micro_batches
    return share.equalize(micro_batches, part, num_samples=num_samples, micro_batch=micro_batch)


def _split_rows(
    value: Any, rows: np.ndarray, ids: np.ndarray, *, num_samples: int, micro_batch: int
) -> Iterator[MicroBatch]:
    """Yield micro-batches with some rows of a batch, which has any structure and `num_samples` rows in total."""
    for start in range(0, len(rows), micro_batch):
        piece = rows[start : start + micro_batch]
        # A slice of a tensor is a view; an index array would copy.
        is_range = piece[-1] - piece[0] == len(piece) - 1
        is_whole = is_range and len(piece) == num_samples
        selected = slice(int(piece[0]), int(piece[-1]) + 1) if is_range else piece
        part = value if is_whole else select_rows(value, selected, num_samples)
        fields, make_data = flatten(part)
        first_index = int(piece[0]) if is_range else None
        yield MicroBatch(
            fields=fields, ids=ids[start : start + micro_batch], first_index=first_index, make_data=make_data
        )


def slice_micro_batch(micro: MicroBatch, num_slices: int) -> list[MicroBatch] | None:
    """Split a micro-batch into several smaller ones. Return None if it cannot be divided."""
    if not all(_has_rows(field, len(micro)) for field in micro.fields.values()):
        return None
    bounds = np.linspace(0, len(micro), min(num_slices, len(micro)) + 1, dtype=int).tolist()
    slices = []
    for start, end in itertools.pairwise(bounds):
        fields = {name: _slice_field(field, slice(start, end)) for name, field in micro.fields.items()}
        first = None if micro.first_index is None else micro.first_index + start
        part = replace(micro, fields=fields, ids=micro.ids[start:end], first_index=first)
        # A function with a closure may add lists from the collate function, which have one entry per sample.
        has_closure = getattr(micro.make_data, "__closure__", None) is not None
        if has_closure and row_obstacle(part.data, end - start) is not None:
            return None
        slices.append(part)
    return slices if len(slices) > 1 else None


def _has_rows(field: Field, num_samples: int) -> bool:
    if isinstance(field, Tensor):
        return field.dim() > 0 and field.shape[0] == num_samples
    return isinstance(field, Padded)


def _slice_field(field: Field, rows: slice) -> Field:
    assert not isinstance(field, Packed), "packed samples have no rows"
    if isinstance(field, Padded):
        return Padded(values=field.values[rows], lengths=field.lengths[rows])
    return field[rows]
