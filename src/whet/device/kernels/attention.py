"""Rotary attention for short sequences: one kernel forward, one backward."""

import math
from typing import Any

import torch
from torch import Tensor

_MIN_PROGRAMS = 512
"""Programs that keep a large GPU busy; with fewer rows each takes fewer heads."""
_MAX_PREFETCH_HEAD, _PREFETCH_BYTES = 64, 160 * 1024
"""The largest head of which a second one is read ahead, and the fast memory that the way back takes for it."""


@torch.library.custom_op("whet::turned_attention", mutates_args=())
def rotary_attention(mixture: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> Tensor:
    """softmax(q k / sqrt(D)) v, (B, S, H D), from queries, keys and values side by side, (B, S, 3 H D).

    Queries and keys are turned by the tables, float32 (S, D), in float32, and rounded to the format of the mixture.
    """
    from whet.device.kernels import attention_triton

    mixture = mixture.contiguous()
    rows, places, width = mixture.shape
    found = mixture.new_empty(rows, places, width // 3)
    grid, sizes = _sizes(mixture, num_heads)
    # So two programs fit on a processor: each takes half of its registers.
    most = 128 if width // 3 // num_heads <= _MAX_PREFETCH_HEAD else None
    attention_triton.rotary_forward[grid](
        mixture, cosines, sines, found, places, *sizes, num_warps=attention_triton.WARPS, maxnreg=most
    )
    return found


@torch.library.custom_op("whet::turned_attention_backward", mutates_args=())
def rotary_attention_backward(
    mixture: Tensor, cosines: Tensor, sines: Tensor, slopes: Tensor, num_heads: int
) -> Tensor:
    from whet.device.kernels import attention_triton

    mixture, slopes = mixture.contiguous(), slopes.contiguous()
    places = mixture.shape[1]
    result = torch.empty_like(mixture)
    grid, sizes = _sizes(mixture, num_heads)
    attention_triton.rotary_backward[grid](
        mixture, cosines, sines, slopes, result, places, *sizes, num_warps=attention_triton.WARPS
    )
    return result


def _sizes(mixture: Tensor, num_heads: int) -> tuple[tuple[int, int], tuple[float, int, int, int, int]]:
    """The grid of programs; then the scale of scores, heads, their size, the places of a block, heads of a program."""
    rows, places, width = mixture.shape
    size = width // 3 // num_heads
    together = _heads_per_program(rows, num_heads) if _can_prefetch(mixture.device, size) else 1
    block = max(16, 1 << (places - 1).bit_length())
    return (rows, num_heads // together), (1 / math.sqrt(size), num_heads, size, block, together)


def _heads_per_program(rows: int, num_heads: int) -> int:
    """The most that leave enough programs.

    >>> _heads_together(768, 8), _heads_together(100, 8), _heads_together(4, 8)
    (8, 1, 1)
    """
    fit = (
        number
        for number in range(num_heads, 1, -1)
        if num_heads % number == 0 and rows * num_heads >= number * _MIN_PROGRAMS
    )
    return next(fit, 1)


def _can_prefetch(device: torch.device, size: int) -> bool:
    """Whether a processor's fast memory holds what a second head needs."""
    if device.type != "cuda":
        return True
    about: Any = torch.cuda.get_device_properties(device)
    return size <= _MAX_PREFETCH_HEAD and about.shared_memory_per_block_optin >= _PREFETCH_BYTES


@rotary_attention.register_fake
def _(mixture: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> Tensor:  # noqa: ARG001
    rows, places, width = mixture.shape
    return mixture.new_empty(rows, places, width // 3)


@rotary_attention_backward.register_fake
def _(mixture: Tensor, cosines: Tensor, sines: Tensor, slopes: Tensor, num_heads: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(mixture, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def] # noqa: ARG001
    *tensors, ctx.num_heads = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx, slopes):  # type: ignore[no-untyped-def]
    return rotary_attention_backward(*ctx.saved_tensors, slopes, ctx.num_heads), None, None, None


rotary_attention.register_autograd(_back, setup_context=_keep)
