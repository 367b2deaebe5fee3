"""Global batches, micro-batches, and samples of different lengths (padded, packed or ragged)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError
from whet.device.errors import WideDtypeError

MapTensor = Callable[[Tensor], Tensor]
Shapes = tuple[tuple[int, ...], ...]
_MAX_COLUMNS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How much data the optimizer has consumed: complete epochs, and samples of the current epoch."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step, which `for batch in session` yields.

    Pass it to `session.step(loss, batch)`, which splits it into micro-batches and passes these to the loss function.
    """

    ids: np.ndarray
    """The ids of the samples, or consecutive numbers for an iterable."""
    after: Position
    """The position after the optimizer has consumed this batch."""
    is_last_of_epoch: bool
    samples: tuple[Any, ...] = ()
    """The samples of this rank if they were read one by one. Empty for tensors in memory and for collated batches."""
    collated: Any = None
    """The result of the collate function for the whole batch, or None without a collate function."""

    def __len__(self) -> int:
        return len(self.ids)

    def _explain(self, *_: Any) -> NoReturn:
        raise UsageError(
            "a global batch holds no tensors: whet splits it and moves it to the device",
            got="a batch of the session used as data",
            try_="session.step(loss, batch), or: with session.manual(batch) as data:",
        )

    __iter__ = __getitem__ = _explain

    def __getattr__(self, name: str) -> NoReturn:
        # Python looks up special methods in many places and expects an AttributeError if there is none.
        if name.startswith("__"):
            raise AttributeError(name)
        self._explain()


class DictBatch(dict[str, Any]):
    """A micro-batch of named fields: a dict with attribute access, so that `model(**batch)` and `batch.x` both work.

    `sample_ids` are the ids of the samples. `first_index` is the index of the first sample in the global batch, or None
    if the samples are not consecutive.
    """

    sample_ids: np.ndarray
    first_index: int | None

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this data has no field {name!r}; it has {', '.join(map(str, self))}") from None


class TupleBatch(tuple[Any, ...]):
    """A micro-batch of a tuple: both `x, y = batch` and `batch.x`, `batch.y` work.

    It also has the attributes `sample_ids` and `first_index` of a DictBatch.
    """

    sample_ids: np.ndarray
    first_index: int | None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "TupleBatch":
        batch = cls(fields.values())
        batch.__dict__.update(fields)
        return batch

    def __getattr__(self, name: str) -> NoReturn:
        fields = [name for name in self.__dict__ if name not in ("sample_ids", "first_index")]
        raise AttributeError(f"this data has no field {name!r}; it has {', '.join(fields)}")


def only_field(fields: Mapping[str, Any]) -> Any:
    """Return the only field, so that a dataset of single tensors yields tensors."""
    (value,) = fields.values()
    return value


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The part of a global batch that goes through the model at once.

    `fields` are the tensors by name. `data` has the type of the user's batch and is passed to the loss function.
    """

    fields: Mapping[str, "Field"]
    ids: np.ndarray
    first_index: int | None = 0
    """The index of the first sample in the global batch, or None if the samples are not consecutive.

    Needed by models that keep state for each row of the global batch between steps.
    """
    is_counted: bool = True
    """False for a repeated micro-batch with weight 0, which is computed only because other ranks wait for it."""
    is_on_device: bool = False
    make_data: Callable[[Mapping[str, Any]], Any] = DictBatch
    """Builds the user's batch from the fields."""

    @property
    def data(self) -> Any:
        """The micro-batch in the type of the user's batch: the result of the collate function, a tuple or a dict."""
        data = self.make_data(self.fields)
        if isinstance(data, DictBatch | TupleBatch):
            data.sample_ids, data.first_index = self.ids, self.first_index
        return data

    def map_tensors(self, function: MapTensor) -> "MicroBatch":
        """Apply a function, such as a copy to a device, to every tensor."""
        fields = {name: map_field(name, field, function) for name, field in self.fields.items()}
        return MicroBatch(fields, self.ids, self.first_index, is_counted=self.is_counted, make_data=self.make_data)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"this data has no field {name!r}; it has {', '.join(self.fields)}") from None

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fields.values())

    def __len__(self) -> int:
        return len(self.ids)


def micro_batch_shapes(micro: MicroBatch) -> Shapes:
    """Return the shapes of all fields. A new combination of shapes may cause a compilation on the device."""
    return tuple([tuple(f.shape if isinstance(f, Tensor) else f.values.shape) for f in micro.fields.values()])


# --- samples of different lengths ------------------------------------------------------------------------------------


