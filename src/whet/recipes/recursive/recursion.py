"""How are two states refined by one network? It works on the latent several times, then on the answer once, and again.

The latent z is told the input, the answer y is not: that alone tells the network which of both it works on.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Net = Callable[[Tensor, Tensor], Tensor]
"""From a state and what is added to it to the next state."""


def refine(net: Net, y: Tensor, z: Tensor, x: Tensor, *, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """y and z after `outer` cycles, each of `inner` updates of z and one of y; only the last cycle has gradients."""
    has_gradients = torch.is_grad_enabled()
    for cycle in range(outer):
        with torch.set_grad_enabled(has_gradients and cycle == outer - 1):
            for _ in range(inner):
                z = net(z, y + x)
            y = net(y, z)
    return y, z
