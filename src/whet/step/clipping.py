"""The limit on the norm of the gradient: torch's clip_grad_norm_ to the last bit, without asking in every step which
gradients may be computed together."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_AT_ONCE = ("cpu", "cuda")
"""Where torch computes many tensors in one call; elsewhere it takes them one by one."""


def may_clip_at_once(parameters: Sequence[Tensor]) -> bool:
    """Whether these are plain, of one dtype and on one device that computes many tensors in one call."""
    first = parameters[0]
    are_plain = all(type(p) in (nn.Parameter, Tensor) for p in parameters)
    are_alike = all((p.device, p.dtype) == (first.device, first.dtype) for p in parameters)
    return are_plain and are_alike and first.device.type in _AT_ONCE


@torch.no_grad()
def clip_at_once(parameters: Sequence[Tensor], most: float) -> Tensor:
    """Makes all gradients smaller by one factor if their norm is over `most`; the norm before."""
    gradients = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2.0)), 2.0)
    torch._foreach_mul_(gradients, torch.clamp(most / (norm + 1e-6), max=1.0))
    return norm
