"""Data as named columns of equal length, and random subsets of it."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.base.errors import UsageError, WhetError
from whet.data.batch import Ragged

Column = Tensor | Ragged
Columns = dict[str, Column]


def as_columns(data: object) -> Columns | None:
    """Return the data as columns; None if it does not consist of tensors."""
    if isinstance(data, Tensor | Ragged | np.ndarray):
        named: dict[str, Any] = {"x": data}
    elif isinstance(data, Mapping):
        named = {str(name): column for name, column in data.items()}
    elif isinstance(data, tuple | list) and data and all(isinstance(p, Tensor | Ragged | np.ndarray) for p in data):
        named = name_fields(data)
    else:
        return None
    named = {name: _as_tensor(c) if isinstance(c, np.ndarray) else c for name, c in named.items()}
    if not named or not all(isinstance(column, Tensor | Ragged) for column in named.values()):
        return None
    check_field_names(named)
    _check_lengths(named)
    _check_finite_data(named)
    return named


def name_fields(parts: Sequence[Any]) -> dict[str, Any]:
    """Name the parts of an unnamed sample: x for one part, x and y for a pair, else f0, f1, ..."""
    names = ("x", "y") if len(parts) == 2 else ("x",) if len(parts) == 1 else tuple(f"f{i}" for i in range(len(parts)))
    return dict(zip(names, parts, strict=True))


def stack_samples(samples: Sequence[Any], *, ragged: set[str]) -> Columns:
    """Stack single samples into columns. Fields whose first dimension differs become ragged.

    `ragged` collects the names of ragged fields, so that they stay ragged in a later batch of equal lengths.
    """
    fields = [_as_fields(sample) for sample in samples]
    names = fields[0].keys()
    check_field_names(names)
    if any(field.keys() != names for field in fields):
        raise WhetError("samples have different fields", got=", ".join(names), try_="the same keys in every sample")
    columns = {name: _stack(name, [_as_tensor(field[name]) for field in fields], ragged) for name in names}
    ragged |= {name for name, column in columns.items() if isinstance(column, Ragged)}
    return columns


def check_field_names(names: Iterable[str]) -> None:
    """Raise for field names that an attribute of MicroBatch would hide."""
    reserved = {"ids", "fields", "map_tensors", "first_index", "is_counted", "is_on_device"}
    taken = sorted(reserved & set(names))
    if taken:
        raise WhetError("this field name is reserved", got=", ".join(taken), try_=f"{taken[0]}_ or another name")


def _as_fields(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    return name_fields(sample) if isinstance(sample, tuple | list) else {"x": sample}


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        # NumPy defaults to float64, which takes twice the memory and is not supported on MPS.
        value = value.astype(np.float32) if value.dtype == np.float64 else value
        return torch.from_numpy(np.ascontiguousarray(value))
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WhetError(
            "a sample must consist of tensors and numbers", got=f"{type(value).__name__}: {error}"
        ) from None


def _stack(name: str, values: list[Tensor], ragged: set[str]) -> Column:
    shapes = {value.shape for value in values}
    # A field that was ragged once stays ragged, so that every batch has the same type.
    if len(shapes) == 1 and name not in ragged:
        return torch.stack(values)
    if len({shape[1:] for shape in shapes}) > 1 or any(not shape for shape in shapes):
        raise WhetError(f"samples of {name!r} cannot be stacked", got=str(sorted(map(tuple, shapes))[:4]))
    return Ragged.of(values)


def _check_lengths(columns: Columns) -> None:
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise WhetError("columns must have equal lengths", got=", ".join(f"{n}: {s}" for n, s in sizes.items()))


def _check_finite_data(columns: Columns) -> None:
    for name, column in columns.items():
        values = column.values if isinstance(column, Ragged) else column
        if not values.is_floating_point() or bool(values.isfinite().all()):
            continue
        bad = values.flatten(1) if values.dim() > 1 else values[:, None]
        rows = (~bad.isfinite()).any(1).nonzero().flatten().tolist()
        raise WhetError(
            f"the data has NaN or Inf in {name!r}",
            got=f"{len(rows)} rows, the first at {rows[:5]}",
            try_="remove or fill them",
        )


class SubsetDataset:
    """A subset of a map-style dataset, in its order."""

    def __init__(self, data: Any, rows: list[int]) -> None:
        self._data = data
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._rows[index]]


def count_samples(data: Any) -> int | None:
    """Return the number of samples; None for an iterable without a length."""
    columns = as_columns(data)
    if columns is not None:
        return len(next(iter(columns.values())))
    return len(data) if callable(getattr(data, "__len__", None)) else None


def subset(data: Any, *, fraction: float, seed: int) -> Any:
    """Draw a random fraction of the samples, at least one, in their original order. The seed decides the draw."""
    total = count_samples(data)
    if fraction >= 1:
        return data
    if total is None or total == 0:
        raise UsageError("cannot subsample an iterable dataset", got=type(data).__name__, try_="a map-style dataset")
    rows = sorted(random.Random(f"subset {seed}").sample(range(total), max(1, round(fraction * total))))
    columns = as_columns(data)
    if columns is None:
        return SubsetDataset(data, rows)
    return {name: _select_rows(column, rows) for name, column in columns.items()}


def _select_rows(column: Column, rows: list[int]) -> Column:
    if isinstance(column, Ragged):
        return Ragged.of([column[row] for row in rows], pad_value=column.pad_value)
    return column[torch.tensor(rows)]
