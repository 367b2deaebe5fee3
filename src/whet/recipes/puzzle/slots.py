"""Slots: each place of the batch keeps its puzzle, with its states, until the model halts it."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from whet.base.errors import WhetError

_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B

_Number = TypeVar("_Number", int, Tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotInput:
    """Rows of data for slots that lie in a row, from `first` on."""

    first: int
    inputs: Tensor
    labels: Tensor
    puzzles: Tensor

    @property
    def slots(self) -> slice:
        return slice(self.first, self.first + len(self.inputs))


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotBatch:
    """What slots work on in one step."""

    inputs: Tensor
    labels: Tensor
    puzzles: Tensor
    y: Tensor
    z: Tensor
    """Of slots that begin these are what the slot held before: the model begins anew where `is_new`."""
    is_new: Tensor
    steps: Tensor
    """Made so far with this puzzle."""


class Slots(nn.Module):
    """Buffers, so that checkpoints hold them and whoever only tries a step can put them back."""

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
        self, number: int, *, length: int, state_shape: tuple[int, int], most_steps: int, exploration: float, seed: int
    ) -> None:
        super().__init__()
        self.most_steps = most_steps
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
    def held(self, offer: SlotInput) -> SlotBatch:
        """What the slots work on now: halted ones take what is offered."""
        if offer.slots.stop > len(self.halted):
            raise WhetError(
                "the batch has more puzzles than the model has slots",
                got=f"{offer.slots.stop} puzzles, {len(self.halted)} slots",
                try_="global_batch_size=N, a number: slots are made for it",
            )
        at, is_new = offer.slots, self.halted[offer.slots].clone()
        return SlotBatch(
            inputs=torch.where(is_new[:, None], offer.inputs, self.inputs[at]),
            labels=torch.where(is_new[:, None], offer.labels, self.labels[at]),
            puzzles=torch.where(is_new, offer.puzzles, self.puzzles[at]),
            y=self.y[at].clone(),
            z=self.z[at].clone(),
            is_new=is_new,
            steps=torch.where(is_new, 0, self.steps[at]),
        )

    @torch.no_grad()
    def settle(self, first: int, held: SlotBatch, *, y: Tensor, z: Tensor, halt: Tensor) -> None:
        """Keeps what a step has made of the slots from `first` on; those whose `halt` is above 0 are done."""
        at, steps = slice(first, first + len(held.steps)), held.steps + 1
        is_over = steps >= self.most_steps
        if self.most_steps > 1:
            is_over = (is_over | (halt > 0)) & (steps >= self._least_steps(first, self.age[at]))
        self.halted[at] = is_over
        self.steps[at] = steps
        self.age[at] += 1
        self.inputs[at] = held.inputs
        self.labels[at] = held.labels
        self.puzzles[at] = held.puzzles
        self.y[at] = y
        self.z[at] = z

    def _least_steps(self, first: int, age: Tensor) -> Tensor:
        """Now and then a slot must go on, for 2 to all steps, whatever the model says: so it sees late steps too.

        Drawn from the slot's number and age alone, so that neither the cut of a batch nor an interruption nor the
        device changes what is drawn.
        """
        slot = torch.arange(first, first + len(age), device=age.device)
        drawn = _hash32(_hash32(slot + self._seed) + age)
        least = 2 + _hash32(drawn) % (self.most_steps - 1)
        return torch.where(drawn < self._exploration, least, 0)


def _hash32(number: _Number) -> _Number:
    """Well-spread 32 bits; no product is too large for 64 bits, which would be another number on some devices."""
    for _ in range(2):
        number = number & _MASK
        number = ((number >> 16) ^ number) * _MULTIPLIER
    number = number & _MASK
    return (number >> 16) ^ number
