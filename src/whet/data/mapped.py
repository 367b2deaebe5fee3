"""Map-style datasets: samples read one by one, here or by workers, each with randomness of its own."""

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from whet.data.batch import GlobalBatch, Micro, Position
from whet.data.cut import Lengths
from whet.data.order import sample_seed
from whet.data.source import AbstractSource, micros_of_samples, ordered_batches


class MapStyle(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """How samples are read: the plan's decision."""

    workers: int = 0
    start: str = "fork"
    """How workers start: fork or spawn."""
    prefetch: int = 2
    """Global batches that each worker reads ahead."""


@final
class Mapped(AbstractSource):
    def __init__(
        self,
        dataset: MapStyle,
        *,
        global_batch_size: int,
        seed: int,
        shuffle: bool = True,
        loading: Loading | None = None,
    ) -> None:
        self.num_samples: int = len(dataset)
        self._order: dict[str, Any] = {"global_batch_size": global_batch_size, "seed": seed, "shuffle": shuffle}
        self._reader = _Reader(dataset, seed)
        self._requests = _Requests()
        self._ragged: set[str] = set()
        self._loader = _loader(self._reader, self._requests, loading or Loading())

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        planned = partial(ordered_batches, self.num_samples, position, **self._order)
        # A sample is asked for with its epoch, so that its randomness is known wherever it is read.
        self._requests.batches = lambda: ([(position.epoch, int(i)) for i in ids] for ids, _, _ in planned())
        for (ids, after, is_last), samples in zip(planned(), self._loader, strict=True):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last, samples=tuple(samples))

    def micros(self, batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
        return micros_of_samples(batch, micro_batch=micro_batch, how=how, ragged=self._ragged)

    def close(self) -> None:
        del self._loader


class _Requests:
    """What is to be read next: one list of (epoch, sample) for each global batch."""

    def __init__(self) -> None:
        self.batches: Callable[[], Iterator[list[tuple[int, int]]]] = lambda: iter(())

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self.batches()


class _Reader(Dataset[Any]):
    """Reads a sample with generators seeded from (seed, epoch, sample), and leaves the process's own as they were."""

    def __init__(self, dataset: MapStyle, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, request: tuple[int, int]) -> Any:
        epoch, sample = request
        with _own_randomness(sample_seed(self._seed, epoch, sample)):
            return self._dataset[sample]


@contextlib.contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])


def _ignore_interrupts(_worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the training decides when its workers end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _loader(reader: _Reader, requests: _Requests, loading: Loading) -> DataLoader[Any]:
    if loading.workers == 0:
        return DataLoader(reader, batch_sampler=requests, collate_fn=list, generator=torch.Generator())
    return DataLoader(
        reader,
        batch_sampler=requests,
        collate_fn=list,
        generator=torch.Generator(),
        num_workers=loading.workers,
        persistent_workers=True,
        prefetch_factor=loading.prefetch,
        multiprocessing_context=loading.start,
        worker_init_fn=_ignore_interrupts,
    )
