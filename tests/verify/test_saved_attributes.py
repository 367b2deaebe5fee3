"""Attributes that a state_dict leaves out are found, without changing the object."""

import time
from collections import deque
from typing import Any

import pytest
import torch

from whet.verify.saved_attributes import SavedAttributes

pytestmark = pytest.mark.torch


class Holder:
    def __init__(self) -> None:
        self.counts, self.hidden = {"a": [1, 2], "b": 3}, 0
        self.mean, self.is_warm, self.ratio = torch.zeros(2), False, float("inf")
        self.inner = Inner()
        self.derived = 5
        self.recent = deque([1.0])

    def state_dict(self) -> dict[str, Any]:
        return {
            "first": self.counts["a"],
            "mean": self.mean.clone(),
            "is_warm": self.is_warm,
            "ratio": f"{self.ratio:.1f}",
            "inner": {"saved": self.inner.saved},
            "derived": min(self.derived, 9),
            "recent": list(self.recent),
            "time": time.perf_counter(),
        }


class Inner:
    __slots__ = ("lost", "saved")

    def __init__(self) -> None:
        self.saved = self.lost = 0


class Everything:
    """Its state is all of its attributes."""

    def __init__(self) -> None:
        self.a, self.b = 1, [2]

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Deleted(Everything):
    """A copy of it must not be made, because its deletion would be noticed."""

    num_deleted = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def __del__(self) -> None:
        Deleted.num_deleted += 1


def unsaved(obj: Any, *names: str) -> list[str]:
    return SavedAttributes(obj, lambda one: one.state_dict(), prefix="self", known={}).unsaved(names)


@pytest.mark.parametrize(
    ("name", "is_saved"),
    [
        ("self.counts['a'][0]", True),
        ("self.counts['a']", True),
        ("self.counts['b']", False),
        ("self.hidden", False),
        ("self.mean", True),
        ("self.is_warm", True),
        ("self.ratio", True),
        ("self.inner.saved", True),
        ("self.inner.lost", False),
        ("self.derived", True),
        ("self.recent[0]", True),
        ("Holder.total", False),
        ("STATE['calls']", False),
    ],
)
def test_an_attribute_is_part_of_the_state_if_the_state_depends_on_it(name: str, is_saved: bool) -> None:
    holder = Holder()
    before = repr({k: v for k, v in vars(holder).items() if k != "inner"})
    assert unsaved(holder, name) == ([] if is_saved else [name])
    assert repr({k: v for k, v in vars(holder).items() if k != "inner"}) == before
    assert (holder.inner.saved, holder.inner.lost) == (0, 0)


def test_a_state_of_all_attributes_is_complete() -> None:
    assert unsaved(Everything(), "self.a", "self.b[0]", "self.b") == []


def test_an_object_with_a_destructor_is_not_copied() -> None:
    kept = Deleted()
    assert unsaved(kept, "self.a") == []
    assert Deleted.num_deleted == 0
