"""Exponential moving average of the weights, for evaluation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from whet.distributed.strategies import local_tensor


class Ema:
    """An exponential moving average of all floating-point and complex parameters and buffers.

    The decay after t steps is min(decay, (1 + t) / (10 + t)), so that the initial weights soon lose their influence.
    Modules with `is_averaged = False` are excluded, such as state carried between steps, or tables of which each step
    changes only a few rows.
    """

    def __init__(self, model: nn.Module, *, decay: float = 0.999) -> None:
        self.decay = decay
        self._model = model
        modules = model.named_modules()
        self._excluded = tuple(f"{name}." for name, module in modules if not getattr(module, "is_averaged", True))
        self.average = {name: tensor.detach().clone() for name, tensor in self._live().items()}

    def _live(self) -> dict[str, Tensor]:
        """Return the tensors of the model that are averaged.

        They are looked up each time, because a forward pass may replace a buffer.
        """
        named = ((n, t) for n, t in named_tensors(self._model) if not n.startswith(self._excluded))
        return {name: tensor for name, tensor in named if _has_average(tensor)}

    def follow_model(self) -> dict[str, Tensor]:
        """Update the set of averages to the current tensors of the model, and return these tensors.

        New and resized tensors are added, renamed ones keep their average, and those that no longer exist are dropped.
        """
        live = self._live()
        before = self.average
        if live.keys() != before.keys() or any(before[name].shape != live[name].shape for name in live):
            # The average of a new or resized tensor starts with its current value.
            self.average = {n: tensor.detach().clone() for n, tensor in live.items()} | self._averages(live)
        return live

    def _averages(self, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the existing averages by the current names of their tensors. Pruning renames a weight to `*_orig`."""
        before = self.average
        names = {name: name if name in before else name.removesuffix("_orig") for name in live}
        return {n: before[o] for n, o in names.items() if o in before and before[o].shape == live[n].shape}

    def share(self, step: int) -> float:
        """Return the weight of the new values in the update after `step` steps."""
        return 1 - min(self.decay, (1 + step) / (10 + step))

    def update(self, step: int) -> None:
        """Update the average with the weights after `step` steps."""
        self.update_by(self.share(step))

    @torch.no_grad()
    def update_by(self, share: float | Tensor) -> None:
        """Update the average: new values have the weight `share`, and the old average has the rest.

        A captured step passes a tensor, whose value can change between replays; the result is bitwise the same as for a
        number.
        """
        live = self.follow_model()
        now = [local_tensor(live[name].detach()) for name in self.average]
        if not now:
            return
        if not isinstance(share, Tensor):
            # One call for all tensors. Each rank updates its local rows of a sharded tensor.
            torch._foreach_lerp_([local_tensor(average) for average in self.average.values()], now, share)
            return
        for average, weights in zip(self.average.values(), now, strict=True):
            # Average half precision in float32, as the kernel for a Python number does.
            wide = torch.promote_types(average.dtype, torch.float32)
            if average.dtype == wide:
                average.lerp_(weights, share.to(wide))
            else:
                average.copy_(average.to(wide).lerp(weights.to(wide), share.to(wide)))

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the `with` block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        live = self._live()
        # A tensor that a callback has just created has no average yet.
        for name, average in self._averages(live).items():
            current = live[name].detach().clone()
            live[name].detach().copy_(average)
            average.copy_(current)


def _has_average(tensor: Tensor) -> bool:
    # torch cannot average 8-bit floats, and an average of integers or masks is meaningless.
    is_wide = tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)
    return is_wide and tensor.layout is torch.strided


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, including non-persistent ones. Shared tensors appear once."""
    yield from model.named_parameters()
    yield from model.named_buffers()
