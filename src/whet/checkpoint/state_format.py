"""The format of an encoded state: JSON and named tensors. Nothing is pickled.

value                                 JSON
None, bool, int, str, list            unchanged
a finite float                        unchanged: the shortest text that reads back as the same bits
nan, inf, -inf                        {"$": "float", "value": "inf"}
a dict with str keys                  unchanged, plus the key "$order" unless its keys are sorted, as a file sorts them
any other dict                        {"$": "dict", "items": [[key, value], ...]}
tuple, set, deque, bytes, ...         {"$": its type, ...}
torch.Generator, random.Random, ...   {"$": its type, "state": ...}
the same list, dict, generator again  {"$": "again", "of": its id}. The first has the id: a dict under the key "$id",
                                      a list in front of its items, as {"$": "id", "value": its id}
a tensor, stored outside the JSON     {"$": "reference", "name": its path}
the same tensor object again          {"$": "same", "of": the path of the first}
a tensor that shares its memory       {"$": "alias" or "view", "of": the path of the first}
a small tensor, stored in the JSON    {"$": "tensor", "dtype": "F32", "shape": [...], "items": [...]}
"""

import io
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch

TAG, ORDER, ID = "$", "$order", "$id"
FACTORIES: dict[str, Any] = {"None": None} | {t.__name__: t for t in (list, dict, set, int, float, bool, str, tuple)}
_SPAWNED_AT_ONCE = 1_000
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
CHANGEABLE = (
    list, dict, OrderedDict, defaultdict, Counter, set, deque, bytearray, io.BytesIO, np.ndarray, torch.Generator,
    np.random.Generator, np.random.RandomState, random.Random,
)  # fmt: skip
"""Types whose objects are mutable. An object that appears twice in a state is restored as one object."""


def class_name(kind: type) -> str:
    """Return the name by which `find_class` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(name: str, base: type) -> Any:
    """Return a class that the program has already imported, or None. Reading a checkpoint must not import anything."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) and issubclass(value, base) else None


def join_path(path: str, name: object) -> str:
    """Return the path of an entry. No separator is added after a path that ends with "/"."""
    return f"{path}.{name}" if path and not path.endswith("/") else f"{path}{name}"


def seed_of_spawner(generator: np.random.Generator) -> dict[str, Any] | None:
    """Return the state of a generator's seed sequence, or None if it has not spawned other generators.

    NumPy does not include it in the state of the generator.

    >>> seed_of_spawner(np.random.default_rng(0))
    >>> generator = np.random.default_rng(0)
    >>> _ = generator.spawn(2)
    >>> seed_of_spawner(generator)["n_children_spawned"]
    2
    """
    seed = getattr(generator.bit_generator, "seed_seq", None)
    return dict(seed.state) if isinstance(seed, np.random.SeedSequence) and seed.n_children_spawned else None


def missing_children(generator: np.random.Generator, saved: dict[str, Any] | None) -> int | None:
    """Return how many generators must be spawned to match a saved state, or None if the seeds differ."""
    seed = getattr(generator.bit_generator, "seed_seq", None)
    if not isinstance(seed, np.random.SeedSequence):
        return 0 if saved is None else None
    if saved is None:
        return None if seed.n_children_spawned else 0
    is_same = (seed.entropy, seed.spawn_key, seed.pool_size) == (
        saved["entropy"], tuple(saved["spawn_key"]), saved["pool_size"]
    )  # fmt: skip
    missing = int(saved["n_children_spawned"]) - seed.n_children_spawned
    return missing if is_same and missing >= 0 else None


def spawn(generator: np.random.Generator, number: int) -> None:
    """Spawn and discard `number` generators, so that the spawn count of the seed sequence matches the saved one."""
    seed: Any = getattr(generator.bit_generator, "seed_seq", None)
    # Spawn in parts: a run may have spawned one generator per step, and each takes memory.
    for start in range(0, number, _SPAWNED_AT_ONCE):
        seed.spawn(min(_SPAWNED_AT_ONCE, number - start))
