"""Iterables: they keep their own order. Resuming reads on from their own state, or skips what was consumed."""

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, final, runtime_checkable

import numpy as np

from whet.base.errors import UsageError
from whet.data.batch import GlobalBatch, Micro, Position
from whet.data.cut import Lengths
from whet.data.share import Share
from whet.data.source import AbstractSource, micros_of_samples


@runtime_checkable
class Stateful(Protocol):
    """An iterable that can say where it stands."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@final
class Stream(AbstractSource):
    num_samples = None

    def __init__(self, samples: Iterable[Any], *, global_batch_size: int, share: Share | None = None) -> None:
        self._samples = samples
        self._share = share or Share()
        self._global_batch_size = global_batch_size
        self._is_restored = False
        self._ragged: set[str] = set()
        self._state: dict[str, Any] = {}
        self.is_exact = isinstance(samples, Stateful)

    def batches(self, position: Position) -> Iterator[GlobalBatch]:
        iterator = iter(self._samples)
        if not self._is_restored:
            # Without a state the consumed samples are read again and dropped: exact if the order is the same again.
            next(itertools.islice(iterator, position.samples, position.samples), None)
        self._is_restored = False
        start = position.samples
        ahead = self._read(iterator)
        while ahead:
            # Whether a batch is the last shows only behind it; the state is the one before that look.
            state = copy.deepcopy(self._samples.state_dict()) if isinstance(self._samples, Stateful) else {}
            batch, ahead = ahead, self._read(iterator)
            # Behind the last batch the next epoch begins anew: a state would say that everything was read.
            self._state = state if ahead else {}
            end = start + len(batch)
            after = Position(epoch=position.epoch, samples=end) if ahead else Position(epoch=position.epoch + 1)
            # Every process reads all of it: an iterable cannot be asked for a part.
            mine = (
                batch if self._share.size == 1 else tuple(batch[place] for place in self._share.of(len(batch)).places)
            )
            yield GlobalBatch(ids=np.arange(start, end), after=after, is_last_of_epoch=not ahead, samples=mine)
            start = end
        if start == 0:
            raise UsageError("the data is empty", got="an iterable without samples", try_="data that can be read again")

    def state(self) -> dict[str, Any]:
        return self._state

    def load_state(self, state: dict[str, Any]) -> None:
        if state and isinstance(self._samples, Stateful):
            self._samples.load_state_dict(state)
            self._is_restored = True

    def _read(self, iterator: Iterator[Any]) -> tuple[Any, ...]:
        return tuple(itertools.islice(iterator, self._global_batch_size))

    def micros(self, batch: GlobalBatch, *, micro_batch: int, how: Lengths) -> Iterator[Micro]:
        return micros_of_samples(batch, micro_batch=micro_batch, how=how, ragged=self._ragged, share=self._share)
