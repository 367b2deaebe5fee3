"""What a step changes before its update: kept, so that a step that could not be finished can be made again.

Weights and the optimizer's state change in the update only, so forward and backward need just the generators and the
buffers that the model writes to. Which buffers those are, and whether Python's or numpy's generator is in use, is
learnt from the first step; should anything else change later, `put_back` says that it cannot undo it.
"""

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
from whet.step.buffers import Buffers, KeptBuffer


class Guard:
    """Keeps what one step after the other may change; cheap enough for every step."""

    def __init__(self, model: nn.Module, device: AbstractDevice) -> None:
        self._model = model
        self._device = device
        self._all: Buffers | None = None
        self._is_learnt = False
        self._volatile: list[tuple[nn.Module, str]] = []
        self._watched: list[KeptBuffer] = []
        self._kept: list[KeptBuffer] = []
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
                KeptBuffer(module, name, buffer, buffer._version, buffer.detach().clone())
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
