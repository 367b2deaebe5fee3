"""What a model remembers besides its weights: every buffer as it was at one moment, to be put back."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class KeptBuffer(NamedTuple):
    """A buffer as it was."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: Tensor

    def has_changed(self) -> bool:
        """Whether it is another object or has other values; torch does not note all that kernels write."""
        if self.module._buffers.get(self.name) is not self.buffer or self.buffer._version != self.version:
            return True
        return not torch.equal(self.buffer, self.values)

    def put_back(self) -> None:
        """The same object with the same values again."""
        self.module._buffers[self.name] = self.buffer
        try:
            self.buffer.copy_(self.values)
        except RuntimeError:
            # One that shows the same numbers several times over cannot be written to.
            self.module._buffers[self.name] = self.values


class Buffers:
    """All buffers of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._objects = [(module, dict(module._buffers)) for module in model.modules()]
        self.kept = [
            KeptBuffer(module, name, buffer, buffer._version, buffer.detach().clone())
            for module, buffers in self._objects
            for name, buffer in buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Every buffer is the same object with the same values again; what was added since is taken away."""
        for module, buffers in self._objects:
            module._buffers.clear()
            module._buffers.update(buffers)
        for kept in self.kept:
            kept.put_back()

    def have_others_come(self) -> bool:
        """Whether buffers were added or taken away since."""
        return any(module._buffers.keys() != buffers.keys() for module, buffers in self._objects)
