"""Reading a stream one batch ahead."""

import itertools
from collections.abc import Iterator

import pytest

from whet.base.errors import UsageError
from whet.data.batch import Position
from whet.data.stream_reader import StreamedBatch, StreamReader

pytestmark = pytest.mark.torch


class Letters:
    """A stream of letters that counts how many were read."""

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.consumed = 0

    def __iter__(self) -> Iterator[str]:
        while self.consumed < len(self.letters):
            self.consumed += 1
            yield self.letters[self.consumed - 1]

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self.consumed = state["consumed"]


def reader_of(letters: str) -> StreamReader[str]:
    stream = Letters(letters)

    def read(iterator: Iterator[str], epoch: int, start: int, limit: int | None) -> str | None:
        return "".join(itertools.islice(iterator, min(3, limit or 3))) or None

    return StreamReader(stream, iterate=lambda _: iter(stream), read=read, length=len)


def test_the_last_batch_ends_the_epoch() -> None:
    read = list(reader_of("abcdefgh").batches(Position(epoch=4)))
    assert [batch.data for batch in read] == ["abc", "def", "gh"]
    assert [(batch.start, batch.end) for batch in read] == [(0, 3), (3, 6), (6, 8)]
    assert [batch.is_last for batch in read] == [False, False, True]
    assert [batch.after for batch in read] == [
        Position(epoch=4, samples=3),
        Position(epoch=4, samples=6),
        Position(epoch=5),
    ]


def test_the_state_does_not_include_the_batch_that_was_read_ahead() -> None:
    reader = reader_of("abcdefgh")
    assert [reader.state["consumed"] for _ in reader.batches(Position())] == [3, 6, 8]


def test_a_resumed_epoch_begins_at_its_position() -> None:
    whole = list(reader_of("abcdefgh").batches(Position()))
    assert list(reader_of("abcdefgh").batches(Position(samples=3))) == whole[1:]
    assert list(reader_of("abc").batches(Position(samples=3))) == []


def test_a_restored_stream_skips_nothing() -> None:
    reader = reader_of("abcdefgh")
    reader.load_state({"consumed": 3})
    rest: list[StreamedBatch[str]] = list(reader.batches(Position(samples=3)))
    assert [batch.data for batch in rest] == ["def", "gh"]


def test_a_stream_that_can_be_read_only_once_is_named() -> None:
    letters = iter("abc")
    reader = StreamReader(
        letters, iterate=lambda _: letters, read=lambda iterator, *_: next(iterator, None), length=len
    )
    assert len(list(reader.batches(Position()))) == 3
    with pytest.raises(UsageError, match=r"the data is used up after epoch 1\n.*\n.*a new pass over the samples"):
        next(reader.batches(Position(epoch=1)))
