"""Triton kernels for SwiGLU, RMSNorm and residual LayerNorm. Imported only if Triton is installed.

The programs of norms hold whole rows. In the backward pass of LayerNorm, each program loops over rows, and accumulates
their contributions to the gradients of the parameters. Programs do not use atomic additions, so results are
deterministic.
"""

import triton
import triton.language as tl

SWIGLU_BLOCK = 2048
"""Columns per SwiGLU program."""
RMS_WARPS = 4


@triton.jit
def swiglu_forward(gate_up, out, inner, block: tl.constexpr):
    """Compute out (T, I) = silu(gate) * up from gate_up (T, 2 I)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    is_valid = columns < inner
    offsets = row * 2 * inner + columns
    gate = tl.load(gate_up + offsets, mask=is_valid, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(gate_up + offsets + inner, mask=is_valid, other=0.0)
    activated = (gate / (1 + tl.exp(-gate))).to(dtype)
    tl.store(out + row * inner + columns, activated * up, mask=is_valid)


@triton.jit
def swiglu_backward(gate_up, grad_out, grad_in, inner, block: tl.constexpr):
    """Compute the gradient of gate_up (T, 2 I) from grad_out (T, I)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    is_valid = columns < inner
    offsets = row * 2 * inner + columns
    gate = tl.load(gate_up + offsets, mask=is_valid, other=0.0)
    dtype = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(gate_up + offsets + inner, mask=is_valid, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + row * inner + columns, mask=is_valid, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    tl.store(grad_in + offsets, (grad * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype), mask=is_valid)
    tl.store(grad_in + offsets + inner, (grad * gate * sigmoid).to(dtype), mask=is_valid)


@triton.jit
def rms_forward(x, residual, out, inv_rms, eps, width: tl.constexpr, block: tl.constexpr):
    """Compute out (T, W) = (x + residual) * inv_rms, and inv_rms (T)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    offsets, is_valid = row * width + columns, columns < width
    sums = tl.load(x + offsets, mask=is_valid, other=0.0)
    if residual is not None:
        # Round the sum, as a separate addition would.
        extra = tl.load(residual + offsets, mask=is_valid, other=0.0)
        sums = (sums.to(tl.float32) + extra.to(tl.float32)).to(sums.dtype)
    sums32 = sums.to(tl.float32)
    inv = tl.rsqrt(tl.sum(sums32 * sums32, axis=0) / width + eps)
    tl.store(inv_rms + row, inv)
    tl.store(out + offsets, (sums32 * inv).to(out.dtype.element_ty), mask=is_valid)


@triton.jit
def rms_backward(out, inv_rms, grad_out, grad_in, width: tl.constexpr, block: tl.constexpr):
    """Compute grad_in (T, W), the gradient of x + residual, from grad_out and out. The inputs are not read."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    offsets, is_valid = row * width + columns, columns < width
    normalized = tl.load(out + offsets, mask=is_valid, other=0.0).to(tl.float32)
    grad = tl.load(grad_out + offsets, mask=is_valid, other=0.0).to(tl.float32)
    projection = tl.sum(normalized * grad, axis=0) / width
    grad_sum = tl.load(inv_rms + row) * (grad - normalized * projection)
    tl.store(grad_in + offsets, grad_sum.to(grad_in.dtype.element_ty), mask=is_valid)


@triton.jit
def _row_offsets(tile, tokens, width: tl.constexpr, block: tl.constexpr, rows: tl.constexpr):
    """Return the rows of a tile, the offsets of their elements, and the mask of valid elements."""
    row, columns = tile * rows + tl.arange(0, rows), tl.arange(0, block)
    is_valid = (row < tokens)[:, None] & (columns < width)[None, :]
    return row, row.to(tl.int64)[:, None] * width + columns[None, :], is_valid


@triton.jit
def _is_kept(bits, threshold):
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit
def _dropout(x, seed, row, threshold, scale, width: tl.constexpr, block: tl.constexpr):
    """Apply dropout: zero elements whose 31-bit random number is below the threshold, and scale the others.

    One call of the random number generator is used for four adjacent elements.
    """
    counters = row[:, None] * (width // 4) + tl.arange(0, block // 4)[None, :]
    bits1, bits2, bits3, bits4 = tl.randint4x(tl.load(seed), counters)
    even_cols = tl.interleave(_is_kept(bits1, threshold), _is_kept(bits3, threshold))
    odd_cols = tl.interleave(_is_kept(bits2, threshold), _is_kept(bits4, threshold))
    return tl.where(tl.interleave(even_cols, odd_cols), x * scale, 0.0)


@triton.jit
def residual_norm_forward(
    x,
    x_bias,
    residual,
    weight,
    bias,
    seed,
    out32,
    out,
    sums,
    statistics,
    tokens,
    eps,
    threshold,
    scale,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
):
    """Compute sums = dropout(x + x_bias) + residual, their LayerNorm as out32 and out (T, W), and statistics (T, 2)."""
    row, offsets, is_valid = _row_offsets(tl.program_id(0), tokens, width, block, rows)
    columns = tl.arange(0, block)
    sum_row = tl.load(x + offsets, mask=is_valid, other=0.0).to(tl.float32)
    sum_row += tl.load(x_bias + columns, mask=columns < width, other=0.0)[None, :]
    if seed is not None:
        sum_row = _dropout(sum_row, seed, row, threshold, scale, width, block)
    sum_row += tl.load(residual + offsets, mask=is_valid, other=0.0)
    tl.store(sums + offsets, sum_row, mask=is_valid)
    mean = tl.sum(sum_row, axis=1) / width
    centered = tl.where(is_valid, sum_row - mean[:, None], 0.0)
    inv_std = tl.rsqrt(tl.sum(centered * centered, axis=1) / width + eps)
    tl.store(statistics + 2 * row, mean, mask=row < tokens)
    tl.store(statistics + 2 * row + 1, inv_std, mask=row < tokens)
    gain = tl.load(weight + columns, mask=columns < width, other=0.0)
    shift = tl.load(bias + columns, mask=columns < width, other=0.0)
    normalized = centered * inv_std[:, None] * gain[None, :] + shift[None, :]
    tl.store(out32 + offsets, normalized, mask=is_valid)
    tl.store(out + offsets, normalized.to(out.dtype.element_ty), mask=is_valid)


@triton.jit
def residual_norm_backward(
    sums,
    statistics,
    weight,
    seed,
    grad_out32,
    grad_out,
    grad_x,
    grad_residual,
    grad_params,
    tokens,
    threshold,
    scale,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
):
    """Compute the gradients of x and residual (T, W), and in grad_params (P, 3, W) those of weight, bias and x_bias.

    The gradients of the parameters are partial sums, one per program. The dropout mask is computed again from the seed.
    """
    columns = tl.arange(0, block)
    gain = tl.load(weight + columns, mask=columns < width, other=0.0)
    grad_weight = tl.zeros((rows, block), tl.float32)
    grad_bias = tl.zeros((rows, block), tl.float32)
    grad_x_bias = tl.zeros((rows, block), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, rows), tl.num_programs(0)):
        row, offsets, is_valid = _row_offsets(tile, tokens, width, block, rows)
        mean = tl.load(statistics + 2 * row, mask=row < tokens, other=0.0)
        inv_std = tl.load(statistics + 2 * row + 1, mask=row < tokens, other=0.0)
        normalized = (tl.load(sums + offsets, mask=is_valid, other=0.0) - mean[:, None]) * inv_std[:, None]
        grad = tl.zeros((rows, block), tl.float32)
        if grad_out32 is not None:
            grad += tl.load(grad_out32 + offsets, mask=is_valid, other=0.0)
        if grad_out is not None:
            grad += tl.load(grad_out + offsets, mask=is_valid, other=0.0).to(tl.float32)
        grad_weight += normalized * grad
        grad_bias += grad
        grad *= gain[None, :]
        grad_mean = tl.sum(grad, axis=1) / width
        projection = tl.sum(grad * normalized, axis=1) / width
        grad = inv_std[:, None] * (grad - grad_mean[:, None] - normalized * projection[:, None])
        tl.store(grad_residual + offsets, grad, mask=is_valid)
        if seed is not None:
            grad = _dropout(grad, seed, row, threshold, scale, width, block)
        grad_x_bias += grad
        tl.store(grad_x + offsets, grad.to(grad_x.dtype.element_ty), mask=is_valid)
    partial = grad_params + tl.program_id(0).to(tl.int64) * 3 * width + columns
    tl.store(partial, tl.sum(grad_weight, axis=0), mask=columns < width)
    tl.store(partial + width, tl.sum(grad_bias, axis=0), mask=columns < width)
    tl.store(partial + 2 * width, tl.sum(grad_x_bias, axis=0), mask=columns < width)
