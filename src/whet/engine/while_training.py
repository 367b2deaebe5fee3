"""What holds while a run trains, and is put back afterwards."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def compiled(model: nn.Module) -> Iterator[None]:
    """The model's calls go through torch.compile for a while; the object stays the same."""
    model.compile()
    try:
        yield
    finally:
        model._compiled_call_impl = None


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
