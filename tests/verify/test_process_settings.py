"""Settings of the process: which of them count as changes by the user's program."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from whet.verify.hidden_state import StateWalk, changed_names
from whet.verify.process_settings import process_settings, thread_settings

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


@pytest.fixture
def _autocast_settings() -> Iterator[None]:
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    yield
    torch.set_autocast_enabled("cpu", before[0])
    torch.set_autocast_dtype("cpu", before[1])
    torch.set_autocast_cache_enabled(before[2])


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda: torch.set_autocast_enabled("cpu", True), "torch.is_autocast_enabled('cpu')"),
        (lambda: torch.set_autocast_dtype("cpu", torch.float16), "torch.get_autocast_dtype('cpu')"),
        (lambda: torch.set_autocast_cache_enabled(False), "torch.is_autocast_cache_enabled()"),
    ],
)
@pytest.mark.usefixtures("_autocast_settings")
def test_a_setting_of_autocast_is_named(act: Callable[[], None], expected: str) -> None:
    before = dict(dict(thread_settings())["autocast"])
    act()
    after = dict(dict(thread_settings())["autocast"])
    assert [name for name in before if before[name] != after[name]] == [expected]


def test_a_block_of_autocast_is_no_change_of_the_setting() -> None:
    """A loop may enter it around each step; whet compares some steps inside of it and others outside."""
    outside = dict(thread_settings())
    with torch.autocast("cpu"):
        inside = dict(thread_settings())
        assert inside == dict(thread_settings())
    assert outside == dict(thread_settings())
    assert not inside.keys() & outside.keys()


class CountsFunctions(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CountsFunctions.calls += func is torch.sin
        return func(*args, **(kwargs or {}))


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "expected"), [(CountsFunctions, "CountsFunctions.calls"), (CountsOperators, "self.calls")]
)
def test_a_mode_of_torch_that_counts_is_named(kind: Any, expected: str) -> None:
    def digests() -> dict[str, bytes]:
        walk = StateWalk()
        for name, value in dict(thread_settings())[f"the mode {kind.__name__}"]:
            walk.walk(value, name)
        return walk.finish()

    x = torch.zeros(1)
    with kind():
        before = digests()
        assert changed_names(before, digests()) == []
        torch.sin(x)
        assert changed_names(before, digests()) == [expected]
    assert not any("mode" in owner for owner, _ in thread_settings())


def test_a_mode_of_a_library_is_left_out() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cpu"))
        assert [owner for owner, _ in thread_settings()] == ["autocast"]
