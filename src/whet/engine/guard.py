"""What a step changes before its update: kept, so that a step that could not be finished can be made again.

Weights and the optimizer's state change in the update only, so forward and backward need just the generators and the
buffers that the model writes to. Which buffers those are, and whether Python's or numpy's generator is in use, is
learnt from the first step; should anything else change later, `put_back` says that it cannot undo it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from whet.checkpoint.randomness import (
    are_equal,
    host_generators,
    set_host_generators,
    set_torch_generators,
    torch_generators,
)
from whet.device.abstract import AbstractDevice


class _Kept(NamedTuple):
    """A buffer as it was."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    values: Tensor | None
    """None for one that is only watched."""

    def has_changed(self) -> bool:
        """As far as torch notes it: without waiting for the device."""
        return self.module._buffers.get(self.name) is not self.buffer or self.buffer._version != self.version

    def is_volatile(self) -> bool:
        """Whether the first step changed it. BatchNorm's kernels write to running statistics without a note."""
        if self.has_changed() or isinstance(self.module, nn.modules.batchnorm._NormBase):
            return True
        return self.values is not None and not torch.equal(self.buffer, self.values)


class Buffers:
    """All buffers of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._objects = [(module, dict(module._buffers)) for module in model.modules()]
        self.kept = [
            _Kept(module, name, buffer, buffer._version, buffer.detach().clone())
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
            assert kept.values is not None
            kept.buffer.copy_(kept.values)


class Guard:
    """Keeps what one step after the other may change; cheap enough for every step."""

    def __init__(self, model: nn.Module, device: AbstractDevice) -> None:
        self._model = model
        self._device = device
        self._all: Buffers | None = None
        self._volatile: list[tuple[nn.Module, str]] | None = None
        self._watched: list[_Kept] = []
        self._kept: list[_Kept] = []
        self._host = host_generators()
        self._is_host_in_use = True
        self._generators: tuple[Tensor, Tensor | None] | None = None

    def keep(self) -> None:
        """Before a step."""
        self._generators = None
        if self._is_host_in_use:
            self._host = host_generators()
        if self._volatile is None:
            self._all = Buffers(self._model)
        else:
            self._kept = [
                _Kept(module, name, buffer, buffer._version, buffer.detach().clone())
                for module, name in self._volatile
                if (buffer := module._buffers[name]) is not None
            ]
        self._generators = torch_generators(self._device)

    def learn(self) -> None:
        """After a step that was finished: the first one shows what steps change."""
        if self._all is None:
            return
        is_volatile = [kept.is_volatile() for kept in self._all.kept]
        self._volatile = [(k.module, k.name) for k, changes in zip(self._all.kept, is_volatile, strict=True) if changes]
        self._watched = [
            kept._replace(values=None) for kept, changes in zip(self._all.kept, is_volatile, strict=True) if not changes
        ]
        self._is_host_in_use = not are_equal(self._host, host_generators())
        self._all = None

    @torch.no_grad()
    def put_back(self) -> bool:
        """After a step that failed before its update: undoes what it did. False if something changed unexpectedly."""
        if self._generators is None:
            # Memory ran out in `keep` itself: the step had not begun.
            return True
        set_torch_generators(self._generators, self._device)
        if self._is_host_in_use:
            set_host_generators(self._host)
        elif not are_equal(self._host, host_generators()):
            return False
        if self._all is not None:
            self._all.put_back()
            return True
        for module, name, buffer, _, values in self._kept:
            module._buffers[name] = buffer
            assert values is not None
            buffer.copy_(values)
        return not any(kept.has_changed() for kept in self._watched)
