"""Weights in the one layout that a device computes rightly with; every object stays the one the user holds."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@torch.no_grad()
def make_contiguous(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Gives each parameter that is not contiguous new memory that is; what an optimizer keeps for it follows.

    Left as they are: parameters that share their memory, since they would no longer.
    """
    owners = Counter(_memory(tensor) for tensor in {id(p): p for p in model.parameters()}.values())
    for parameter in model.parameters():
        if parameter.is_contiguous() or owners[_memory(parameter)] > 1:
            continue
        parameter.data = parameter.data.contiguous()
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        # Fused kernels want state of the same layout.
        state.update({k: v.contiguous() for k, v in state.items() if isinstance(v, Tensor) and v.dim() > 0})


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
