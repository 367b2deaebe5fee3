"""A global batch, its pieces, and the place in the data where a run stands."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from whet.data.ragged import Packed, Padded, Put, moved

Field = Tensor | Padded | Packed
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """How much data the optimizer has consumed: whole epochs, and samples of the one it is in."""

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalBatch:
    """The samples of one optimizer step."""

    ids: np.ndarray
    """Sample ids; running numbers for a stream."""
    after: Position
    """Where the run stands once the optimizer has consumed this batch."""
    is_last_of_epoch: bool
    samples: tuple[Any, ...] = ()
    """The samples themselves, where they had to be read one by one; those that this process computes."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Micro:
    """The part of a global batch that goes through the model at once: what a loss function receives.

    Fields have the names of your data (`micro.tokens`, `micro["label"]`), or x and y for a pair of tensors; they can
    also be unpacked in order: `x, y = micro`.
    """

    fields: Mapping[str, Field]
    ids: np.ndarray
    first_place: int | None = 0
    """Where its first sample lies in the global batch, the others behind it; None where they lie apart.

    For a model that keeps something between steps for each place of the batch, however the batch is cut.
    """
    counts: bool = True
    """False for one that is computed only because other processes wait for it: it weighs nothing."""
    is_there: bool = False
    """On the device already: nothing has to be moved."""

    def moved(self, put: Put) -> "Micro":
        """The same, with every tensor moved."""
        fields = {name: moved(name, field, put) for name, field in self.fields.items()}
        return Micro(fields=fields, ids=self.ids, first_place=self.first_place, counts=self.counts)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.fields[name]
        except KeyError:
            raise AttributeError(f"this data has no field {name!r}; it has {', '.join(self.fields)}") from None

    def __getitem__(self, key: str | int) -> Any:
        return self.fields[key] if isinstance(key, str) else tuple(self.fields.values())[key]

    def __iter__(self) -> Any:
        return iter(self.fields.values())

    def __len__(self) -> int:
        return len(self.ids)


def shapes_of(micro: Micro) -> Shapes:
    """The shapes of all fields: what decides whether a device must compile anew."""
    return tuple(tuple(f.shape if isinstance(f, Tensor) else f.values.shape) for f in micro.fields.values())
