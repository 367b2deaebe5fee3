"""Attention over samples that lie one behind the other: which tensors have a kernel for it, and how is it called?"""

import inspect
from typing import Any

import torch
from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

_HAS_FLAG = varlen_attn is not None and "is_causal" in inspect.signature(varlen_attn).parameters
_CAUSAL: dict[str, Any] = {"is_causal": True} if _HAS_FLAG else {"window_size": (-1, 0)}
"""torch 2.10 has a flag for it, later ones a window."""
_WIDEST_HEAD = 256
_FIRST_WITH_FLASH = 8
"""CUDA's compute capability, the number before the point."""


def has_kernel(mixture: Tensor, *, num_heads: int) -> bool:
    """Whether queries, keys and values that lie side by side in `mixture`, 3 W wide, can be attended without padding.

    Asked of the host alone: nothing here waits for the device.
    """
    return can_attend(mixture.device, mixture.dtype, head_size=mixture.shape[-1] // (3 * num_heads))


def can_attend(device: torch.device, dtype: torch.dtype, *, head_size: int) -> bool:
    """Whether heads of this size in this format have a kernel there."""
    return (
        varlen_attn is not None
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_size % 8 == 0
        and head_size <= _WIDEST_HEAD
        and torch.cuda.get_device_properties(device).major >= _FIRST_WITH_FLASH
    )


def attend(mixture: Tensor, starts: Tensor, *, num_heads: int, longest: int, dropout: float = 0.0) -> Tensor:
    """(T, W) from (T, 3 W): every token looks at the tokens of its own sample, from one of `starts` to the next."""
    queries, keys, values = mixture.unflatten(-1, (3, num_heads, -1)).unbind(1)
    return attend_apart(queries, keys, values, starts, longest=longest, dropout=dropout)


def attend_apart(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    *,
    longest: int,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """(T, W) from three of (T, H, W / H); with `is_causal` a token looks at itself and earlier ones of its sample."""
    if dropout:
        # The public function drops nothing; the kernel behind it does.
        found: Any = torch.ops.aten._flash_attention_forward(
            queries, keys, values, starts, starts, longest, longest, dropout, is_causal, False
        )[0]
    else:
        how = _CAUSAL if is_causal else {}
        found = varlen_attn(queries, keys, values, starts, starts, longest, longest, **how)
    together: Tensor = found.flatten(1)
    return together
