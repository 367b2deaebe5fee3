"""Triton kernels for GroupNorm with activation. Imported only if Triton is installed.

A program holds all cells of some groups of one sample, so it loads each element once. The cells are split into two
tiles, because the sides of a tile are powers of two. For example, 169 cells are a full tile of 128, and 41 cells in a
tile of 64. Sums are computed over cells first, and then over the channels of a group.
"""

import triton
import triton.language as tl

ELEMENTS_PER_WARP = 2048
"""Elements per warp: 64 for each thread, whose registers can hold them and their gradients without spilling."""


@triton.jit
def _group_sum(per_channel, groups: tl.constexpr, group_size: tl.constexpr):
    """Return the sum over its group for each channel."""
    sums = tl.sum(tl.reshape(per_channel, (groups, group_size)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (groups, group_size)), (groups * group_size,))


@triton.jit
def _tile_offsets(sample, part, num_cells, width: tl.constexpr, channels: tl.constexpr, first: tl.constexpr):
    """Return the offsets of the elements of the first tile, and the channels of this program."""
    channel = part * channels + tl.arange(0, channels)
    return sample * num_cells * width + tl.arange(0, first)[:, None] * width + channel[None, :], channel


@triton.jit
def _activate(z, is_silu: tl.constexpr):
    if is_silu:
        return z / (1 + tl.exp(-z))
    # Do not use tl.maximum, because it would replace NaN with 0.
    return tl.where(z < 0, 0.0, z)


@triton.jit
def _activation_grad(grad, z, is_silu: tl.constexpr):
    """Return the gradient of z, the input of the activation, given the gradient of its output."""
    if is_silu:
        sigmoid = 1 / (1 + tl.exp(-z))
        return grad * sigmoid * (1 + z * (1 - sigmoid))
    return tl.where(z <= 0, 0.0, grad)


@triton.jit
def group_norm_forward(
    x,
    weight,
    bias,
    out,
    statistics,
    num_cells,
    eps,
    is_silu: tl.constexpr,
    width: tl.constexpr,
    group_size: tl.constexpr,
    groups: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
):
    """Compute out (B, cells, C), and in statistics (B, 2, C) the mean and inverse deviation of each channel's group."""
    channels: tl.constexpr = groups * group_size
    parts: tl.constexpr = width // channels
    sample, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offsets, channel = _tile_offsets(sample, part, num_cells, width, channels, first)
    dtype = out.dtype.element_ty
    x1 = tl.load(x + offsets).to(tl.float32)
    sums = tl.sum(x1, axis=0)
    if second > 0:
        cells = first + tl.arange(0, second)[:, None]
        is_valid = cells < num_cells
        offsets2 = sample * num_cells * width + cells * width + channel[None, :]
        x2 = tl.load(x + offsets2, mask=is_valid, other=0.0).to(tl.float32)
        sums += tl.sum(x2, axis=0)
    count = num_cells * group_size
    mean = _group_sum(sums, groups, group_size) / count
    centered = x1 - mean[None, :]
    squares = tl.sum(centered * centered, axis=0)
    if second > 0:
        centered = tl.where(is_valid, x2 - mean[None, :], 0.0)
        squares += tl.sum(centered * centered, axis=0)
    inv_std = tl.rsqrt(_group_sum(squares, groups, group_size) / count + eps)
    tl.store(statistics + sample * 2 * width + channel, mean)
    tl.store(statistics + sample * 2 * width + width + channel, inv_std)
    scale = tl.load(weight + channel).to(tl.float32) * inv_std
    shift = tl.load(bias + channel).to(tl.float32) - mean * scale
    tl.store(out + offsets, _activate(x1 * scale[None, :] + shift[None, :], is_silu).to(dtype))
    if second > 0:
        tl.store(out + offsets2, _activate(x2 * scale[None, :] + shift[None, :], is_silu).to(dtype), mask=is_valid)


@triton.jit
def group_norm_backward(
    x,
    weight,
    bias,
    statistics,
    grad_out,
    grad_x,
    grad_params,
    num_cells,
    is_silu: tl.constexpr,
    width: tl.constexpr,
    group_size: tl.constexpr,
    groups: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
):
    """Compute grad_x (B, cells, C), and grad_params (B, 2, C): each sample's part of the weight and bias gradients."""
    channels: tl.constexpr = groups * group_size
    parts: tl.constexpr = width // channels
    sample, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    offsets, channel = _tile_offsets(sample, part, num_cells, width, channels, first)
    dtype = grad_x.dtype.element_ty
    mean = tl.load(statistics + sample * 2 * width + channel)
    inv_std = tl.load(statistics + sample * 2 * width + width + channel)
    gamma = tl.load(weight + channel).to(tl.float32)
    scale = gamma * inv_std
    shift = tl.load(bias + channel).to(tl.float32) - mean * scale
    x1 = tl.load(x + offsets).to(tl.float32)
    grad = tl.load(grad_out + offsets).to(tl.float32)
    grad1 = _activation_grad(grad, x1 * scale[None, :] + shift[None, :], is_silu)
    grad_bias = tl.sum(grad1, axis=0)
    grad_weight = tl.sum(grad1 * (x1 - mean[None, :]), axis=0)
    if second > 0:
        cells = first + tl.arange(0, second)[:, None]
        is_valid = cells < num_cells
        offsets2 = sample * num_cells * width + cells * width + channel[None, :]
        x2 = tl.load(x + offsets2, mask=is_valid, other=0.0).to(tl.float32)
        # Gradients outside the sample are 0, so they do not change the sums.
        grad = tl.load(grad_out + offsets2, mask=is_valid, other=0.0).to(tl.float32)
        grad2 = _activation_grad(grad, x2 * scale[None, :] + shift[None, :], is_silu)
        grad_bias += tl.sum(grad2, axis=0)
        grad_weight += tl.sum(grad2 * (x2 - mean[None, :]), axis=0)
    grad_weight *= inv_std
    tl.store(grad_params + sample * 2 * width + channel, grad_weight)
    tl.store(grad_params + sample * 2 * width + width + channel, grad_bias)
    count = num_cells * group_size
    grad_mean = _group_sum(gamma * grad_bias, groups, group_size) / count
    grad_std = _group_sum(gamma * grad_weight, groups, group_size) / count
    # grad_x is scale * grad - inv_std * (grad_mean + normalized * grad_std). Compute the terms that all cells of a
    # channel share only once.
    slope_x = -inv_std * inv_std * grad_std
    offset_x = -inv_std * grad_mean - slope_x * mean
    tl.store(grad_x + offsets, (grad1 * scale[None, :] + (x1 * slope_x[None, :] + offset_x[None, :])).to(dtype))
    if second > 0:
        grad_x2 = grad2 * scale[None, :] + (x2 * slope_x[None, :] + offset_x[None, :])
        tl.store(grad_x + offsets2, grad_x2.to(dtype), mask=is_valid)
