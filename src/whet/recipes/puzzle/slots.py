"""Slots: each position in the global batch keeps its puzzle and the model's states for several steps.

A puzzle stays in its slot until the model halts it or the maximum number of steps is reached. Until then, the rows that
the data provides for this position in the batch are ignored.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError

_MASK = 0xFFFFFFFF
# Multiplier of a common 32-bit integer hash. It has 27 bits, so products stay below 2^63.
_MULTIPLIER = 0x45D9F3B

_Number = TypeVar("_Number", int, Tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotInput:
    """Rows of data for consecutive slots, starting with `first`."""

    first: int
    inputs: Tensor
    labels: Tensor
    puzzles: Tensor

    @property
    def slots(self) -> slice:
        return slice(self.first, self.first + len(self.inputs))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotBatch:
    """The puzzles of some slots in one step."""

    inputs: Tensor
    labels: Tensor
    puzzles: Tensor
    y: Tensor
    z: Tensor
    """y and z are the states after the previous step, (B, S, W). The model resets them where `is_new`."""
    is_new: Tensor
    """Whether the puzzle was put into its slot in this step, (B,)."""
    steps: Tensor
    """Number of steps that each puzzle has been through, (B,)."""


class Slots(nn.Module):
    """The state of all slots, in buffers, so that checkpoints contain it and it can be restored after a trial step."""

    is_averaged = False
    is_memory = True

    halted: Tensor
    steps: Tensor
    age: Tensor
    inputs: Tensor
    labels: Tensor
    puzzles: Tensor
    y: Tensor
    z: Tensor

    def __init__(
        self, number: int, *, length: int, state_shape: tuple[int, int], max_steps: int, exploration: float, seed: int
    ) -> None:
        super().__init__()
        self.max_steps = max_steps
        self._exploration = int(exploration * 2**32)
        self._seed = _hash32(seed & _MASK)
        self.register_buffer("halted", torch.ones(number, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros(number, dtype=torch.int64))
        self.register_buffer("age", torch.zeros(number, dtype=torch.int64))
        self.register_buffer("inputs", torch.zeros(number, length, dtype=torch.int64))
        self.register_buffer("labels", torch.zeros(number, length, dtype=torch.int64))
        self.register_buffer("puzzles", torch.zeros(number, dtype=torch.int64))
        self.register_buffer("y", torch.zeros(number, *state_shape))
        self.register_buffer("z", torch.zeros(number, *state_shape))

    @torch.no_grad()
    def load(self, offered: SlotInput) -> SlotBatch:
        """Return the puzzles of this step. Halted slots get the offered rows."""
        if offered.slots.stop > len(self.halted):
            raise WhetError(
                "the batch has more puzzles than the model has slots",
                got=f"{offered.slots.stop} puzzles, {len(self.halted)} slots",
                try_="global_batch_size=N, a number: it determines the slots",
            )
        at, is_new = offered.slots, self.halted[offered.slots].clone()
        return SlotBatch(
            inputs=torch.where(is_new[:, None], offered.inputs, self.inputs[at]),
            labels=torch.where(is_new[:, None], offered.labels, self.labels[at]),
            puzzles=torch.where(is_new, offered.puzzles, self.puzzles[at]),
            # Clone, because `store` overwrites the buffers before the backward pass.
            y=self.y[at].clone(),
            z=self.z[at].clone(),
            is_new=is_new,
            steps=torch.where(is_new, 0, self.steps[at]),
        )

    @torch.no_grad()
    def store(self, first: int, batch: SlotBatch, *, y: Tensor, z: Tensor, halt: Tensor) -> None:
        """Store the puzzles and states after a step, in the slots from `first` on.

        A slot becomes free if `halt` is above 0 or its puzzle has reached the maximum number of steps.
        """
        at, steps = slice(first, first + len(batch.steps)), batch.steps + 1
        # A slot halts at the maximum number of steps, or if the model halts it after its random minimum.
        is_done = steps >= self.max_steps
        if self.max_steps > 1:
            is_done = (is_done | (halt > 0)) & (steps >= self._min_steps(first, self.age[at]))
        self.halted[at] = is_done
        self.steps[at] = steps
        self.age[at] += 1
        self.inputs[at] = batch.inputs
        self.labels[at] = batch.labels
        self.puzzles[at] = batch.puzzles
        self.y[at] = y
        self.z[at] = z

    def _min_steps(self, first: int, age: Tensor) -> Tensor:
        """Return the minimum number of steps: 2 to max_steps for some puzzles, so that late steps are trained too.

        This is the halting exploration of the official implementation. The random numbers depend only on the index and
        age of the slot, so they do not depend on micro-batches, interruptions or devices.
        """
        slot = torch.arange(first, first + len(age), device=age.device)
        drawn = _hash32(_hash32(slot + self._seed) + age)
        min_steps = 2 + _hash32(drawn) % (self.max_steps - 1)
        return torch.where(drawn < self._exploration, min_steps, 0)


def _hash32(number: _Number) -> _Number:
    """Return a 32-bit hash. All products fit into int64, because overflow behaves differently on some devices."""
    for _ in range(2):
        number = number & _MASK
        number = ((number >> 16) ^ number) * _MULTIPLIER
    number = number & _MASK
    return (number >> 16) ^ number
