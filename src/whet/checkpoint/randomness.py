"""Every generator a training draws from: torch on the CPU and on the device, Python, numpy."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice


def read_randomness(device: AbstractDevice) -> tuple[dict[str, Tensor], dict[str, Any]]:
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


def restore_randomness(tensors: dict[str, Tensor], facts: dict[str, Any], device: AbstractDevice) -> None:
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
def undisturbed(device: AbstractDevice) -> Iterator[None]:
    """Puts every generator back afterwards, the device's own too: what happens inside draws as if it had not been."""
    tensors, facts = read_randomness(device)
    try:
        yield
    finally:
        restore_randomness(tensors, facts, device)


def seed_randomness(seed: int) -> None:
    """Sets every generator to a known state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
