"""Samples of different lengths: stored without padding, given to a model padded or packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from whet.device.explaining import WideDtypeError

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


def moved(name: str, field: AnyField, put: Put) -> AnyField:
    """A field or column with every tensor moved; a device that cannot take it is told its name."""
    try:
        return put(field) if isinstance(field, Tensor) else field.moved(put)
    except WideDtypeError as error:
        raise error.named(f"the data's field {name!r}") from None
