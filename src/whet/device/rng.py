"""State of every random number generator that training draws from: torch (CPU and device), Python, NumPy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice


def capture_rng(device: AbstractDevice) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of all generators, as tensors and plain JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    tensors = {
        "randomness/torch": torch.get_rng_state(),
        "randomness/python": torch.tensor(words, dtype=torch.int64),
        "randomness/numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
    }
    own = device.rng_state()
    if own is not None:
        tensors[f"randomness/{device.kind}"] = own
    facts = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"name": name, "position": position, "has_gauss": has_gauss, "cached": cached},
    }
    return tensors, facts


def restore_rng(tensors: dict[str, Tensor], facts: dict[str, Any], device: AbstractDevice) -> None:
    """Puts all generators back; a device's own only on the same kind of device."""
    python, numpy = facts["python"], facts["numpy"]
    random.setstate((python["version"], tuple(tensors["randomness/python"].tolist()), python["gauss"]))
    keys = tensors["randomness/numpy"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    own = tensors.get(f"randomness/{device.kind}")
    if own is not None:
        device.set_rng_state(own)
    torch.set_rng_state(tensors["randomness/torch"])


@contextmanager
def preserve_rng(device: AbstractDevice) -> Iterator[None]:
    """Puts every generator back afterwards, the device's own too: what happens inside draws as if it had not been."""
    torchs, hosts = get_torch_rng(device), get_host_rng()
    try:
        yield
    finally:
        set_torch_rng(torchs, device)
        set_host_rng(hosts)


# --- in memory, for a moment; nothing here asks for more memory when it puts them back ------------------------------


def get_torch_rng(device: AbstractDevice) -> tuple[Tensor, Tensor | None]:
    """torch's generators as they are: the CPU's, and the device's own if it has one."""
    return torch.get_rng_state(), device.rng_state()


def set_torch_rng(states: tuple[Tensor, Tensor | None], device: AbstractDevice) -> None:
    """Puts torch's generators back."""
    torch.set_rng_state(states[0])
    if states[1] is not None:
        device.set_rng_state(states[1])


def get_host_rng() -> tuple[Any, Any]:
    """Python's and numpy's generators as they are."""
    return random.getstate(), np.random.get_state(legacy=False)


def set_host_rng(states: tuple[Any, Any]) -> None:
    """Puts Python's and numpy's generators back."""
    random.setstate(states[0])
    np.random.set_state(states[1])


def host_rng_equal(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    """Whether two states of `get_host_rng` are the same."""
    return ours[0] == theirs[0] and _comparable(ours[1]) == _comparable(theirs[1])


def _comparable(numpy_state: Any) -> tuple[Any, ...]:
    words = numpy_state["state"]
    return words["key"].tobytes(), words["pos"], numpy_state["has_gauss"], numpy_state["gauss"]


def seed_everything(seed: int) -> None:
    """Sets every generator to a known state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
