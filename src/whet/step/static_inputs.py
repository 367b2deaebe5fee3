"""Inputs of captured steps at fixed addresses, and signatures of micro-batches."""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from whet.data.batch import MicroBatch, Packed

Signature = tuple[Any, ...]


class StaticInputs:
    """Copies of the micro-batches of one step, at fixed addresses. They are filled before each replay."""

    def __init__(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.micro_batches = [_copied(micro) for micro in micro_batches]
        self._tensors = list(_all_tensors(self.micro_batches))

    @property
    def num_bytes(self) -> int:
        """The total size of the static inputs in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @torch.no_grad()
    def fill(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Copy the values of micro-batches with the same shapes into the static inputs."""
        torch._foreach_copy_(self._tensors, list(_all_tensors(micro_batches)))


def _copied(micro: MicroBatch) -> MicroBatch:
    fields = micro.map_tensors(torch.clone).fields
    ids: Any = _UnreadableIds(len(micro))
    return MicroBatch(fields, ids, micro.first_index, make_data=micro.make_data)


class _UnreadableIds:
    """A placeholder for sample ids that raises on access, because a replay would use the ids of the capture."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def _reject(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("the loss reads sample_ids, which are on the host")

    __getattr__ = __getitem__ = __iter__ = __array__ = __eq__ = __add__ = __radd__ = __mod__ = _reject
    __hash__ = object.__hash__


def signature(micro: MicroBatch) -> Signature:
    """Return the properties of a micro-batch that a capture depends on: sizes, shapes, dtypes and the first index.

    Micro-batches with equal signatures can share a capture.
    """
    fields = [(name, *_field_shapes(value), *_field_numbers(value)) for name, value in micro.fields.items()]
    return len(micro), micro.first_index, *fields


def _field_numbers(field: Any) -> tuple[int, ...]:
    return (field.max_length, field.num_fillers) if isinstance(field, Packed) else ()


def _field_shapes(field: Any) -> Iterator[Any]:
    for tensor in _field_tensors(field):
        yield tensor.shape
        yield tensor.dtype


def _all_tensors(micro_batches: Sequence[MicroBatch]) -> Iterator[Tensor]:
    for micro in micro_batches:
        for value in micro.fields.values():
            yield from _field_tensors(value)


def _field_tensors(field: Any) -> tuple[Tensor, ...]:
    if isinstance(field, Tensor):
        return (field,)
    return (field.values, field.starts) if isinstance(field, Packed) else (field.values, field.lengths)
