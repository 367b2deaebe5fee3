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
            kept.put_back()

    def have_others_come(self) -> bool:
        """Whether buffers were added or taken away since."""
        return any(module._buffers.keys() != buffers.keys() for module, buffers in self._objects)


class Guard:
    """Keeps what one step after the other may change; cheap enough for every step."""

    def __init__(self, model: nn.Module, device: AbstractDevice) -> None:
        self._model = model
        self._device = device
        self._all: Buffers | None = None
        self._is_learnt = False
        self._volatile: list[tuple[nn.Module, str]] = []
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
        if not self._is_learnt:
            self._all = Buffers(self._model)
        else:
            self._kept = [
                _Kept(module, name, buffer, buffer._version, buffer.detach().clone())
                for module, name in self._volatile
                if (buffer := module._buffers.get(name)) is not None
            ]
        self._generators = torch_generators(self._device)

    @property
    def writes_buffers(self) -> bool:
        """Whether the forward pass changes what the model remembers, as far as is known."""
        return bool(self._volatile)

    def learn(self) -> None:
        """After a step that was finished: the first one shows what steps change."""
        if self._is_learnt or self._all is None:
            return
        # Statistics may be frozen at first and written to later.
        is_volatile = [k.has_changed() or isinstance(k.module, nn.modules.batchnorm._NormBase) for k in self._all.kept]
        self._volatile = [(k.module, k.name) for k, changes in zip(self._all.kept, is_volatile, strict=True) if changes]
        self._watched = [k for k, changes in zip(self._all.kept, is_volatile, strict=True) if not changes]
        self._is_host_in_use = not are_equal(self._host, host_generators())
        self._is_learnt = True

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
        assert self._all is not None
        if not self._is_learnt:
            self._all.put_back()
            return True
        for kept in self._kept:
            kept.put_back()
        return not self._all.have_others_come() and not any(kept.has_changed() for kept in self._watched)
