"""What holds while a run trains, and is put back afterwards."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Compiled:
    """A model's calls through torch.compile, to be used for a while; the object stays the same."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = model._compiled_call_impl
        model.compile()
        self._call = model._compiled_call_impl
        model._compiled_call_impl = self._before

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self._model._compiled_call_impl = self._call
        try:
            yield
        finally:
            self._model._compiled_call_impl = self._before


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector out of the steps: a full pass over a large process takes longer than a step.

    What is there already is set aside, so that the passes between epochs look at what is new only.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def deterministic(is_on: bool) -> Iterator[None]:
    """Only kernels that give the same bits each time, if asked for; an operator that has none fails by name."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if is_on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
