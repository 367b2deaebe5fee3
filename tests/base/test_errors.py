"""The first line of an exception's message, which an exception need not have."""

import pytest

from whet.base.errors import describe_error, first_line


@pytest.mark.parametrize("message", ["", " ", "\n", "\n\n \n"])
def test_an_exception_without_a_message_is_named(message: str) -> None:
    assert (first_line(ValueError(message)), describe_error(ValueError(message))) == ("ValueError", "ValueError")
    assert (first_line(MemoryError()), describe_error(MemoryError())) == ("MemoryError", "MemoryError")


def test_a_long_message_is_shortened() -> None:
    error = ValueError("\n  first line\nsecond" + "x" * 999)
    assert (first_line(error), describe_error(error)) == ("first line", "ValueError: first line")
    long = ValueError("x" * 999)
    assert (first_line(long, limit=5), len(first_line(long)), len(describe_error(long))) == ("xxxxx", 200, 212)
