"""A model and its optimizer, borrowed for a while: whatever is done to them, they are as they were afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.step.optimizer import OptimizerChoice
from whet.verify.untouched import as_before


@contextmanager
def borrowed(model: nn.Module, optimizer: Optimizer | OptimizerChoice) -> Iterator[None]:
    """Whatever happens to them inside, model and optimizer are afterwards as they were."""
    put_back = _kept(vars(optimizer), _parameters(optimizer)) if isinstance(optimizer, Optimizer) else None
    with as_before(model):
        try:
            yield
        finally:
            if put_back is not None:
                put_back()


def _parameters(optimizer: Optimizer) -> set[int]:
    """They belong to the model, which is put back by itself."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _kept(value: Any, leave: set[int]) -> Callable[[], Any]:
    """How to have this value again: the same object, since a scheduler of yours may hold on to it."""
    if id(value) in leave or not isinstance(value, Tensor | dict | list | tuple):
        return lambda: value
    if isinstance(value, Tensor):
        values = value.detach().clone()
        return lambda: _filled(value, values)
    if isinstance(value, dict):
        named = {name: _kept(part, leave) for name, part in value.items()}

        def refill() -> Any:
            parts = {name: part() for name, part in named.items()}
            value.clear()
            value.update(parts)
            return value

        return refill
    placed = [_kept(part, leave) for part in value]

    def replace() -> Any:
        parts = [part() for part in placed]
        if isinstance(value, list):
            value[:] = parts
        return value

    return replace


@torch.no_grad()
def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    if tensor.device == values.device and tensor.shape == values.shape and tensor.dtype == values.dtype:
        tensor.copy_(values)
    else:
        tensor.data = values
    return tensor
