"""Reading a stream one batch ahead."""

import pytest

from whet.data.batch import Position
from whet.data.read_ahead import StreamedBatch, read_ahead

pytestmark = pytest.mark.torch


def read_from(samples: str, position: Position, *, size: int = 3) -> list[StreamedBatch[str]]:
    consumed = [position.samples]

    def read(start: int) -> str | None:
        assert start == consumed[0], "it is read in order"
        batch = samples[start : start + size]
        consumed[0] += len(batch)
        return batch or None

    first = read(position.samples)
    return list(read_ahead(first, read, position, length=len, state=lambda: {"consumed": consumed[0]}))


def test_the_last_batch_ends_the_epoch() -> None:
    read = read_from("abcdefgh", Position(epoch=4))
    assert [batch.data for batch in read] == ["abc", "def", "gh"]
    assert [(batch.start, batch.end) for batch in read] == [(0, 3), (3, 6), (6, 8)]
    assert [batch.is_last for batch in read] == [False, False, True]
    assert [batch.after for batch in read] == [
        Position(epoch=4, samples=3),
        Position(epoch=4, samples=6),
        Position(epoch=5),
    ]


def test_the_state_does_not_include_the_batch_that_was_read_ahead() -> None:
    assert [batch.state["consumed"] for batch in read_from("abcdefgh", Position())] == [3, 6, 8]


def test_a_resumed_epoch_begins_at_its_position() -> None:
    whole = read_from("abcdefgh", Position())
    assert read_from("abcdefgh", Position(samples=3)) == whole[1:]
    assert read_from("abc", Position(samples=3)) == []
