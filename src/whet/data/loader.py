"""Support for torch's DataLoader: its dataset, batch size, order and collate function.

The loader's batch size is the global batch size. The plan decides `num_workers`, `pin_memory` and `prefetch_factor`,
except for iterable datasets, which are divided between the loader's own workers.
"""

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from whet.base.errors import UsageError
from whet.data.columns import Columns, name_fields
from whet.data.order import RepeatingOrder, SampleOrder, SeededOrder
from whet.data.samplers import SamplerOrder, StreamedOrder
from whet.data.stream_reader import StatefulIterable

CollateFunction = Callable[[list[Any]], Any]


def with_loader_options(data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training options with those that a DataLoader determines: global_batch_size, shuffle and seed.

    Raise UsageError for an option that contradicts the loader, and if the batch size is unknown.
    """
    given = {name: value for name, value in options.items() if value is not None or name != "global_batch_size"}
    if not isinstance(data, DataLoader):
        check_no_loader_inside(data)
        if "global_batch_size" not in given:
            raise UsageError(
                "the batch size is unknown",
                got=f"{type(data).__name__} without global_batch_size",
                try_="global_batch_size=32 with data that yields samples, or a DataLoader",
            )
        return given
    decided: dict[str, Any] = {"global_batch_size": loader_batch_size(data), "shuffle": is_shuffled(data)}
    for name, value in decided.items():
        if name in given and given[name] != value and (name, given[name]) != ("shuffle", "auto"):
            raise UsageError(
                f"the DataLoader decides {name}",
                got=f"{name}={given[name]}, and a DataLoader with {name}={value}",
                try_=f"no {name}, or the dataset instead of the DataLoader",
            )
    if given.get("collate_fn") is not None:
        raise UsageError(
            "collate_fn= does not apply to a DataLoader",
            got="collate_fn= with a DataLoader",
            try_="DataLoader(..., collate_fn=...)",
        )
    generator = data.generator or getattr(data.sampler, "generator", None)
    if isinstance(generator, torch.Generator) and not given.get("seed"):
        decided["seed"] = generator.initial_seed() % 2**63
    return {**given, **decided}


def check_no_loader_inside(data: Any) -> None:
    """Raise an error for an iterable that wraps a DataLoader, such as timm's PrefetchLoader.

    Its items are batches instead of samples.
    """
    for name, value in getattr(data, "__dict__", {}).items():
        if (
            isinstance(value, DataLoader)
            and isinstance(data, Iterable)
            and not callable(getattr(data, "__getitem__", 0))
        ):
            raise UsageError(
                "this data yields the batches of a DataLoader, not samples",
                got=f"{type(data).__name__} around a DataLoader",
                try_=f"the DataLoader itself: data.{name}; apply what the wrapper does to a batch in the loss",
            )


def loader_batch_size(loader: DataLoader[Any]) -> int:
    """Return the batch size of the loader.

    For a batch sampler without a fixed size, return the size of its largest batch.
    """
    if loader.batch_size is not None:
        return loader.batch_size
    sampler = loader.batch_sampler
    size = getattr(sampler, "batch_size", None)
    if isinstance(size, int) and size > 0:
        return size
    if sampler is not None and hasattr(sampler, "__len__"):
        largest = SamplerOrder(sampler, seed=0, batch_size=None).largest_batch()
        if largest is not None:
            return largest
    raise UsageError(
        "the batch size of the DataLoader is unknown",
        got="batch_size=None" if sampler is None else f"{type(sampler).__name__} without batch_size and __len__",
        try_="DataLoader(dataset, batch_size=32), or the dataset with global_batch_size=32",
    )


def is_iterable_loader(loader: DataLoader[Any]) -> bool:
    """Return whether the loader itself must be iterated: its dataset is iterable, or a subclass overrides iteration."""
    has_own_iteration = any(
        getattr(type(loader), name) is not getattr(DataLoader, name) for name in ("__iter__", "_get_iterator")
    )
    return has_own_iteration or isinstance(loader.dataset, IterableDataset)


def is_rereadable_loader(loader: DataLoader[Any]) -> bool:
    """Return whether the loader can be read before training without side effects, unlike a stream."""
    return not is_iterable_loader(loader) and not isinstance(loader_order(loader, seed=0), StreamedOrder)


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Return whether the loader draws a new order for each epoch."""
    return not is_iterable_loader(loader) and not isinstance(loader.sampler, SequentialSampler)


def loader_order(loader: DataLoader[Any], *, seed: int) -> SampleOrder:
    """Return the order of a loader over a map-style dataset.

    Sequential and random samplers are replaced by a pure function of (seed, epoch, position). Any other sampler is
    iterated.
    """
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is not BatchSampler:
        return _iterated(batch_sampler, seed=seed, batch_size=None, num_rows=_num_rows(loader))
    # loader.sampler is not used in DataLoader(batch_sampler=BatchSampler(...)).
    sampler: Any = batch_sampler.sampler
    batch_size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    # The sampler may have been created for different data, such as range(100) for the first 100 samples.
    source: Any = getattr(sampler, "dataset" if type(sampler) is DistributedSampler else "data_source", loader.dataset)
    if not hasattr(source, "__len__"):
        raise UsageError(
            "the dataset of the DataLoader has no length",
            got=f"DataLoader({type(source).__name__})",
            try_="a torch.utils.data.IterableDataset whose __iter__ starts a new pass over the samples",
        )
    size = len(source)
    if type(sampler) is SequentialSampler:
        return SeededOrder(size, batch_size=batch_size, seed=seed, shuffle=False, drop_last=drop_last)
    if type(sampler) is RandomSampler:
        if not sampler.replacement and sampler.num_samples == size:
            return SeededOrder(size, batch_size=batch_size, seed=seed, drop_last=drop_last)
        return RepeatingOrder(
            size,
            num_draws=sampler.num_samples,
            replacement=sampler.replacement,
            batch_size=batch_size,
            seed=seed,
            drop_last=drop_last,
        )
    if type(sampler) is DistributedSampler:
        # whet divides every global batch between the ranks, so the loader must not divide the data too.
        return SeededOrder(size, batch_size=batch_size, seed=seed, shuffle=sampler.shuffle, drop_last=drop_last)
    return _iterated(sampler, seed=seed, batch_size=batch_size, drop_last=drop_last, num_rows=_num_rows(loader))


def _iterated(
    sampler: Any, *, seed: int, batch_size: int | None, drop_last: bool = False, num_rows: int | None
) -> SampleOrder:
    is_streamed = isinstance(sampler, StatefulIterable) or not hasattr(sampler, "__len__")
    kind = StreamedOrder if is_streamed else SamplerOrder
    return kind(sampler, seed=seed, batch_size=batch_size, drop_last=drop_last, num_rows=num_rows)


def _num_rows(loader: DataLoader[Any]) -> int | None:
    """Return the number of rows of a dataset that `loader_columns` reads; None for any other dataset."""
    dataset: Any = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_columns = type(dataset) is TensorDataset and loader.collate_fn is default_collate
    return len(cast("Sized", loader.dataset)) if is_columns else None


def loader_columns(loader: DataLoader[Any]) -> Columns | None:
    """Return the columns of a loader over tensors in memory, or None for another dataset or a collate function."""
    if loader.collate_fn is not default_collate or is_iterable_loader(loader):
        return None
    dataset: Any = loader.dataset
    rows: torch.Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices, dtype=torch.long)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or not dataset.tensors:
        return None
    tensors = dataset.tensors if rows is None else [tensor[rows] for tensor in dataset.tensors]
    return name_fields(tensors) if all(tensor.device.type == "cpu" for tensor in tensors) else None


def describe_non_finite_data(loader: DataLoader[Any]) -> str | None:
    """Describe which in-memory tensors of a loader contain NaN or Inf. Return None if all are finite.

    Non-finite values are only reported, because some losses mask missing values.

    >>> x = torch.tensor([[1.0], [float("nan")]])
    >>> describe_non_finite_data(DataLoader(TensorDataset(x, torch.tensor([0, 1]))))
    'x has NaN or Inf in 1 of 2 samples'
    """
    columns = loader_columns(loader) or {}
    parts = []
    for name, column in columns.items():
        if isinstance(column, torch.Tensor) and column.is_floating_point() and not bool(column.isfinite().all()):
            num_bad = int((~column.isfinite()).reshape(len(column), -1).any(1).sum())
            parts.append(f"{name} has NaN or Inf in {num_bad:,} of {len(column):,} samples")
    return "; ".join(parts) or None
