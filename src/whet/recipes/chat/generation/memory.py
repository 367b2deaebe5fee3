"""What was read before? Keys and values of all earlier places, for each attention that a token passes through.

A recursive model uses the same weights many times, but each time on other states: every application has keys and values
of its own. Nothing else has to be remembered, since a place's states begin anew from the same vectors.
"""

import torch
from torch import Tensor


class KeyValues:
    """Room for `num_places` places of rows of one batch. Rows may stand at different places."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._next = 0
        self._positions: Tensor | None = None
        self._num_keys = 0

    def expect(self, positions: Tensor, *, num_keys: int) -> None:
        """Before a forward pass: the places of its tokens, (B, S), and how many places are looked at."""
        self._positions, self._num_keys = positions, num_keys
        self._next = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the next attention: new places are written, and all that may be looked at are given."""
        assert self._positions is not None
        if self._next == len(self._kept):
            self._kept.append((self._room(keys), self._room(values)))
        kept = self._kept[self._next]
        self._next += 1
        where = self._positions[:, None, :, None].expand_as(keys)
        for room, new in zip(kept, (keys, values), strict=True):
            room.scatter_(2, where, new)
        return kept[0][:, :, : self._num_keys], kept[1][:, :, : self._num_keys]

    def keep(self, rows: Tensor) -> None:
        """Goes on with these rows alone."""
        self._kept = [(keys[rows], values[rows]) for keys, values in self._kept]

    @property
    def num_attentions(self) -> int:
        """How many keys and values there are for each place."""
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """What all of it takes."""
        return sum(t.numel() * t.element_size() for pair in self._kept for t in pair)

    def _room(self, like: Tensor) -> Tensor:
        rows, heads, _, size = like.shape
        # Zero, not empty: a place that is masked counts nothing, unless it happens to hold a NaN.
        return torch.zeros(rows, heads, self._num_places, size, dtype=like.dtype, device=like.device)
