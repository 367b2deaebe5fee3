"""Read batches from an iterable in its own order, from any position, one batch ahead."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from whet.base.errors import UsageError
from whet.data.batch import Position

T = TypeVar("T")


@runtime_checkable
class StatefulIterable(Protocol):
    """An iterable that can save and restore its position."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedBatch(Generic[T]):
    """A batch from a stream, and its place in the epoch."""

    data: T
    start: int
    end: int
    after: Position
    """The position after the optimizer has consumed this batch."""
    is_last: bool
    """Whether it is the last batch of the epoch."""


class StreamReader(Generic[T]):
    """Reads an iterable, such as a stream of samples, a DataLoader or a sampler, and saves its state.

    A resume restores the state of the iterable. If it has none, the consumed batches are read again and dropped, which
    is exact if the order is fixed.
    """

    def __init__(
        self,
        iterable: Any,
        *,
        iterate: Callable[[int], Iterator[Any]],
        read: Callable[[Iterator[Any], int, int, int | None], T | None],
        length: Callable[[T], int],
        epoch_owners: tuple[Any, ...] | None = None,
    ) -> None:
        """Initialize a reader of `iterable`.

        Args:
            iterate: Returns a new iterator for an epoch.
            read: Returns the next batch, or None at the end: read(iterator, epoch, number of its first sample, limit).
                The limit is the number of samples still to skip, or None if there are none.
            length: Returns the number of samples of a batch.
            epoch_owners: The objects whose `set_epoch` is called; by default the iterable.
        """
        self._epoch_owners = epoch_owners or (iterable,)
        self._iterable, self._iterate, self._read, self._length = iterable, iterate, read, length
        self.has_state = isinstance(iterable, StatefulIterable)
        self.state = self._current_state()
        """The state after the batch that was yielded last, not including the batch that was read ahead."""
        self._restored: dict[str, Any] | None = None

    def load_state(self, state: dict[str, Any]) -> None:
        """Set the state from which the next epoch continues."""
        if state and self.has_state:
            self._iterable.load_state_dict(copy.deepcopy(state))
            self.state = self._restored = state

    def batches(self, position: Position) -> Iterator[StreamedBatch[T]]:
        """Yield the batches of an epoch that remain after `position`."""
        epoch, start = position.epoch, position.samples
        for owner in self._epoch_owners:
            set_epoch(owner, epoch)
        restored, self._restored = self._restored, None
        if restored is not None:
            # Load the state again, because set_epoch may have moved the stream to the start of the epoch.
            self._iterable.load_state_dict(copy.deepcopy(restored))
        iterator = self._iterate(epoch)
        skipped = 0 if restored is None else start
        while skipped < start and (batch := self._read(iterator, epoch, skipped, start - skipped)) is not None:
            skipped += self._length(batch)
        ahead = self._read(iterator, epoch, start, None)
        if ahead is None and restored is not None and start == 0:
            # Some streams save the end of an epoch as their state and need a new iterator for the next epoch.
            iterator = self._iterate(epoch)
            ahead = self._read(iterator, epoch, start, None)
        if ahead is None and start == 0:
            what = "the data is empty" if epoch == 0 else f"the data is used up after epoch {epoch:,}"
            got = f"{type(self._iterable).__name__} without samples"
            raise UsageError(what, got=got, try_="data whose __iter__ starts a new pass over the samples each time")
        while ahead is not None:
            # Reading ahead shows which batch is the last, so save the state before it. At the end of an epoch, save it
            # afterward, because it may contain the epoch number.
            saved, end = self._current_state(), start + self._length(ahead)
            current, ahead = ahead, self._read(iterator, epoch, end, None)
            is_last = ahead is None
            self.state = self._current_state() if is_last else saved
            after = Position(epoch=epoch + 1) if is_last else Position(epoch=epoch, samples=end)
            yield StreamedBatch(data=current, start=start, end=end, after=after, is_last=is_last)
            start = end

    def _current_state(self) -> dict[str, Any]:
        return copy.deepcopy(self._iterable.state_dict()) if self.has_state else {}


def set_epoch(sampler: Any, epoch: int) -> None:
    """Call `set_epoch` on a sampler or stream if it has this method."""
    for owner in (sampler, getattr(sampler, "sampler", None)):
        begin = getattr(owner, "set_epoch", None)
        if callable(begin):
            begin(epoch)
