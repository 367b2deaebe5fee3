"""A running average of the weights, for evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from whet.distributed.strategies import local_tensor


class Ema:
    """An exponential moving average of all floating-point parameters and buffers.

    The average starts fast and slows down to `decay`: after t steps it is min(decay, (1 + t) / (10 + t)), so that the
    first random weights are forgotten soon. A module that says `is_averaged = False` keeps what is its own as it is:
    what it remembers between steps, and a table of which a step changes few rows.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999) -> None:
        self.decay = decay
        self._model = model
        modules = model.named_modules()
        self._left_out = tuple(f"{name}." for name, module in modules if not getattr(module, "is_averaged", True))
        self.average = {name: tensor.detach().clone() for name, tensor in self._live().items()}

    def _live(self) -> dict[str, Tensor]:
        """Looked up each time: a forward pass may put another tensor in a buffer's place."""
        named = ((n, t) for n, t in named_tensors(self._model) if not n.startswith(self._left_out))
        return {name: tensor for name, tensor in named if tensor.is_floating_point()}

    def share(self, step: int) -> float:
        """How much of the average the weights after `step` steps make up."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    def update(self, step: int) -> None:
        """Takes the weights after `step` steps into the average."""
        self.take_in(self.share(step))

    @torch.no_grad()
    def take_in(self, share: float | Tensor) -> None:
        """Takes the weights in. A share in a tensor can change in a captured step; the bits are the same."""
        live = self._live()
        for name, buffer in self._model.named_buffers():
            if name in live and (name not in self.average or self.average[name].shape != buffer.shape):
                # A buffer that was made or grew in a forward pass: its average begins anew.
                self.average[name] = buffer.detach().clone()
        now = [local_tensor(live[name].detach()) for name in self.average]
        if not isinstance(share, Tensor):
            # What is here of tensors that several processes share, with those that each has whole.
            torch._foreach_lerp_([local_tensor(average) for average in self.average.values()], now, share)
            return
        for average, weights in zip(self.average.values(), now, strict=True):
            # Half formats are averaged in float32, as the kernel for a plain number does.
            wide = torch.promote_types(average.dtype, torch.float32)
            if average.dtype == wide:
                average.lerp_(weights, share.to(wide))
            else:
                average.copy_(average.to(wide).lerp(weights.to(wide), share.to(wide)))

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
        for name, live in self._live().items():
            kept = live.detach().clone()
            live.detach().copy_(self.average[name])
            self.average[name].copy_(kept)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters and buffers, the non-persistent ones too, each shared tensor once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
