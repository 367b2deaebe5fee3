"""Micro-batches that stay where they are: what a captured step reads, filled anew before each replay."""

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from whet.data.batch import Micro
from whet.data.ragged import Packed

Signature = tuple[Any, ...]


class StaticMicros:
    """The micro-batches of one step, as copies with addresses of their own."""

    def __init__(self, micros: Sequence[Micro]) -> None:
        self.micros = [_copied(micro) for micro in micros]
        self._tensors = list(_tensors(self.micros))

    @property
    def num_bytes(self) -> int:
        """Of all their tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    @torch.no_grad()
    def fill(self, micros: Sequence[Micro]) -> None:
        """Takes other values of the same shapes."""
        torch._foreach_copy_(self._tensors, list(_tensors(micros)))


def _copied(micro: Micro) -> Micro:
    return Micro(micro.moved(torch.clone).fields, _HostIds(len(micro)), micro.first_place)  # type: ignore[arg-type]


class _HostIds:
    """Stands for the ids of samples: a captured step would go on reading those it was captured with."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("the loss reads micro.ids, which lie on the host")

    __getattr__ = __getitem__ = __iter__ = __array__ = __eq__ = __add__ = __radd__ = __mod__ = _refuse
    __hash__ = object.__hash__


def signature(micro: Micro) -> Signature:
    """All that the host knows of a micro-batch but for its ids: a step captured with it holds for what has the same."""
    fields = [(name, *_shapes(field), *_numbers(field)) for name, field in micro.fields.items()]
    return len(micro), micro.first_place, *fields


def _numbers(field: Any) -> tuple[int, ...]:
    return (field.max_length, field.num_fillers) if isinstance(field, Packed) else ()


def _shapes(field: Any) -> Iterator[Any]:
    for tensor in _parts(field):
        yield tensor.shape
        yield tensor.dtype


def _tensors(micros: Sequence[Micro]) -> Iterator[Tensor]:
    for micro in micros:
        for field in micro.fields.values():
            yield from _parts(field)


def _parts(field: Any) -> tuple[Tensor, ...]:
    if isinstance(field, Tensor):
        return (field,)
    return (field.values, field.starts) if isinstance(field, Packed) else (field.values, field.lengths)