def describe_non_finite(micro: MicroBatch) -> str | None:
    """Return which fields (and columns of a table) of a batch contain NaN or Inf, or None if all are finite.

    >>> x = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    >>> describe_non_finite(MicroBatch({"x": x, "y": torch.tensor([0, 1])}, np.arange(2)))
    'x has NaN or Inf in 1 of 2 samples, in column 1'
    """
    problems = []
    for name, field in micro.fields.items():
        if not isinstance(field, Tensor) or not field.dim() or bool(field.isfinite().all()):
            continue
        is_bad = ~field.isfinite().reshape(len(field), -1)
        columns = is_bad.any(0).nonzero().flatten().tolist() if field.dim() == 2 else []
        shown = ", ".join(map(str, columns[:_MAX_COLUMNS])) + (" ..." if len(columns) > _MAX_COLUMNS else "")
        where = f", in column{'s' if len(columns) > 1 else ''} {shown}" if columns else ""
        problems.append(f"{name} has NaN or Inf in {int(is_bad.any(1).sum())} of {len(field)} samples{where}")
    return "; ".join(problems) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Padded:
    """A padded batch. `values` has shape (batch, max length, ...), with padding after each sample."""

    values: Tensor
    lengths: Tensor

    def map_tensors(self, function: MapTensor) -> "Padded":
        """Apply a function to every tensor."""
        return Padded(values=function(self.values), lengths=function(self.lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A concatenated batch without padding. Sample i is values[starts[i] : starts[i + 1]].

    Fillers after the last sample may extend the total length to one of a few values. A model processes them like
    samples and drops them from its output.
    """

    values: Tensor
    starts: Tensor
    """The cumulative lengths, int32, of shape (batch + fillers + 1,)."""
    max_length: int
    """An upper bound for the length of samples and fillers."""
    num_fillers: int = 0

    @property
    def num_samples(self) -> int:
        """The number of samples without fillers."""
        return self.starts.shape[0] - 1 - self.num_fillers

    def map_tensors(self, function: MapTensor) -> "Packed":
        """Apply a function to every tensor."""
        return replace(self, values=function(self.values), starts=function(self.starts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """A complete column of samples with different lengths, concatenated."""

    values: Tensor
    starts: Tensor
    """The cumulative lengths, int64, of shape (samples + 1,)."""
    pad_value: float = 0

    @classmethod
    def of(cls, samples: Sequence[Tensor], *, pad_value: float = 0) -> "Ragged":
        """Return a column that concatenates these samples."""
        lengths = torch.tensor([0, *(len(sample) for sample in samples)])
        return cls(values=torch.cat(list(samples)), starts=lengths.cumsum(0), pad_value=pad_value)

    def map_tensors(self, function: MapTensor) -> "Ragged":
        """Apply a function to every tensor."""
        return Ragged(values=function(self.values), starts=function(self.starts), pad_value=self.pad_value)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.values[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> Tensor:
        """The length of every sample, (samples,)."""
        return self.starts.diff()

    def padded(self, rows: Tensor, *, length: int) -> Padded:
        """Return the selected samples, padded to `length`."""
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        offsets = torch.arange(length, device=self.values.device)
        is_real = offsets < lengths[:, None]
        # Padded positions read element 0, which always exists, and are overwritten below.
        values = self.values[torch.where(is_real, starts[:, None] + offsets, 0)]
        mask = is_real.reshape(*is_real.shape, *(1,) * (values.dim() - 2))
        return Padded(values=torch.where(mask, values, self.pad_value).to(values.dtype), lengths=lengths)

    def packed(self, rows: Tensor, *, max_length: int, total: int) -> Packed:
        """Return the selected samples, concatenated. `total` is the sum of their lengths."""
        starts = self.starts[rows]
        lengths = self.starts[rows + 1] - starts
        ends = lengths.cumsum(0)
        # Without output_size, torch computes it on the device and waits for the result.
        owner = torch.repeat_interleave(torch.arange(len(rows), device=ends.device), lengths, output_size=total)
        index = torch.arange(total, device=ends.device) - (ends - lengths)[owner] + starts[owner]
        packed_starts = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
        return Packed(values=self.values[index], starts=packed_starts, max_length=max_length)

    def filled(self, packed: Packed, *, total: int, num_fillers: int) -> Packed:
        """Append fillers up to `total` tokens. Some of the fillers may be empty."""
        values, starts, max_length = packed.values, packed.starts, packed.max_length
        num_missing = total - len(values)
        assert 0 <= num_missing <= num_fillers * max_length, "fillers are no longer than samples"
        filler = values.new_full((num_missing, *values.shape[1:]), self.pad_value)
        ends = len(values) + max_length * torch.arange(1, num_fillers + 1, device=starts.device, dtype=starts.dtype)
        return replace(
            packed,
            values=torch.cat([values, filler]),
            starts=torch.cat([starts, ends.clamp(max=total)]),
            num_fillers=num_fillers,
        )


Field = Tensor | Padded | Packed
AnyField = TypeVar("AnyField", Tensor, Padded, Packed, Ragged, Tensor | Ragged, Tensor | Padded | Packed)


def map_field(name: str, field: AnyField, function: MapTensor) -> AnyField:
    """Apply a function to every tensor of a field or column. A dtype error is reported with the name of the field."""
    try:
        return function(field) if isinstance(field, Tensor) else field.map_tensors(function)
    except WideDtypeError as error:
        raise error.named(f"the data's field {name!r}") from None
