"""Map-style datasets: samples read one by one, here or by workers, each with randomness of its own."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import numpy as np

from whet.data.batch import GlobalBatch, Micro, Position
from whet.data.cut import Lengths
from whet.data.sample import Reader, digest_of
from whet.data.share import Share
from whet.data.source import AbstractSource, micros_of_samples, ordered_batches
from whet.data.workers import Planned, Workers

_SAMPLES_IN_FINGERPRINT = 8


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
        share: Share | None = None,
    ) -> None:
        self.num_samples: int = len(dataset)
        self._planned = partial(
            ordered_batches, self.num_samples, global_batch_size=global_batch_size, seed=seed, shuffle=shuffle
        )
        self._share = share or Share()
        self._to_read = self._planned if self._share.size == 1 else partial(_of_share, self._planned, self._share)
        self._read = Reader(dataset, seed)
        self._ragged: set[str] = set()
        self._fingerprint: tuple[str | None] | None = None
        self._loading = loading or Loading()
        self.workers = self._make_workers(self._loading.workers) if self._loading.workers else None

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        read = self._read_here if self.workers is None else self.workers.batches
        for (ids, after, is_last), samples in zip(self._planned(position), read(position), strict=True):
            yield GlobalBatch(ids=ids, after=after, is_last_of_epoch=is_last, samples=tuple(samples))

    def _read_here(self, position: Position) -> Iterator[list[Any]]:
        for ids, _, _ in self._to_read(position):
            # A sample is asked for with its epoch, so that its randomness is known wherever it is read.
            yield [self._read((position.epoch, int(sample))) for sample in ids]

    def micros(self, batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
        return micros_of_samples(batch, micro_batch=micro_batch, how=how, ragged=self._ragged, share=self._share)

    def fingerprint(self) -> str | None:
        """Of a few samples spread over the data; None for data that gives another sample each time it is asked."""
        if self._fingerprint is None:
            parts = _SAMPLES_IN_FINGERPRINT - 1
            chosen = sorted({(self.num_samples - 1) * part // parts for part in range(parts + 1)})
            self._fingerprint = (self._look_at(chosen) if self.num_samples else None,)
        return self._fingerprint[0]

    def _look_at(self, ids: list[int]) -> str | None:
        if self._loading.workers:
            found = self._make_workers(1).looked_at(ids)
        else:
            found = [digest_of(self._read((0, number))) for number in (*ids, ids[0])]
        is_same_again = found is not None and found[-1] == found[0]
        known = [str(self.num_samples).encode(), *(found or ())]
        return hashlib.sha256(b"".join(known)).hexdigest() if is_same_again else None

    def _make_workers(self, count: int) -> Workers:
        how = self._loading
        return Workers(self._read, self._to_read, count=count, start=how.start, prefetch=how.prefetch)

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Workers that were lost since the last time."""
        if self.workers is None:
            return []
        told, self.workers.news = self.workers.news, []
        return told

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()


def _of_share(planned: Planned, share: Share, position: Position) -> Iterator[tuple[np.ndarray, Position, bool]]:
    """Of each global batch what this process computes: the rest is read elsewhere."""
    for ids, after, is_last in planned(position):
        yield ids[share.of(len(ids)).places], after, is_last
