"""A running average of the weights, for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """An exponential moving average of all floating-point parameters and buffers.

    The average starts fast and slows down to `decay`: after t steps it is min(decay, (1 + t) / (10 + t)), so that the
    first random weights are forgotten soon.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999) -> None:
        self.decay = decay
        self._live = {name: tensor for name, tensor in named_tensors(model) if tensor.is_floating_point()}
        self.average = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after `step` steps into the average."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.values()), [t.detach() for t in self._live.values()], 1 - decay)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Puts the average into the model for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, live in self._live.items():
            kept = live.detach().clone()
            live.detach().copy_(self.average[name])
            self.average[name].copy_(kept)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, the non-persistent ones too, each shared tensor once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
