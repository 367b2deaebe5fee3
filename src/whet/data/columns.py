"""Data as named columns of equal length, and random subsets of such data."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from whet.base.errors import UsageError, WhetError
from whet.data.batch import DictBatch, Ragged, TupleBatch, only_field

Column = Tensor | Ragged
Columns = dict[str, Column]
MakeData = Callable[[Mapping[str, Any]], Any]
"""Builds the user's batch from named fields."""


_MAX_LISTED_COLUMNS = 8
"""A list with more tensors than this is treated as a dataset of samples."""


def as_columns(data: object) -> Columns | None:
    """Return the data as columns, or None if it does not consist of tensors and arrays.

    A list of many tensors is treated as a dataset of samples.
    """
    if isinstance(data, Tensor | Ragged | np.ndarray):
        named: dict[str, Any] = {"x": data}
    elif isinstance(data, Mapping):
        named = {str(name): column for name, column in data.items()}
    elif _is_column_sequence(data):
        if isinstance(data, list):
            # torch treats lists as datasets of samples everywhere else, but users also write [x, y] for (x, y).
            raise UsageError(
                "a list of tensors may be a list of samples or of columns",
                got=f"a list of {len(data)}",
                try_="tuple(data) if they are columns; torch.stack(data), or collate_fn=, if they are samples",
            )
        named = _as_fields(data)
    else:
        return None
    named = {name: _as_tensor(c) if isinstance(c, np.ndarray) and _is_numeric(c) else c for name, c in named.items()}
    if not named or not all(isinstance(column, Tensor | Ragged) for column in named.values()):
        return None
    _check_lengths(named)
    _check_finite_data(named)
    return named


def _is_column_sequence(data: object) -> TypeGuard[Sequence[Any]]:
    if not isinstance(data, tuple | list) or not data or (isinstance(data, list) and len(data) > _MAX_LISTED_COLUMNS):
        return False
    return all(isinstance(part, Tensor | Ragged | np.ndarray) for part in data)


def columns_type(data: object) -> MakeData:
    """Return a function that builds the user's batch from columns: a tuple, a dict or a single tensor."""
    if isinstance(data, Mapping):
        return DictBatch
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        make: MakeData = lambda fields: type(data)(*fields.values())  # noqa: E731
        return make
    return TupleBatch.of if isinstance(data, tuple | list) else only_field


def name_fields(parts: Sequence[Any]) -> dict[str, Any]:
    """Return the parts of a tuple by name: x, y, field2, field3, ..."""
    names = ("x", "y", *(f"field{index}" for index in range(2, len(parts))))
    return dict(zip(names, parts, strict=False))


def stack_samples(samples: Sequence[Any], *, ragged: set[str]) -> tuple[Columns, MakeData] | None:
    """Stack single samples into columns. Return None if a field contains anything but tensors, arrays and numbers.

    Fields whose first dimension varies become ragged. Their names are added to `ragged`, so that they stay ragged in
    later batches with equal lengths.
    """
    fields = [_as_fields(sample) for sample in samples]
    names = fields[0].keys()
    if any(field.keys() != names for field in fields):
        raise WhetError("samples have different fields", got=", ".join(names), try_="the same keys in every sample")
    if not all(_is_numeric(value) for field in fields for value in field.values()):
        return None
    columns = {name: _stack(name, [_as_tensor(field[name]) for field in fields], ragged) for name in names}
    ragged |= {name for name, column in columns.items() if isinstance(column, Ragged)}
    return columns, columns_type(samples[0])


def stack_nested(values: Sequence[Any], *, ragged: set[str] | None = None, name: str = "") -> Any:
    """Stack nested samples: tensors of equal shape into a tensor, dicts and tuples part by part, others into a list.

    The names of fields that become lists of tensors are added to `ragged`, so that they stay lists in later batches
    whose shapes happen to be equal.

    >>> stack_nested([{"x": 1, "name": "a"}, {"x": 2, "name": "b"}])
    {'x': tensor([1, 2]), 'name': ['a', 'b']}
    """
    ragged = set() if ragged is None else ragged
    first = values[0]
    if isinstance(first, Mapping) and all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return DictBatch(
            {key: stack_nested([v[key] for v in values], ragged=ragged, name=f"{name}.{key}") for key in first}
        )
    if isinstance(first, tuple) and all(isinstance(v, tuple) and len(v) == len(first) for v in values):
        parts = [
            stack_nested([value[index] for value in values], ragged=ragged, name=f"{name}.{index}")
            for index in range(len(first))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if name not in ragged and all(_is_numeric(value) for value in values):
        tensors = [_as_tensor(value) for value in values]
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) == 1:
            return torch.stack(tensors)
        ragged.add(name)
    # Strings, objects, and tensors of different shapes (such as the boxes of an image) become a list with one entry per
    # sample.
    return list(values)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_numeric(part) for part in value)
    if isinstance(value, np.ndarray | np.generic):
        # torch has no dtype for strings, dates and objects.
        return value.dtype.kind in "biufc"
    return isinstance(value, Tensor | bool | int | float | complex)


