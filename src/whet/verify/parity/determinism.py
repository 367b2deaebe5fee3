"""Does the same training give the same bits twice? If not: which tensor differs first?"""

from collections.abc import Mapping

import torch
from torch import Tensor

from whet.base.record import Record
from whet.device.abstract import AbstractDevice
from whet.verify.agreement import Error, errors_by_name
from whet.verify.parity.placing import Bench

STEPS = 3
_WEIGHT = "the weight "
ROUNDING = 1e-4
"""Sums that a GPU takes in a changing order differ by less."""


class Determinism(Record):
    """Two runs of a few steps from the same weights and generators, dropout included."""

    is_same: bool
    steps: int = STEPS
    first: str | None = None
    """What differs first."""
    num_different: int = 0
    num_tensors: int
    error: Error = 0.0
    """The largest relative difference in the step that differs first."""
    is_rounding: bool = False
    """Whether it is the rounding of a GPU that adds in a changing order, as CUDA says it does."""

    @property
    def agrees(self) -> bool:
        return self.is_same or self.is_rounding


def run_twice(bench: Bench, device: AbstractDevice) -> Determinism:
    """A few real steps, twice; bit by bit."""
    ours, theirs = _history(bench, device), _history(bench, device)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        different = [name for name in one if not _same_bits(one[name], other[name])]
        if different:
            error = _difference(one, other)
            return Determinism(
                is_same=False,
                first=f"{different[0]} in step {number}",
                num_different=len(different),
                num_tensors=len(one),
                error=error,
                is_rounding=device.kind == "cuda" and error <= ROUNDING,
            )
    return Determinism(is_same=True, num_tensors=len(ours[0]))


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Of loss and gradients; of the weights only if nothing else differs, since an adaptive optimizer makes whole steps
    of the rounding in a gradient that should be zero."""
    errors = errors_by_name(other, one)
    passed = [error for name, error in errors.items() if error and not name.startswith(_WEIGHT)]
    return max(passed or errors.values())


def _history(bench: Bench, device: AbstractDevice) -> list[dict[str, Tensor]]:
    """Loss, gradients in the order of the backward pass, and weights after each step."""
    with bench.at(device, dropout=True) as placed:
        stepper = placed.stepper(placed.optimizer())
        steps = []
        for number in range(1, STEPS + 1):
            found = {"the loss": placed.step(stepper, number).loss}
            named = list(placed.model.named_parameters())
            found |= {f"the gradient of {name}": p.grad for name, p in reversed(named) if p.grad is not None}
            found |= {f"{_WEIGHT}{name}": p for name, p in named}
            steps.append({name: tensor.detach().cpu().clone() for name, tensor in found.items()})
        return steps


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """NaNs of the same bits are the same."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )
