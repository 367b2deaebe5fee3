"""Row-wise kernels: SwiGLU, RMSNorm over a sum, and LayerNorm over a residual sum with dropout.

Each operation has one forward and one backward kernel. Shapes: T tokens in any number of dimensions, I inner features,
W width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.switches import has_hooks, is_supported, is_whet_kernel_on
from whet.plan.kernel_support import supports_add_norm

# --- SwiGLU ----------------------------------------------------------------------------------------------------------
# torch's compiler writes the gradients of gate and up as one tensor, and loads the inputs again for each half. Its
# backward kernel takes 0.50 ms per layer, and this one takes 0.27 ms (74,496 rows of 2 x 1,536 on an H200).


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., I) from the concatenation of gate and up (..., 2 I)."""
    if is_whet_kernel_on("gates") and is_supported(gate_up):
        out: Tensor = swiglu_op(gate_up)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@torch.library.custom_op("whet::swiglu", mutates_args=())
def swiglu_op(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (..., I), computed by the Triton kernel."""
    from whet.device.kernels.rowwise_triton import SWIGLU_BLOCK, swiglu_forward

    gate_up = gate_up.contiguous()
    *rows, width = gate_up.shape
    inner = width // 2
    out = gate_up.new_empty(*rows, inner)
    swiglu_forward[out.numel() // inner, -(-inner // SWIGLU_BLOCK)](gate_up, out, inner, SWIGLU_BLOCK)
    return out


@torch.library.custom_op("whet::swiglu_backward", mutates_args=())
def swiglu_backward_op(gate_up: Tensor, grad_out: Tensor) -> Tensor:
    """Return the gradient of gate_up (..., 2 I), given the gradient of the output (..., I)."""
    from whet.device.kernels.rowwise_triton import SWIGLU_BLOCK, swiglu_backward

    gate_up, grad_out = gate_up.contiguous(), grad_out.contiguous()
    inner = grad_out.shape[-1]
    grad_in = torch.empty_like(gate_up)
    grid = grad_out.numel() // inner, -(-inner // SWIGLU_BLOCK)
    swiglu_backward[grid](gate_up, grad_out, grad_in, inner, SWIGLU_BLOCK)
    return grad_in


@swiglu_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    *rows, width = gate_up.shape
    return gate_up.new_empty(*rows, width // 2)


@swiglu_backward_op.register_fake
def _(gate_up: Tensor, grad_out: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def _save_swiglu(ctx, inputs, output):  # type: ignore[no-untyped-def] # noqa: ARG001
    ctx.save_for_backward(*inputs)


def _swiglu_gradient(ctx, grad_out):  # type: ignore[no-untyped-def]
    return swiglu_backward_op(*ctx.saved_tensors, grad_out)


swiglu_op.register_autograd(_swiglu_gradient, setup_context=_save_swiglu)


# --- RMSNorm ---------------------------------------------------------------------------------------------------------
# In eager mode, torch runs eight kernels, most of them in float32. torch's compiler fuses them with the surrounding
# additions, so a compiled model uses torch's operators.


def has_rms_kernel(x: Tensor, residual: Tensor | None) -> bool:
    """Return whether norms=whet is selected and the kernels support these tensors."""
    return (
        is_whet_kernel_on("norms")
        and is_supported(x)
        and x.numel() > 0
        and (residual is None or (residual.dtype == x.dtype and residual.shape == x.shape))
        and supports_add_norm(x.shape[-1])
        and not torch.compiler.is_compiling()
    )


@torch.library.custom_op("whet::rms_norm_sum", mutates_args=())
def rms_norm_sum(x: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + residual divided by its root mean square, and the inverse root mean squares (T) for backward.

    A residual of None counts as 0. `eps` is added to the mean square.
    """
    from whet.device.kernels.rowwise_triton import RMS_WARPS, rms_forward

    x, residual = x.contiguous(), residual if residual is None else residual.contiguous()
    out, inv_rms = _empty_rms_outputs(x)
    rms_forward[len(inv_rms),](x, residual, out, inv_rms, eps, *_row_sizes(x), num_warps=RMS_WARPS)
    return out, inv_rms


@torch.library.custom_op("whet::rms_norm_sum_backward", mutates_args=())
def rms_norm_sum_backward(out: Tensor, inv_rms: Tensor, grad_out: Tensor) -> Tensor:
    """Return the gradient of x + residual, given the output of the forward pass and its gradient.

    The kernel reads the output instead of the inputs, because the following matrix product saves the output anyway.
    """
    from whet.device.kernels.rowwise_triton import RMS_WARPS, rms_backward

    grad_out, grad_in = grad_out.contiguous(), torch.empty_like(out)
    rms_backward[len(inv_rms),](out, inv_rms, grad_out, grad_in, *_row_sizes(out), num_warps=RMS_WARPS)
    return grad_in


def _empty_rms_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _row_sizes(x: Tensor) -> tuple[int, int]:
    """Return the width and the block size, which must be a power of two in Triton."""
    width = x.shape[-1]
    return width, 1 << (width - 1).bit_length()


@rms_norm_sum.register_fake
def _(x: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _empty_rms_outputs(x)


@rms_norm_sum_backward.register_fake
def _(out: Tensor, inv_rms: Tensor, grad_out: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(out)


def _save_rms(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.has_residual = inputs[1] is not None
    ctx.save_for_backward(*output)
    # Do not allocate zeros for the missing gradient of the inverse root mean squares.
    ctx.set_materialize_grads(False)


def _rms_gradient(ctx, grad_out, _):  # type: ignore[no-untyped-def]
    if grad_out is None:
        return None, None, None
    grad_in = rms_norm_sum_backward(*ctx.saved_tensors, grad_out)
    return grad_in, grad_in if ctx.has_residual else None, None


rms_norm_sum.register_autograd(_rms_gradient, setup_context=_save_rms)


# --- LayerNorm over a residual sum -----------------------------------------------------------------------------------
# Under autocast, torch runs four kernels: for dropout, the sum, the norm, and the cast for the next matrix product. The
# backward pass takes six, including one for the bias gradient of the linear layer. Each kernel loads what the previous
# one stored.

_ROWS, _WARPS = 1, 2
"""Rows and warps per program. These were the fastest on an H200 (docs/lab.md)."""
_MAX_PROGRAMS = 1584
"""Maximum number of programs in the backward pass: twelve per multiprocessor of an H200, which can hold six."""


def residual_layer_norm(
    dense: nn.Linear, dropout: nn.Dropout, norm: nn.LayerNorm, x: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """Return norm(dropout(dense(x)) + residual) twice: for the next residual sum, and for the next matrix product.

    With whet's kernel, the first is float32 and the second is half precision. Otherwise both are the same tensor.
    """
    if (
        is_whet_kernel_on("norms")
        and is_supported(x)
        and x.numel() > 0
        and type(dense) is nn.Linear
        and dense.bias is not None
        and norm.bias is not None
        and residual.dtype == dense.bias.dtype == norm.weight.dtype == torch.float32
        and dropout.p < 1
        and supports_add_norm(norm.weight.numel())
        and not any(map(has_hooks, (dense, dropout, norm)))
    ):
        product = functional.linear(x, dense.weight)
        p = dropout.p if dropout.training else 0.0
        # Draw the seed on the device, so that each replay of a captured step uses a new one.
        seed = torch.randint(2**62, (1,), device=x.device) if p else None
        out32, out, _, _ = residual_norm_op(product, dense.bias, residual, norm.weight, norm.bias, seed, p, norm.eps)
        return out32, out
    normed = norm(dropout(dense(x)) + residual)
    return normed, normed


@torch.library.custom_op("whet::residual_norm", mutates_args=())
def residual_norm_op(
    x: Tensor,
    x_bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the LayerNorm of dropout(x + x_bias) + residual, in float32 and in the dtype of x.

    For the backward pass, also return the sums, and the mean and inverse standard deviation of each row (T, 2).
    """
    from whet.device.kernels.rowwise_triton import residual_norm_forward

    x, residual = x.contiguous(), residual.contiguous()
    out32, out, sums, statistics = _empty_norm_outputs(x)
    tokens = len(statistics)
    residual_norm_forward[-(-tokens // _ROWS),](
        *(x, x_bias, residual, weight, bias, seed, out32, out, sums, statistics, tokens, eps),
        *_dropout_args(p),
        *_row_sizes(x),
        _ROWS,
        num_warps=_WARPS,
    )
    return out32, out, sums, statistics


@torch.library.custom_op("whet::residual_norm_backward", mutates_args=())
def residual_norm_backward_op(
    sums: Tensor,
    statistics: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    grad_out32: Tensor | None,
    grad_out: Tensor | None,
    p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and residual, and partial sums (P, 3, W) of the gradients of weight, bias and x_bias.

    Each of the P programs computes one partial sum. A gradient of the output that is None counts as 0.
    """
    from whet.device.kernels.rowwise_triton import residual_norm_backward

    grad_out32, grad_out = (grad if grad is None else grad.contiguous() for grad in (grad_out32, grad_out))
    grad_x, grad_residual, grad_params = _empty_norm_grads(sums, dtype)
    residual_norm_backward[len(grad_params),](
        *(sums, statistics, weight, seed, grad_out32, grad_out, grad_x, grad_residual, grad_params, len(statistics)),
        *_dropout_args(p),
        *_row_sizes(sums),
        _ROWS,
        num_warps=_WARPS,
    )
    return grad_x, grad_residual, grad_params


def _dropout_args(p: float) -> tuple[int, float]:
    """Return the dropout threshold for 31-bit random numbers, and the factor for kept elements."""
    return round(p * 2**31), 1 / (1 - p)


def _empty_norm_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out32 = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out32, out, torch.empty_like(out32), out32.new_empty(x.numel() // x.shape[-1], 2)


def _empty_norm_grads(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    *_, width = sums.shape
    programs = min(_MAX_PROGRAMS, -(-(sums.numel() // width) // _ROWS))
    return torch.empty_like(sums, dtype=dtype), torch.empty_like(sums), sums.new_empty(programs, 3, width)


@residual_norm_op.register_fake
def _(
    x: Tensor,
    x_bias: Tensor,  # noqa: ARG001
    residual: Tensor,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    bias: Tensor,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    p: float,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_norm_outputs(x)


@residual_norm_backward_op.register_fake
def _(
    sums: Tensor,
    statistics: Tensor,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    grad_out32: Tensor | None,  # noqa: ARG001
    grad_out: Tensor | None,  # noqa: ARG001
    p: float,  # noqa: ARG001
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_norm_grads(sums, dtype)


def _save_norm(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, _, _, weight, _, seed, ctx.p, _ = inputs
    _, _, sums, statistics = output
    ctx.dtype = x.dtype
    ctx.save_for_backward(sums, statistics, weight, *(() if seed is None else (seed,)))
    # Do not allocate zeros for the missing gradients of sums and statistics.
    ctx.set_materialize_grads(False)


def _norm_gradient(ctx, grad_out32, grad_out, _sums, _statistics):  # type: ignore[no-untyped-def]
    if grad_out32 is None and grad_out is None:
        return None, None, None, None, None, None, None, None
    sums, statistics, weight, *seeds = ctx.saved_tensors
    seed = seeds[0] if seeds else None
    grad_x, grad_residual, parts = residual_norm_backward_op(
        sums, statistics, weight, seed, grad_out32, grad_out, ctx.p, ctx.dtype
    )
    grad_weight, grad_bias, grad_x_bias = parts.sum(0).unbind(0)
    return grad_x, grad_x_bias, grad_residual, grad_weight, grad_bias, None, None, None


residual_norm_op.register_autograd(_norm_gradient, setup_context=_save_norm)
