"""Read a stream one batch ahead, to know which batch is the last of its epoch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from whet.data.batch import Position

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedBatch(Generic[T]):
    """A batch of a stream and its place in the epoch."""

    data: T
    start: int
    end: int
    after: Position
    """The position once the optimizer has consumed this batch."""
    is_last: bool
    """Whether it is the last batch of the epoch."""
    state: dict[str, Any]
    """The state of the stream after this batch, without the batch that was read ahead."""


def read_ahead(
    first: T | None,
    read: Callable[[int], T | None],
    position: Position,
    *,
    length: Callable[[T], int],
    state: Callable[[], dict[str, Any]],
) -> Iterator[StreamedBatch[T]]:
    """Yield the batches of an epoch from `position`. `first` is the first of them; None if there is none.

    `read(start)` returns the batch whose first sample is number `start`, or None at the end of the epoch.
    """
    ahead, start = first, position.samples
    while ahead is not None:
        # Save the state first: it must not include the batch that is read ahead.
        saved = state()
        end = start + length(ahead)
        batch, ahead = ahead, read(end)
        is_last = ahead is None
        after = Position(epoch=position.epoch + 1) if is_last else Position(epoch=position.epoch, samples=end)
        yield StreamedBatch(data=batch, start=start, end=end, after=after, is_last=is_last, state=saved)
        start = end
