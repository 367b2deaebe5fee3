"""GroupNorm and its activation in one kernel forward and one backward, for channels_last."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.switches import has_hooks, is_own_kernel_on, is_supported
from whet.plan.kernel_support import cell_tiles, groups_per_program, supports_group_norm


def group_norm_activation(norm: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """activation(norm(x)), by kernels of our own where they are wanted (norms=own) and written for it."""
    if (
        is_own_kernel_on("norms")
        and isinstance(norm, nn.GroupNorm)
        and isinstance(activation, nn.SiLU | nn.ReLU)
        and is_supported(x)
        and x.dim() == 4
        and x.numel() > 0
        and x.is_contiguous(memory_format=torch.channels_last)
        and norm.affine
        and not has_hooks(norm)
        and not has_hooks(activation)
        and supports_group_norm(int(x.shape[2] * x.shape[3]), norm.num_channels, norm.num_groups)
    ):
        is_silu = isinstance(activation, nn.SiLU)
        through, _ = group_norm_act(x, norm.weight, norm.bias, norm.num_groups, norm.eps, is_silu)
        return through
    result: Tensor = activation(norm(x))
    return result


def reference(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, is_silu: bool) -> Tensor:
    """The same in torch's words."""
    bend = functional.silu if is_silu else functional.relu
    return bend(functional.group_norm(x, num_groups, weight, bias, eps))


@torch.library.custom_op("whet::bent_norm", mutates_args=())
def group_norm_act(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, is_silu: bool
) -> tuple[Tensor, Tensor]:
    """silu or relu of the group norm of x, (B, C, H, W); and for the way back (B, 2, C), means and 1 / deviations."""
    from whet.device.kernels import group_norm_triton

    x = x.contiguous(memory_format=torch.channels_last)
    found = torch.empty_like(x)
    statistics = x.new_empty(len(x), 2, x.shape[1], dtype=torch.float32)
    grid, sizes = _sizes(x, num_groups)
    group_norm_triton.group_norm_forward[grid](
        x, weight, bias, found, statistics, _num_cells(x), eps, is_silu, *sizes, num_warps=_warps(*sizes[1:])
    )
    return found, statistics


@torch.library.custom_op("whet::bent_norm_backward", mutates_args=())
def group_norm_act_backward(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, slopes: Tensor, num_groups: int, is_silu: bool
) -> tuple[Tensor, Tensor]:
    """The slopes of x; and (B, 2, C), what each sample adds to those of weight and bias."""
    from whet.device.kernels import group_norm_triton

    x = x.contiguous(memory_format=torch.channels_last)
    slopes = slopes.contiguous(memory_format=torch.channels_last)
    result, of_weights = torch.empty_like(x), torch.empty_like(statistics)
    grid, sizes = _sizes(x, num_groups)
    group_norm_triton.group_norm_backward[grid](
        x,
        weight,
        bias,
        statistics,
        slopes,
        result,
        of_weights,
        _num_cells(x),
        is_silu,
        *sizes,
        num_warps=_warps(*sizes[1:]),
    )
    return result, of_weights


def _num_cells(x: Tensor) -> int:
    return x.shape[2] * x.shape[3]


def _sizes(x: Tensor, num_groups: int) -> tuple[tuple[int], tuple[int, int, int, int, int]]:
    """The grid of programs; then channels, those of a group, groups of a program, and the cells of its two tiles."""
    width = x.shape[1]
    size = width // num_groups
    together = groups_per_program(_num_cells(x), num_groups, size)
    return (len(x) * num_groups // together,), (width, size, together, *cell_tiles(_num_cells(x)))


def _warps(size: int, together: int, first: int, second: int) -> int:
    """Enough that the registers of their threads hold a program's numbers."""
    from whet.device.kernels.group_norm_triton import ELEMENTS_PER_WARP

    most = size * together * (first + second)
    return 1 << (-(-most // ELEMENTS_PER_WARP) - 1).bit_length()


@group_norm_act.register_fake
def _(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001
    bias: Tensor,  # noqa: ARG001
    num_groups: int,  # noqa: ARG001
    eps: float,  # noqa: ARG001
    is_silu: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], 2, x.shape[1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), statistics


@group_norm_act_backward.register_fake
def _(
    x: Tensor,
    weight: Tensor,  # noqa: ARG001
    bias: Tensor,  # noqa: ARG001
    statistics: Tensor,
    slopes: Tensor,  # noqa: ARG001
    num_groups: int,  # noqa: ARG001
    is_silu: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.channels_last), torch.empty_like(statistics)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, bias, ctx.num_groups, _, ctx.is_silu = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    # Nobody asks for slopes of the statistics: no zeros are made for them.
    ctx.set_materialize_grads(False)


def _back(ctx, slopes, _):  # type: ignore[no-untyped-def]
    x, weight, bias, statistics = ctx.saved_tensors
    if slopes is None:
        return None, None, None, None, None, None
    result, parts = group_norm_act_backward(x, weight, bias, statistics, slopes, ctx.num_groups, ctx.is_silu)
    of_weight, of_bias = parts.sum(0).unbind(0)
    return result, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None, None, None


group_norm_act.register_autograd(_back, setup_context=_keep)
