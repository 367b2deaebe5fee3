"""Global batches, micro-batches, and samples of different lengths (padded, packed or ragged)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.device.errors import WideDtypeError

Put = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """A batch as a rectangle: `values` is (batch, longest, ...), filled up behind each sample's length."""

    values: Tensor
    lengths: Tensor

    def moved(self, put: Put) -> "Padded":
        """The same, with every tensor moved."""
        return Padded(values=put(self.values), lengths=put(self.lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A batch without padding: samples one after the other; sample i is values[starts[i] : starts[i + 1]].

    Behind the last sample there may be fillers, texts that mean nothing: they bring the total to one of a few. A model
    computes them like samples and leaves them out of its answer.
    """

    values: Tensor
    starts: Tensor
    """(batch + fillers + 1), int32: the cumulative lengths."""
    max_length: int
    """No sample and no filler is longer."""
    num_fillers: int = 0

    @property
    def num_samples(self) -> int:
        """How many are asked for: those that are no fillers."""
        return self.starts.shape[0] - 1 - self.num_fillers

    def moved(self, put: Put) -> "Packed":
        """The same, with every tensor moved."""
        return replace(self, values=put(self.values), starts=put(self.starts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """A whole column of samples of different lengths, one behind the other."""

    values: Tensor
    starts: Tensor
    """(samples + 1), int64."""
    pad_value: float = 0

    @classmethod
    def of(cls, samples: Sequence[Tensor], *, pad_value: float = 0) -> "Ragged":
        """A column from single samples."""
        lengths = torch.tensor([0, *(len(sample) for sample in samples)])
        return cls(values=torch.cat(list(samples)), starts=lengths.cumsum(0), pad_value=pad_value)

    def moved(self, put: Put) -> "Ragged":
        """The same, with every tensor moved."""
        return Ragged(values=put(self.values), starts=put(self.starts), pad_value=self.pad_value)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.values[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> Tensor:
        """The length of every sample."""
        return self.starts.diff()

    def padded(self, rows: Tensor, *, length: int) -> Padded:
        """The chosen samples, filled up to `length`."""
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        place = torch.arange(length, device=self.values.device)
        is_real = place < lengths[:, None]
        values = self.values[torch.where(is_real, starts[:, None] + place, 0)]
        mask = is_real.reshape(*is_real.shape, *(1,) * (values.dim() - 2))
        return Padded(values=torch.where(mask, values, self.pad_value).to(values.dtype), lengths=lengths)

    def packed(self, rows: Tensor, *, max_length: int, total: int) -> Packed:
        """The chosen samples one after the other; `total` is the sum of their lengths, known on the host."""
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        ends = lengths.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(rows), device=ends.device), lengths, output_size=total)
        place = torch.arange(total, device=ends.device) - (ends - lengths)[owner] + starts[owner]
        packed_starts = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        return Packed(values=self.values[place], starts=packed_starts, max_length=max_length)

    def filled(self, packed: Packed, *, total: int, num_fillers: int) -> Packed:
        """The same samples, and fillers behind them up to `total`; some of the fillers may be empty."""
        values, starts, longest = packed.values, packed.starts, packed.max_length
        num_more = total - len(values)
        assert 0 <= num_more <= num_fillers * longest, "fillers are no longer than samples"
        filler = values.new_full((num_more, *values.shape[1:]), self.pad_value)
        ends = len(values) + longest * torch.arange(1, num_fillers + 1, device=starts.device, dtype=starts.dtype)
        return replace(
            packed,
            values=torch.cat([values, filler]),
            starts=torch.cat([starts, ends.clamp(max=total)]),
            num_fillers=num_fillers,
        )


AnyField = TypeVar("AnyField", Tensor, Padded, Packed, Ragged, Tensor | Ragged, Tensor | Padded | Packed)


def map_field(name: str, field: AnyField, put: Put) -> AnyField:
    """A field or column with every tensor moved; a device that cannot take it is told its name."""
    try:
        return put(field) if isinstance(field, Tensor) else field.moved(put)
    except WideDtypeError as error:
        raise error.named(f"the data's field {name!r}") from None


Field = Tensor | Padded | Packed
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How much data the optimizer has consumed: whole epochs, and samples of the one it is in."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step."""

    ids: np.ndarray
    """Sample ids; running numbers for a stream."""
    after: Position
    """Where the run stands once the optimizer has consumed this batch."""
    is_last_of_epoch: bool
    samples: tuple[Any, ...] = ()
    """The samples themselves, where they had to be read one by one; those that this process computes."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The part of a global batch that goes through the model at once: what a loss function receives.

    Fields have the names of your data (`micro.tokens`, `micro["label"]`), or x and y for a pair of tensors; they can
    also be unpacked in order: `x, y = micro`.
    """

    fields: Mapping[str, Field]
    ids: np.ndarray
    first_index: int | None = 0
    """Where its first sample lies in the global batch, the others behind it; None where they lie apart.

    For a model that keeps something between steps for each place of the batch, however the batch is cut.
    """
    counts: bool = True
    """False for one that is computed only because other processes wait for it: it weighs nothing."""
    is_there: bool = False
    """On the device already: nothing has to be moved."""

    def moved(self, put: Put) -> "MicroBatch":
        """The same, with every tensor moved."""
        fields = {name: map_field(name, field, put) for name, field in self.fields.items()}
        return MicroBatch(fields=fields, ids=self.ids, first_index=self.first_index, counts=self.counts)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"this data has no field {name!r}; it has {', '.join(self.fields)}") from None

    def __getitem__(self, key: str | int) -> Any:
        return self.fields[key] if isinstance(key, str) else tuple(self.fields.values())[key]

    def __iter__(self) -> Any:
        return iter(self.fields.values())

    def __len__(self) -> int:
        return len(self.ids)


def micro_batch_shapes(micro: MicroBatch) -> Shapes:
    """The shapes of all fields: what decides whether a device must compile anew."""
    return tuple(tuple(f.shape if isinstance(f, Tensor) else f.values.shape) for f in micro.fields.values())
