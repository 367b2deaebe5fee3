"""State of the random number generators of torch (CPU and device), Python and NumPy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice


def seed_everything(seed: int) -> None:
    """Seed all generators."""
    random.seed(seed)
    # NumPy accepts 32-bit seeds only.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def preserve_rng(device: AbstractDevice) -> Iterator[None]:
    """Restore every generator on exit, including that of the device."""
    torch_states, host_states = get_torch_rng(device), get_host_rng()
    try:
        yield
    finally:
        set_torch_rng(torch_states, device)
        set_host_rng(host_states)


# --- in memory -------------------------------------------------------------------------------------------------------
# Restoring allocates nothing, so it works after an out-of-memory error.


def get_torch_rng(device: AbstractDevice) -> tuple[Tensor, Tensor | None]:
    """Return the state of torch's generators: that of the CPU, and that of the device if it has one."""
    return torch.get_rng_state(), None if device.generator is None else device.generator.get_state()


def set_torch_rng(states: tuple[Tensor, Tensor | None], device: AbstractDevice) -> None:
    """Restore torch's generators."""
    torch.set_rng_state(states[0])
    if states[1] is not None and device.generator is not None:
        device.generator.set_state(states[1])


def get_host_rng() -> tuple[Any, Any]:
    """Return the state of the generators of Python and NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_host_rng(states: tuple[Any, Any]) -> None:
    """Restore the generators of Python and NumPy."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def host_rng_equal(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    """Return whether two states of `get_host_rng` are equal."""
    return ours[0] == theirs[0] and _comparable(ours[1]) == _comparable(theirs[1])


def _comparable(numpy_state: Any) -> tuple[Any, ...]:
    words = numpy_state["state"]
    return words["key"].tobytes(), words["pos"], numpy_state["has_gauss"], numpy_state["gauss"]
