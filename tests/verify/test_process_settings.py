"""Settings of the process: which of them count as changes by the user's program."""

import sys

import pytest

from whet.verify.process_settings import process_settings

pytestmark = pytest.mark.torch


def recursion_limit() -> object:
    return dict(process_settings())["sys.getrecursionlimit()"]


def test_the_recursion_limit_that_the_compiler_sets_is_no_change() -> None:
    """torch.compile raises it to 2,000 in the first step of a compiled model."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(1_000)
        before = recursion_limit()
        sys.setrecursionlimit(2_000)
        assert recursion_limit() == before
        sys.setrecursionlimit(2_500)
        assert recursion_limit() != before
    finally:
        sys.setrecursionlimit(limit)
