"""Attention with turned queries and keys for few places: one kernel there, one back.

torch's compiler leaves a kernel that turns, one that attends, and on the way back five more, each reading and writing
what a single one can keep. Shapes: B rows, S places, H heads of size D.
"""

import math

import torch
from torch import Tensor


@torch.library.custom_op("whet::turned_attention", mutates_args=())
def turned_attention(mixture: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> Tensor:
    """softmax(q k / sqrt(D)) v, (B, S, H D), from queries, keys and values side by side, (B, S, 3 H D).

    Queries and keys are turned by the tables, float32 (S, D), in float32, and rounded to the format of the mixture.
    """
    from whet.device.own import kernels

    mixture = mixture.contiguous()
    rows, places, width = mixture.shape
    found = mixture.new_empty(rows, places, width // 3)
    sizes = _sizes(mixture, num_heads)
    grid = rows, num_heads
    kernels.attend_forward[grid](mixture, cosines, sines, found, places, *sizes, num_warps=kernels.WARPS)
    return found


@torch.library.custom_op("whet::turned_attention_backward", mutates_args=())
def turned_attention_backward(
    mixture: Tensor, cosines: Tensor, sines: Tensor, slopes: Tensor, num_heads: int
) -> Tensor:
    from whet.device.own import kernels

    mixture, slopes = mixture.contiguous(), slopes.contiguous()
    rows, places, _ = mixture.shape
    result = torch.empty_like(mixture)
    sizes = _sizes(mixture, num_heads)
    grid = rows, num_heads
    kernels.attend_backward[grid](mixture, cosines, sines, slopes, result, places, *sizes, num_warps=kernels.WARPS)
    return result


def _sizes(mixture: Tensor, num_heads: int) -> tuple[float, int, int, int]:
    """The scale of scores, heads, their size, and the places of a block."""
    places, width = mixture.shape[1:]
    size = width // 3 // num_heads
    return 1 / math.sqrt(size), num_heads, size, max(16, 1 << (places - 1).bit_length())


@turned_attention.register_fake
def _(mixture: Tensor, cosines: Tensor, sines: Tensor, num_heads: int) -> Tensor:  # noqa: ARG001
    rows, places, width = mixture.shape
    return mixture.new_empty(rows, places, width // 3)


@turned_attention_backward.register_fake
def _(mixture: Tensor, cosines: Tensor, sines: Tensor, slopes: Tensor, num_heads: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(mixture, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def] # noqa: ARG001
    *tensors, ctx.num_heads = inputs
    ctx.save_for_backward(*tensors)


def _back(ctx, slopes):  # type: ignore[no-untyped-def]
    return turned_attention_backward(*ctx.saved_tensors, slopes, ctx.num_heads), None, None, None


turned_attention.register_autograd(_back, setup_context=_keep)
