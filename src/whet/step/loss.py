"""The values that a loss function may return, and their weight in a step.

A mean over the samples of a micro-batch is weighted by their number. A pair (sum, weight) provides the weight, such as
the number of tokens for a language model. The loss of a step is the sum of all parts divided by the sum of all weights,
for every split of the batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.data.batch import MicroBatch

_TINY = 1e-37

Loss = Tensor | tuple[Tensor, Tensor | float]
LossFunction = Callable[[MicroBatch], Loss]


def parse_loss(returned: Any) -> tuple[Tensor, Tensor | float | None]:
    """Return (mean, None) or (sum, weight). Raise for any other value."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        total, weight = returned
    else:
        total, weight = returned, None
    if not isinstance(total, Tensor):
        raise WhetError(
            "the loss must be a tensor",
            got=type(total).__name__,
            try_="return loss, or the pair (sum of losses, weight)",
        )
    if total.numel() != 1:
        raise WhetError(
            "the loss must be one number",
            got=f"a tensor of shape {tuple(total.shape)}",
            try_="loss.mean(), or the pair (loss.sum(), loss.numel())",
        )
    if torch.is_grad_enabled() and not total.requires_grad:
        raise WhetError(
            "the loss does not depend on any parameter",
            got="a tensor without a gradient",
            try_="compute it from the model's output, without detach() or no_grad()",
        )
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise WhetError("the loss's weight must be one number", got=f"shape {tuple(weight.shape)}", try_="weight.sum()")
    # Convert to the dtype of the loss: an integer weight would make the division use float32, even in a float64 model.
    weight = weight.detach().reshape(()).to(total.dtype) if isinstance(weight, Tensor) else weight
    return total if total.dim() == 0 else total.reshape(()), weight


def clamp_weight(weight: Tensor | float) -> Tensor | float:
    """Return the weight, at least the smallest positive number: a batch without labels has loss 0, not NaN."""
    if isinstance(weight, Tensor):
        return weight.clamp(min=torch.finfo(weight.dtype).tiny)
    return max(float(weight), _TINY)
