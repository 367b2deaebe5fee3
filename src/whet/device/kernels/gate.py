"""SwiGLU (silu(gate) * up) in one kernel forward and one backward."""

import torch
from torch import Tensor
from torch.nn import functional

from whet.device.kernels.switches import is_own_kernel_on, is_supported


def swiglu(mixture: Tensor) -> Tensor:
    """(..., I) from (..., 2 I): the first half, through silu, times the second."""
    if is_own_kernel_on("gates") and is_supported(mixture):
        through: Tensor = swiglu_op(mixture)
        return through
    gates, up = mixture.chunk(2, dim=-1)
    return functional.silu(gates) * up


@torch.library.custom_op("whet::gate", mutates_args=())
def swiglu_op(mixture: Tensor) -> Tensor:
    from whet.device.kernels.attention_triton import COLUMNS, swiglu_forward

    mixture = mixture.contiguous()
    *rows, width = mixture.shape
    inner = width // 2
    found = mixture.new_empty(*rows, inner)
    swiglu_forward[found.numel() // inner, -(-inner // COLUMNS)](mixture, found, inner, COLUMNS)
    return found


@torch.library.custom_op("whet::gate_backward", mutates_args=())
def swiglu_backward_op(mixture: Tensor, slopes: Tensor) -> Tensor:
    from whet.device.kernels import attention_triton

    mixture, slopes = mixture.contiguous(), slopes.contiguous()
    inner = slopes.shape[-1]
    result = torch.empty_like(mixture)
    grid = slopes.numel() // inner, -(-inner // attention_triton.COLUMNS)
    attention_triton.swiglu_backward[grid](mixture, slopes, result, inner, attention_triton.COLUMNS)
    return result


@swiglu_op.register_fake
def _(mixture: Tensor) -> Tensor:
    *rows, width = mixture.shape
    return mixture.new_empty(*rows, width // 2)


@swiglu_backward_op.register_fake
def _(mixture: Tensor, slopes: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(mixture, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def] # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _back(ctx, slopes):  # type: ignore[no-untyped-def]
    return swiglu_backward_op(*ctx.saved_tensors, slopes)


swiglu_op.register_autograd(_back, setup_context=_keep)
