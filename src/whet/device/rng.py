"""Save, restore and seed the random number generators of torch (CPU and device), Python and NumPy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice


def seed_everything(seed: int) -> None:
    """Seed the generators of torch (on all devices), Python and NumPy."""
    random.seed(seed)
    # NumPy accepts only 32-bit seeds.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def preserve_rng(device: AbstractDevice) -> Iterator[None]:
    """Restore the generators of torch, Python, NumPy and the device on exit."""
    torch_states, host_states = get_torch_rng(device), get_host_rng()
    try:
        yield
    finally:
        set_torch_rng(torch_states, device)
        set_host_rng(host_states)


# --- saving and restoring in memory ----------------------------------------------------------------------------------
# Restoring these states allocates no memory, so it works after an out-of-memory error.


def get_torch_rng(device: AbstractDevice) -> tuple[Tensor, Tensor | None]:
    """Return the states of torch's CPU generator and of the device's generator. The second is None if it has none."""
    return torch.get_rng_state(), None if device.generator is None else device.generator.get_state()


def set_torch_rng(states: tuple[Tensor, Tensor | None], device: AbstractDevice) -> None:
    """Restore the generator states that `get_torch_rng` returned."""
    torch.set_rng_state(states[0])
    if states[1] is not None and device.generator is not None:
        device.generator.set_state(states[1])


def get_host_rng() -> tuple[Any, Any]:
    """Return the states of the global generators of Python and NumPy."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_host_rng(states: tuple[Any, Any]) -> None:
    """Restore the generator states that `get_host_rng` returned."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def host_rng_equal(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    """Return whether two results of `get_host_rng` are equal."""
    return ours[0] == theirs[0] and _comparable(ours[1]) == _comparable(theirs[1])


def _comparable(numpy_state: Any) -> tuple[Any, ...]:
    words = numpy_state["state"]
    if numpy_state["bit_generator"] != "MT19937":
        return (repr(numpy_state),)
    return words["key"].tobytes(), words["pos"], numpy_state["has_gauss"], numpy_state["gauss"]
