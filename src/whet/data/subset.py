"""A share of the data: which samples is decided by a seed alone, so that everyone who asks gets the same ones."""

import random
from typing import Any

import torch

from whet.base.errors import UsageError
from whet.data.columns import Column, as_columns
from whet.data.ragged import Ragged


class Rows:
    """Some samples of a map-style dataset, in their order."""

    def __init__(self, data: Any, rows: list[int]) -> None:
        self._data = data
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._rows[index]]


def num_samples(data: Any) -> int | None:
    """How many samples there are; None for a stream."""
    columns = as_columns(data)
    if columns is not None:
        return len(next(iter(columns.values())))
    return len(data) if callable(getattr(data, "__len__", None)) else None


def subset(data: Any, *, share: float, seed: int) -> Any:
    """That share of the samples, at least one; the order of those that are left stays."""
    total = num_samples(data)
    if share >= 1:
        return data
    if total is None or total == 0:
        raise UsageError("a share of a stream cannot be drawn", got=type(data).__name__, try_="a map-style dataset")
    rows = sorted(random.Random(f"subset {seed}").sample(range(total), max(1, round(share * total))))
    columns = as_columns(data)
    return Rows(data, rows) if columns is None else {name: _picked(column, rows) for name, column in columns.items()}


def _picked(column: Column, rows: list[int]) -> Column:
    if isinstance(column, Ragged):
        return Ragged.of([column[row] for row in rows], pad_value=column.pad_value)
    return column[torch.tensor(rows)]
