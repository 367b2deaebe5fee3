"""LayerNorm over a residual sum with dropout, in one kernel forward and one backward."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.switches import has_hooks, is_own_kernel_on, is_supported
from whet.plan.kernel_support import supports_add_norm

_ROWS, _WARPS = 1, 2
"""Of a program: the fastest on an H200 (docs/lab.md)."""
_PROGRAMS = 1584
"""On the way back, at most: twelve for each processor of an H200, of which it holds six at a time."""


def residual_layer_norm(
    dense: nn.Linear, dropout: nn.Dropout, norm: nn.LayerNorm, x: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """norm(dropout(dense(x)) + before) as later sums need it, and as the next product does.

    They are the same tensor but where norms=own is in force: there one in float32 and one in half precision.
    """
    if (
        is_own_kernel_on("norms")
        and is_supported(x)
        and x.numel() > 0
        and type(dense) is nn.Linear
        and dense.bias is not None
        and norm.bias is not None
        and before.dtype == dense.bias.dtype == norm.weight.dtype == torch.float32
        and dropout.p < 1
        and supports_add_norm(norm.weight.numel())
        and not any(map(has_hooks, (dense, dropout, norm)))
    ):
        product = functional.linear(x, dense.weight)
        share = dropout.p if dropout.training else 0.0
        # As torch's compiler does: a seed is drawn by torch, so that a captured step draws a new one each time.
        seed = torch.randint(2**62, (1,), device=x.device) if share else None
        wide, narrow, _, _ = residual_norm_op(
            product, dense.bias, before, norm.weight, norm.bias, seed, share, norm.eps
        )
        return wide, narrow
    found = norm(dropout(dense(x)) + before)
    return found, found


@torch.library.custom_op("whet::sum_norm", mutates_args=())
def residual_norm_op(
    x: Tensor, plus: Tensor, before: Tensor, weight: Tensor, bias: Tensor, seed: Tensor | None, share: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm of dropout(x + plus) + before, in float32 and as x is; and for the way back the sums, and (T, 2) their
    means and 1 / deviations."""
    from whet.device.kernels.residual_norm_triton import residual_norm_forward

    x, before = x.contiguous(), before.contiguous()
    wide, narrow, sums, statistics = _empty_outputs(x)
    tokens = len(statistics)
    residual_norm_forward[-(-tokens // _ROWS),](
        *(x, plus, before, weight, bias, seed, wide, narrow, sums, statistics, tokens, eps),
        *_dropout_args(share),
        *_sizes(x),
        num_warps=_WARPS,
    )
    return wide, narrow, sums, statistics


@torch.library.custom_op("whet::sum_norm_backward", mutates_args=())
def residual_norm_backward_op(
    sums: Tensor,
    statistics: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    of_wide: Tensor | None,
    of_narrow: Tensor | None,
    share: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The slopes of x and of before; and (P, 3, W), what P programs add to those of weight, bias and plus."""
    from whet.device.kernels import residual_norm_triton

    of_wide, of_narrow = (slopes if slopes is None else slopes.contiguous() for slopes in (of_wide, of_narrow))
    of_x, of_before, of_weights = _empty_grads(sums, dtype)
    residual_norm_triton.residual_norm_backward[len(of_weights),](
        *(sums, statistics, weight, seed, of_wide, of_narrow, of_x, of_before, of_weights, len(statistics)),
        *_dropout_args(share),
        *_sizes(sums),
        num_warps=_WARPS,
    )
    return of_x, of_before, of_weights


def _dropout_args(share: float) -> tuple[int, float]:
    """The number of 31 bits below which a drawn one drops, and how many times as large what stays becomes."""
    return round(share * 2**31), 1 / (1 - share)


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """The width, the power of two that it fits, and the rows of a tile."""
    width = x.shape[-1]
    return width, 1 << (width - 1).bit_length(), _ROWS


def _empty_outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    narrow = torch.empty_like(x, memory_format=torch.contiguous_format)
    return wide, narrow, torch.empty_like(wide), wide.new_empty(x.numel() // x.shape[-1], 2)


def _empty_grads(sums: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    *_, width = sums.shape
    programs = min(_PROGRAMS, -(-(sums.numel() // width) // _ROWS))
    return torch.empty_like(sums, dtype=dtype), torch.empty_like(sums), sums.new_empty(programs, 3, width)


@residual_norm_op.register_fake
def _(
    x: Tensor,
    plus: Tensor,  # noqa: ARG001
    before: Tensor,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    bias: Tensor,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    share: float,  # noqa: ARG001
    eps: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_outputs(x)


@residual_norm_backward_op.register_fake
def _(
    sums: Tensor,
    statistics: Tensor,  # noqa: ARG001
    weight: Tensor,  # noqa: ARG001
    seed: Tensor | None,  # noqa: ARG001
    of_wide: Tensor | None,  # noqa: ARG001
    of_narrow: Tensor | None,  # noqa: ARG001
    share: float,  # noqa: ARG001
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_grads(sums, dtype)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, _, _, weight, _, seed, ctx.share, _ = inputs
    _, _, sums, statistics = output
    ctx.dtype = x.dtype
    ctx.save_for_backward(sums, statistics, weight, *(() if seed is None else (seed,)))
    # Nobody asks for slopes of the sums: no zeros are made for them.
    ctx.set_materialize_grads(False)


def _back(ctx, of_wide, of_narrow, _sums, _statistics):  # type: ignore[no-untyped-def]
    if of_wide is None and of_narrow is None:
        return None, None, None, None, None, None, None, None
    sums, statistics, weight, *seeds = ctx.saved_tensors
    seed = seeds[0] if seeds else None
    of_x, of_before, parts = residual_norm_backward_op(
        sums, statistics, weight, seed, of_wide, of_narrow, ctx.share, ctx.dtype
    )
    of_weight, of_bias, of_plus = parts.sum(0).unbind(0)
    return of_x, of_plus, of_before, of_weight, of_bias, None, None, None


residual_norm_op.register_autograd(_back, setup_context=_keep)
