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


# --- for checkpoints -------------------------------------------------------------------------------------------------


def capture_rng(device: AbstractDevice) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of all generators as tensors and plain JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "rng/torch": torch.get_rng_state(),
        "rng/python": torch.tensor(words, dtype=torch.int64),
        "rng/numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    if device.generator is not None:
        tensors[f"rng/{device.kind}"] = device.generator.get_state()
    facts = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"name": name, "position": position, "has_gauss": has_gauss, "cached": cached},
    }
    return tensors, facts


def restore_rng(tensors: dict[str, Tensor], facts: dict[str, Any], device: AbstractDevice) -> None:
    """Restore all generators. The generator of a device is restored only on the same kind of device."""
    python, numpy = facts["python"], facts["numpy"]
    random.setstate((python["version"], tuple(tensors["rng/python"].tolist()), python["gauss"]))
    keys = tensors["rng/numpy"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    own = tensors.get(f"rng/{device.kind}")
    if own is not None and device.generator is not None:
        device.generator.set_state(own)
    # Restore torch's CPU generator last, because the calls above may draw from it.
    torch.set_rng_state(tensors["rng/torch"])


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
    """Whether two states of `get_host_rng` are equal."""
    return ours[0] == theirs[0] and _comparable(ours[1]) == _comparable(theirs[1])


def _comparable(numpy_state: Any) -> tuple[Any, ...]:
    words = numpy_state["state"]
    return words["key"].tobytes(), words["pos"], numpy_state["has_gauss"], numpy_state["gauss"]
