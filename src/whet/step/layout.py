"""How do the weights of convolutions lie in memory? The values and the objects are the same; kernels and speed are not.

An optimizer's fused kernels on the CPU walk weights and state side by side without a look at how each lies
(torch 2.13): state of another layout would be mixed up without a word. So state follows its parameter, always.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.base.errors import UsageError

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Layout:
    """The layout of one model's weights: as it was found, or with channels last, and back.

    With `keeps_places` weights lie in the same place whenever a layout comes again, as captured steps need it; that
    takes memory for both.
    """

    def __init__(self, model: nn.Module, *, keeps_places: bool = False) -> None:
        parameters = list(model.parameters())
        owners = Counter(parameter.untyped_storage().data_ptr() for parameter in parameters)
        # Left as they are: parameters that share their memory, since they would no longer.
        alone = (parameter for parameter in parameters if owners[parameter.untyped_storage().data_ptr()] == 1)
        self._own = [(p, p.stride()) for p in alone if p.dim() in _CHANNELS_LAST and _is_dense(p)]
        self._places: dict[tuple[int, tuple[int, ...]], Tensor] | None = {} if keeps_places else None

    def use(self, name: str, optimizer: Optimizer | None = None) -> None:
        """Lays the weights out; what an optimizer keeps for them follows. "contiguous" is as they were found."""
        if name == "channels_last" and not self._own:
            raise UsageError(
                "channels_last is a layout of convolutions",
                got="a model without weights of four or five dimensions",
                try_="layout=contiguous",
            )
        for parameter, stride in self._own:
            self._lay_out(parameter, _last(parameter) if name == "channels_last" else stride)
        if optimizer is not None:
            for parameter, _ in self._own:
                align(parameter, optimizer.state.get(parameter, {}))

    @torch.no_grad()
    def _lay_out(self, parameter: Tensor, stride: tuple[int, ...]) -> None:
        if parameter.stride() == stride:
            return
        memory = parameter.data
        place = None if self._places is None else self._places.get((id(parameter), stride))
        if place is None or (place.device, place.dtype) != (memory.device, memory.dtype):
            place = memory.new_empty_strided(memory.shape, stride)
        parameter.data = place.copy_(memory)
        if parameter.grad is not None:
            parameter.grad = _like(parameter.grad, parameter)
        if self._places is not None:
            self._places |= {(id(parameter), memory.stride()): memory, (id(parameter), stride): place}


def align(parameter: Tensor, state: dict[str, Any]) -> None:
    """Lays out what an optimizer keeps for a parameter as the parameter itself; the objects stay the same."""
    for kept in state.values():
        if isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.stride() != parameter.stride():
            kept.data = _like(kept, parameter)


def _last(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a parameter with channels last."""
    memory_format = _CHANNELS_LAST[parameter.dim()]
    if parameter.is_contiguous(memory_format=memory_format):
        return parameter.stride()
    return torch.empty_like(parameter, device="meta", memory_format=memory_format).stride()


def _like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The same numbers as they would lie in the parameter."""
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _is_dense(parameter: Tensor) -> bool:
    """Whether every element has a place of its own, without gaps: only then is a layout a mere order."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
