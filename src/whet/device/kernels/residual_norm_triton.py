"""Triton kernels of the residual LayerNorm. Imported only where triton is installed."""

import triton
import triton.language as tl


@triton.jit
def _row_offsets(tile, tokens, width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr):
    """The rows of a tile; where their numbers are; and which of those there are."""
    row, column = tile * rows + tl.arange(0, rows), tl.arange(0, columns)
    is_real = (row < tokens)[:, None] & (column < width)[None, :]
    return row, row.to(tl.int64)[:, None] * width + column[None, :], is_real


@triton.jit
def _is_kept(drawn, limit):
    return (drawn >> 1).to(tl.int32) >= limit


@triton.jit
def _dropout(x, seed, row, limit, scale, width: tl.constexpr, columns: tl.constexpr):
    """Dropout: a number stays, `scale` times as large, unless 31 bits drawn for it are below the limit."""
    fours = row[:, None] * (width // 4) + tl.arange(0, columns // 4)[None, :]
    one, two, three, four = tl.randint4x(tl.load(seed), fours)
    odd = tl.interleave(_is_kept(one, limit), _is_kept(three, limit))
    even = tl.interleave(_is_kept(two, limit), _is_kept(four, limit))
    return tl.where(tl.interleave(odd, even), x * scale, 0.0)


@triton.jit
def residual_norm_forward(
    x,
    plus,
    before,
    weight,
    bias,
    seed,
    wide,
    narrow,
    sums,
    statistics,
    tokens,
    eps,
    limit,
    scale,
    width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """wide and narrow, the norm of sums, which are before and what stays of x + plus; (T, W), and statistics (T, 2)."""
    row, at, is_real = _row_offsets(tl.program_id(0), tokens, width, columns, rows)
    column = tl.arange(0, columns)
    found = tl.load(x + at, mask=is_real, other=0.0).to(tl.float32)
    found += tl.load(plus + column, mask=column < width, other=0.0)[None, :]
    if seed is not None:
        found = _dropout(found, seed, row, limit, scale, width, columns)
    found += tl.load(before + at, mask=is_real, other=0.0)
    tl.store(sums + at, found, mask=is_real)
    mean = tl.sum(found, axis=1) / width
    off = tl.where(is_real, found - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(off * off, axis=1) / width + eps)
    tl.store(statistics + 2 * row, mean, mask=row < tokens)
    tl.store(statistics + 2 * row + 1, inverse, mask=row < tokens)
    times = tl.load(weight + column, mask=column < width, other=0.0)
    shift = tl.load(bias + column, mask=column < width, other=0.0)
    found = off * inverse[:, None] * times[None, :] + shift[None, :]
    tl.store(wide + at, found, mask=is_real)
    tl.store(narrow + at, found.to(narrow.dtype.element_ty), mask=is_real)


@triton.jit
def residual_norm_backward(
    sums,
    statistics,
    weight,
    seed,
    of_wide,
    of_narrow,
    of_x,
    of_before,
    of_weights,
    tokens,
    limit,
    scale,
    width: tl.constexpr,
    columns: tl.constexpr,
    rows: tl.constexpr,
):
    """The slopes of x and before, (T, W), from those of wide and narrow; and of_weights (P, 3, W), what the rows of
    each of P programs give to weight, bias and plus."""
    column = tl.arange(0, columns)
    times = tl.load(weight + column, mask=column < width, other=0.0)
    of_weight = tl.zeros((rows, columns), tl.float32)
    of_bias = tl.zeros((rows, columns), tl.float32)
    of_plus = tl.zeros((rows, columns), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, rows), tl.num_programs(0)):
        row, at, is_real = _row_offsets(tile, tokens, width, columns, rows)
        mean = tl.load(statistics + 2 * row, mask=row < tokens, other=0.0)
        inverse = tl.load(statistics + 2 * row + 1, mask=row < tokens, other=0.0)
        normed = (tl.load(sums + at, mask=is_real, other=0.0) - mean[:, None]) * inverse[:, None]
        slope = tl.zeros((rows, columns), tl.float32)
        if of_wide is not None:
            slope += tl.load(of_wide + at, mask=is_real, other=0.0)
        if of_narrow is not None:
            slope += tl.load(of_narrow + at, mask=is_real, other=0.0).to(tl.float32)
        of_weight += normed * slope
        of_bias += slope
        slope *= times[None, :]
        of_mean = tl.sum(slope, axis=1) / width
        along = tl.sum(slope * normed, axis=1) / width
        slope = inverse[:, None] * (slope - of_mean[:, None] - normed * along[:, None])
        tl.store(of_before + at, slope, mask=is_real)
        if seed is not None:
            slope = _dropout(slope, seed, row, limit, scale, width, columns)
        of_plus += slope
        tl.store(of_x + at, slope.to(of_x.dtype.element_ty), mask=is_real)
    here = of_weights + tl.program_id(0).to(tl.int64) * 3 * width + column
    tl.store(here, tl.sum(of_weight, axis=0), mask=column < width)
    tl.store(here + width, tl.sum(of_bias, axis=0), mask=column < width)
    tl.store(here + 2 * width, tl.sum(of_plus, axis=0), mask=column < width)
