"""Attention over samples that lie one behind the other: which tensors have a kernel for it, and how is it called?"""

from typing import Any

import torch
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

_WIDEST_HEAD = 256
_FIRST_WITH_FLASH = 8
"""CUDA's compute capability, the number before the point."""


def has_kernel(mixture: Tensor, *, num_heads: int) -> bool:
    """Whether queries, keys and values that lie side by side in `mixture`, 3 W wide, can be attended without padding.

    Asked of the host alone: nothing here waits for the device.
    """
    head = mixture.shape[-1] // (3 * num_heads)
    return (
        varlen_attn is not None
        and mixture.is_cuda
        and mixture.dtype in (torch.bfloat16, torch.float16)
        and head % 8 == 0
        and head <= _WIDEST_HEAD
        and torch.cuda.get_device_properties(mixture.device).major >= _FIRST_WITH_FLASH
    )


def attend(mixture: Tensor, starts: Tensor, *, num_heads: int, longest: int, dropout: float = 0.0) -> Tensor:
    """(T, W) from (T, 3 W): every token looks at the tokens of its own sample, from one of `starts` to the next."""
    queries, keys, values = mixture.unflatten(-1, (3, num_heads, -1)).unbind(1)
    if dropout:
        # The public function drops nothing; the kernel behind it does.
        found: Any = torch.ops.aten._flash_attention_forward(
            queries, keys, values, starts, starts, longest, longest, dropout, False, False
        )[0]
    else:
        found = varlen_attn(queries, keys, values, starts, starts, longest, longest)
    together: Tensor = found.flatten(1)
    return together
