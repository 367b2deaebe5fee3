"""RMSNorm without weights over a sum, in one kernel forward and one backward."""

import torch
from torch import Tensor

from whet.device.kernels.switches import is_own_kernel_on, is_supported
from whet.plan.kernel_support import supports_add_norm


def has_rms_kernel(x: Tensor, added: Tensor | None) -> bool:
    """Whether norms=own is in force and has kernels for tensors like these."""
    return (
        is_own_kernel_on("norms")
        and is_supported(x)
        and x.numel() > 0
        and (added is None or (added.dtype == x.dtype and added.shape == x.shape))
        and supports_add_norm(x.shape[-1])
        and not torch.compiler.is_compiling()
    )


@torch.library.custom_op("whet::rms_sum", mutates_args=())
def rms_norm_sum(x: Tensor, added: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """x + added over the root of its mean square; and for the way back (T), 1 over that root."""
    from whet.device.kernels.rms_norm_triton import WARPS, rms_forward

    x, added = x.contiguous(), added if added is None else added.contiguous()
    found, inverses = _empty_outputs(x)
    rms_forward[len(inverses),](x, added, found, inverses, eps, *_sizes(x), num_warps=WARPS)
    return found, inverses


@torch.library.custom_op("whet::rms_sum_backward", mutates_args=())
def rms_norm_sum_backward(found: Tensor, inverses: Tensor, slopes: Tensor) -> Tensor:
    """The slopes of what was summed."""
    from whet.device.kernels.rms_norm_triton import WARPS, rms_backward

    slopes, result = slopes.contiguous(), torch.empty_like(found)
    rms_backward[len(inverses),](found, inverses, slopes, result, *_sizes(found), num_warps=WARPS)
    return result


def _empty_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    return found, x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def _sizes(x: Tensor) -> tuple[int, int]:
    """The width, and the power of two that it fits."""
    width = x.shape[-1]
    return width, 1 << (width - 1).bit_length()


@rms_norm_sum.register_fake
def _(x: Tensor, added: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _empty_outputs(x)


@rms_norm_sum_backward.register_fake
def _(found: Tensor, inverses: Tensor, slopes: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(found)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.has_added = inputs[1] is not None
    ctx.save_for_backward(*output)
    # Nobody asks for slopes of the roots: no zeros are made for them.
    ctx.set_materialize_grads(False)


def _back(ctx, slopes, _):  # type: ignore[no-untyped-def]
    if slopes is None:
        return None, None, None
    result = rms_norm_sum_backward(*ctx.saved_tensors, slopes)
    return result, result if ctx.has_added else None, None


rms_norm_sum.register_autograd(_back, setup_context=_keep)
