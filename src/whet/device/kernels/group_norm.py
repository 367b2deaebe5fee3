"""GroupNorm and activation for channels_last tensors, with one kernel for forward and one for backward.

torch's GroupNorm copies to contiguous and back, reads the input twice, and stores float32 under autocast. These kernels
load and store every element once, in its own dtype. Sums and intermediate values are float32. Shapes: B samples of
(C, H, W), with C adjacent channels in each of the H W cells.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.switches import has_hooks, is_supported, is_whet_kernel_on
from whet.plan.kernel_support import cell_tiles, groups_per_program, supports_group_norm


def group_norm_activation(norm: nn.Module, activation: nn.Module, x: Tensor) -> Tensor:
    """Return activation(norm(x)). Uses whet's kernel if norms=whet is selected and the kernel supports the inputs."""
    if (
        is_whet_kernel_on("norms")
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
        out, _ = group_norm_act(x, norm.weight, norm.bias, norm.num_groups, norm.eps, is_silu)
        return out
    plain: Tensor = activation(norm(x))
    return plain


def reference(x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, is_silu: bool) -> Tensor:
    """Compute the result of the kernel with torch's operators, for tests."""
    activate = functional.silu if is_silu else functional.relu
    return activate(functional.group_norm(x, num_groups, weight, bias, eps))


@torch.library.custom_op("whet::group_norm_act", mutates_args=())
def group_norm_act(
    x: Tensor, weight: Tensor, bias: Tensor, num_groups: int, eps: float, is_silu: bool
) -> tuple[Tensor, Tensor]:
    """Return silu or relu of the GroupNorm of x, and statistics (B, 2, C) for backward.

    The statistics are the mean and the inverse standard deviation of each channel's group.
    """
    from whet.device.kernels import group_norm_triton

    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    statistics = x.new_empty(len(x), 2, x.shape[1], dtype=torch.float32)
    grid, sizes = _sizes(x, num_groups)
    group_norm_triton.group_norm_forward[grid](
        x, weight, bias, out, statistics, _num_cells(x), eps, is_silu, *sizes, num_warps=_warps(*sizes[1:])
    )
    return out, statistics


@torch.library.custom_op("whet::group_norm_act_backward", mutates_args=())
def group_norm_act_backward(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, grad_out: Tensor, num_groups: int, is_silu: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of x, and each sample's contribution to the gradients of weight and bias (B, 2, C)."""
    from whet.device.kernels import group_norm_triton

    x = x.contiguous(memory_format=torch.channels_last)
    grad_out = grad_out.contiguous(memory_format=torch.channels_last)
    grad_x, grad_params = torch.empty_like(x), torch.empty_like(statistics)
    grid, sizes = _sizes(x, num_groups)
    group_norm_triton.group_norm_backward[grid](
        x,
        weight,
        bias,
        statistics,
        grad_out,
        grad_x,
        grad_params,
        _num_cells(x),
        is_silu,
        *sizes,
        num_warps=_warps(*sizes[1:]),
    )
    return grad_x, grad_params


def _num_cells(x: Tensor) -> int:
    return x.shape[2] * x.shape[3]


def _sizes(x: Tensor, num_groups: int) -> tuple[tuple[int], tuple[int, int, int, int, int]]:
    """Return the grid and sizes: channels, channels per group, groups per program, and cells of its two tiles."""
    width = x.shape[1]
    group_size = width // num_groups
    groups = groups_per_program(_num_cells(x), num_groups, group_size)
    return (len(x) * num_groups // groups,), (width, group_size, groups, *cell_tiles(_num_cells(x)))


def _warps(group_size: int, groups: int, first: int, second: int) -> int:
    """Return the number of warps whose registers can hold all elements of a program."""
    from whet.device.kernels.group_norm_triton import ELEMENTS_PER_WARP

    elements = group_size * groups * (first + second)
    return 1 << (-(-elements // ELEMENTS_PER_WARP) - 1).bit_length()


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
    grad_out: Tensor,  # noqa: ARG001
    num_groups: int,  # noqa: ARG001
    is_silu: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.channels_last), torch.empty_like(statistics)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, bias, ctx.num_groups, _, ctx.is_silu = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    # Do not allocate zeros for the missing gradient of the statistics.
    ctx.set_materialize_grads(False)


def _gradient(ctx, grad_out, _):  # type: ignore[no-untyped-def]
    x, weight, bias, statistics = ctx.saved_tensors
    if grad_out is None:
        return None, None, None, None, None, None
    grad_x, parts = group_norm_act_backward(x, weight, bias, statistics, grad_out, ctx.num_groups, ctx.is_silu)
    grad_weight, grad_bias = parts.sum(0).unbind(0)
    return grad_x, grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None, None, None


group_norm_act.register_autograd(_gradient, setup_context=_save)
