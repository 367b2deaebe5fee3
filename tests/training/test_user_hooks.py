"""Hooks of the user that are added or removed are named; those of libraries are not."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from whet.training.user_hooks import HookWatch, hook_parts

pytestmark = pytest.mark.torch


def halve(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def shrink(gradient: Tensor) -> Tensor:
    return gradient * 0.1


class Decay:
    """An object as a hook, with a method as another."""

    def __call__(self, *_: Any) -> None: ...

    def reset(self, *_: Any) -> None: ...


@pytest.fixture
def run() -> Any:
    """The parts of a run that may have hooks; one of its modules is registered too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    registered = SimpleNamespace(objects={"head": nn.Linear(1, 1), "first": model[0]})
    return SimpleNamespace(model=model, steppers={"": SimpleNamespace(optimizer=optimizer)}, registered=registered)


CHANGES: list[tuple[Callable[[Any], object], list[str]]] = [
    (lambda run: run.model.register_forward_hook(halve), ["`halve`, a hook of the model, was added"]),
    (lambda run: run.model[0].register_forward_hook(halve), ["`halve`, a hook of 0, was added"]),
    (lambda run: run.model[1].bias.register_hook(shrink), ["`shrink`, a hook of 1.bias, was added"]),
    (
        lambda run: run.steppers[""].optimizer.register_step_post_hook(Decay().reset),
        ["`reset`, a hook of SGD, was added"],
    ),
    (
        lambda run: run.registered.objects["head"].register_forward_hook(Decay()),
        ["`self`, a hook of the registered head, was added"],
    ),
    (lambda run: prune.random_unstructured(run.model[1], "weight", 0.5), []),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES)
def test_an_added_hook_is_named_once(run: Any, change: Callable[[Any], object], expected: list[str]) -> None:
    watch = HookWatch(run)
    watch.accept()
    change(run)
    assert [*watch.changes()] == expected
    watch.accept()
    assert [*watch.changes()] == [], "it was there in the first step"


def test_a_removed_hook_is_named(run: Any) -> None:
    handle = run.model.register_forward_hook(halve)
    watch = HookWatch(run)
    watch.accept()
    handle.remove()
    assert [*watch.changes()] == ["`halve`, a hook of the model, was removed"]


def test_the_hooks_of_a_replaced_module_are_named(run: Any) -> None:
    run.model[0].register_forward_hook(halve)
    watch = HookWatch(run)
    watch.accept()
    run.model[0] = copy.deepcopy(run.model[0])
    assert [*watch.changes()] == ["`halve`, a hook of 0, was added"]


def test_a_hook_of_several_modules_is_walked_once(run: Any) -> None:
    for module in run.model:
        module.register_forward_hook(halve)
    assert [*hook_parts(run)] == [("a hook of 0", [("halve", halve)])]