def as_rows(data: Any) -> Any:
    """Return a dict or tuple of columns, some of which are lists, as a dataset of rows. Return other data unchanged."""
    if isinstance(data, Mapping):
        return RowDataset(data)
    if not isinstance(data, tuple) or not any(isinstance(part, Tensor | np.ndarray) for part in data):
        return data
    if all(isinstance(part, Tensor | np.ndarray | list | tuple) for part in data):
        return TupleRows(data)
    return data


class RowDataset:
    """A map-style dataset of dicts: the rows of columns, some of which are lists (strings, objects)."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        _check_lengths(columns)
        self._columns = columns
        self._num_rows = len(next(iter(columns.values()), ()))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


class TupleRows:
    """A map-style dataset of tuples (the rows of several columns) or of the entries of a list."""

    def __init__(self, columns: Sequence[Any]) -> None:
        _check_lengths(name_fields(columns))
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> Any:
        row = tuple(column[index] for column in self._columns)
        return row if len(row) > 1 else row[0]


def rows_to_collate(data: Any) -> Any:
    """Return the data as a dataset of the samples that are passed to a collate function.

    A tuple or dict of columns is a dataset of rows. A list is a list of samples, even if it contains tensors.
    """
    if isinstance(data, Mapping):
        return RowDataset(data)
    if isinstance(data, tuple) and (columns := as_columns(data)) is not None:
        return TupleRows(list(columns.values()))
    return TupleRows([data]) if isinstance(data, list) else data


def _as_fields(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return dict(zip(sample._fields, sample, strict=True))
    return name_fields(sample) if isinstance(sample, tuple | list) else {"x": sample}


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        # NumPy arrays are float64 by default, which takes twice the memory and is not supported on MPS.
        value = value.astype(np.float32) if value.dtype == np.float64 else value
        # ascontiguousarray would add a dimension to a scalar.
        return torch.from_numpy(np.ascontiguousarray(value) if value.ndim else value.copy())
    try:
        return torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WhetError(
            "a sample must consist of tensors and numbers",
            got=f"{type(value).__name__}: {error}",
            try_="torch.tensor(...) of the values in the dataset, or collate_fn=...",
        ) from None


def _stack(name: str, values: list[Tensor], ragged: set[str]) -> Column:
    shapes = {value.shape for value in values}
    # A field that has been ragged once stays ragged, so that all batches have the same type.
    if len(shapes) == 1 and name not in ragged:
        return torch.stack(values)
    if len({shape[1:] for shape in shapes}) > 1 or any(not shape for shape in shapes):
        raise WhetError(
            f"samples of {name!r} cannot be stacked",
            got=f"shapes {sorted(map(tuple, shapes))[:4]}",
            try_="samples of one shape, or collate_fn=... that pads them",
        )
    return Ragged.of(values)


def _check_lengths(columns: Mapping[str, Any]) -> None:
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise WhetError(
            "columns must have equal lengths",
            got=", ".join(f"{name}: {size}" for name, size in sizes.items()),
            try_="one row for each sample in every column",
        )


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


def count_samples(data: Any) -> int | None:
    """Return the number of samples, or None for an iterable without a length."""
    columns = as_columns(data)
    if columns is not None:
        return len(next(iter(columns.values())))
    return len(data) if callable(getattr(data, "__len__", None)) else None


def subset(data: Any, *, fraction: float, seed: int) -> Any:
    """Return a random fraction of the samples, at least one, in their original order.

    The choice depends only on the seed.
    """
    total = count_samples(data)
    if fraction >= 1:
        return data
    if total is None or total == 0:
        raise UsageError("cannot subsample an iterable dataset", got=type(data).__name__, try_="a map-style dataset")
    rows = sorted(random.Random(f"subset {seed}").sample(range(total), max(1, round(fraction * total))))
    columns = as_columns(data)
    if columns is None:
        return Subset(data, rows)
    return {name: select_column(column, rows) for name, column in columns.items()}


def select_column(column: Column, rows: list[int]) -> Column:
    """Return the selected rows of a column."""
    if isinstance(column, Ragged):
        return Ragged.of([column[row] for row in rows], pad_value=column.pad_value)
    return column[torch.tensor(rows)]
