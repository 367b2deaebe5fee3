"""Triton kernels of GroupNorm with activation. Imported only where triton is installed."""

import triton
import triton.language as tl

ELEMENTS_PER_WARP = 2048
"""The most: 64 of a thread, which its registers hold with their slopes and spill nothing."""


@triton.jit
def _group_sum(of_channels, groups: tl.constexpr, size: tl.constexpr):
    """Each channel's number becomes the sum over its group."""
    sums = tl.sum(tl.reshape(of_channels, (groups, size)), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], (groups, size)), (groups * size,))


@triton.jit
def _tile_offsets(sample, part, num_cells, width: tl.constexpr, channels: tl.constexpr, first: tl.constexpr):
    """Where the first tile begins and where the numbers of a channel are, and the channels."""
    inside = part * channels + tl.arange(0, channels)
    return sample * num_cells * width + tl.arange(0, first)[:, None] * width + inside[None, :], inside


@triton.jit
def _activate(z, is_silu: tl.constexpr):
    if is_silu:
        return z / (1 + tl.exp(-z))
    # Not the larger of both: a NaN stays one.
    return tl.where(z < 0, 0.0, z)


@triton.jit
def _activation_grad(slope, z, is_silu: tl.constexpr):
    """The slope before the activation, which got z, from that behind it."""
    if is_silu:
        share = 1 / (1 + tl.exp(-z))
        return slope * share * (1 + z * (1 - share))
    return tl.where(z <= 0, 0.0, slope)


@triton.jit
def group_norm_forward(
    x,
    weight,
    bias,
    found,
    statistics,
    num_cells,
    eps,
    is_silu: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
):
    """found, as x is (B, cells, W), and statistics (B, 2, W): mean and 1 / deviation of each channel's group."""
    channels: tl.constexpr = groups * size
    parts: tl.constexpr = width // channels
    sample, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    at, inside = _tile_offsets(sample, part, num_cells, width, channels, first)
    kind = found.dtype.element_ty
    one = tl.load(x + at).to(tl.float32)
    sums = tl.sum(one, axis=0)
    if second > 0:
        cells = first + tl.arange(0, second)[:, None]
        is_real = cells < num_cells
        also = sample * num_cells * width + cells * width + inside[None, :]
        two = tl.load(x + also, mask=is_real, other=0.0).to(tl.float32)
        sums += tl.sum(two, axis=0)
    number = num_cells * size
    mean = _group_sum(sums, groups, size) / number
    off = one - mean[None, :]
    squares = tl.sum(off * off, axis=0)
    if second > 0:
        off = tl.where(is_real, two - mean[None, :], 0.0)
        squares += tl.sum(off * off, axis=0)
    inverse = tl.rsqrt(_group_sum(squares, groups, size) / number + eps)
    tl.store(statistics + sample * 2 * width + inside, mean)
    tl.store(statistics + sample * 2 * width + width + inside, inverse)
    times = tl.load(weight + inside).to(tl.float32) * inverse
    plus = tl.load(bias + inside).to(tl.float32) - mean * times
    tl.store(found + at, _activate(one * times[None, :] + plus[None, :], is_silu).to(kind))
    if second > 0:
        tl.store(found + also, _activate(two * times[None, :] + plus[None, :], is_silu).to(kind), mask=is_real)


@triton.jit
def group_norm_backward(
    x,
    weight,
    bias,
    statistics,
    slopes,
    result,
    of_weights,
    num_cells,
    is_silu: tl.constexpr,
    width: tl.constexpr,
    size: tl.constexpr,
    groups: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
):
    """result, as x is, from slopes, as found is; and of_weights (B, 2, W), what a sample gives to weight and bias."""
    channels: tl.constexpr = groups * size
    parts: tl.constexpr = width // channels
    sample, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    at, inside = _tile_offsets(sample, part, num_cells, width, channels, first)
    kind = result.dtype.element_ty
    mean = tl.load(statistics + sample * 2 * width + inside)
    inverse = tl.load(statistics + sample * 2 * width + width + inside)
    gain = tl.load(weight + inside).to(tl.float32)
    times = gain * inverse
    plus = tl.load(bias + inside).to(tl.float32) - mean * times
    one = tl.load(x + at).to(tl.float32)
    slope = tl.load(slopes + at).to(tl.float32)
    bent = _activation_grad(slope, one * times[None, :] + plus[None, :], is_silu)
    of_bias = tl.sum(bent, axis=0)
    of_weight = tl.sum(bent * (one - mean[None, :]), axis=0)
    if second > 0:
        cells = first + tl.arange(0, second)[:, None]
        is_real = cells < num_cells
        also = sample * num_cells * width + cells * width + inside[None, :]
        two = tl.load(x + also, mask=is_real, other=0.0).to(tl.float32)
        # 0 where there is no cell, so nothing of it is in a sum.
        slope = tl.load(slopes + also, mask=is_real, other=0.0).to(tl.float32)
        bent_two = _activation_grad(slope, two * times[None, :] + plus[None, :], is_silu)
        of_bias += tl.sum(bent_two, axis=0)
        of_weight += tl.sum(bent_two * (two - mean[None, :]), axis=0)
    of_weight *= inverse
    tl.store(of_weights + sample * 2 * width + inside, of_weight)
    tl.store(of_weights + sample * 2 * width + width + inside, of_bias)
    number = num_cells * size
    of_mean = _group_sum(gain * of_bias, groups, size) / number
    of_size = _group_sum(gain * of_weight, groups, size) / number
    # times * bent - inverse * (of_mean + normed * of_size), with all that a channel's cells share taken together.
    along = -inverse * inverse * of_size
    rest = -inverse * of_mean - along * mean
    tl.store(result + at, (bent * times[None, :] + (one * along[None, :] + rest[None, :])).to(kind))
    if second > 0:
        back = bent_two * times[None, :] + (two * along[None, :] + rest[None, :])
        tl.store(result + also, back.to(kind), mask=is_real)
