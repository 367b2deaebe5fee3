"""When may Python look for garbage? Not while steps are made: a full pass takes longer than a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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


def set_aside() -> None:
    """What is there by now, and no garbage, is passed over as well until `no_garbage_collection` ends."""
    gc.collect()
    gc.freeze()
