"""The right source for the data you have."""

from collections.abc import Iterable
from typing import Any

from whet.base.errors import UsageError
from whet.data.columns import as_columns
from whet.data.mapped import Loading, Mapped
from whet.data.share import Share
from whet.data.source import AbstractSource
from whet.data.stream import Stream
from whet.data.table import Table
from whet.device.abstract import AbstractDevice


def open_source(
    data: Any,
    device: AbstractDevice,
    *,
    global_batch_size: int,
    seed: int,
    shuffle: bool = True,
    is_resident: bool = True,
    loading: Loading | None = None,
    share: Share | None = None,
) -> AbstractSource:
    """Tensors (a tuple or dict of them), a map-style dataset, or an iterable, as a source of global batches.

    `share` says which part of each this process computes; all of it if not given.
    """
    columns = as_columns(data)
    if columns is not None:
        return Table(
            columns,
            device,
            global_batch_size=global_batch_size,
            seed=seed,
            shuffle=shuffle,
            is_resident=is_resident,
            share=share,
        )
    if callable(getattr(data, "__getitem__", None)) and callable(getattr(data, "__len__", None)):
        return Mapped(
            data, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle, loading=loading, share=share
        )
    if isinstance(data, Iterable):
        return Stream(data, global_batch_size=global_batch_size, share=share)
    raise UsageError(
        "this cannot be trained on",
        got=type(data).__name__,
        try_="a tuple or dict of tensors, a map-style dataset, or an iterable of samples",
    )
