"""Triton kernels of RMSNorm. Imported only where triton is installed."""

import triton
import triton.language as tl

WARPS = 4


@triton.jit
def rms_forward(x, added, found, inverses, eps, width: tl.constexpr, columns: tl.constexpr):
    """found (T, W), the sums of x and added over the roots of their mean squares; inverses (T), 1 over those."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, columns)
    at, is_real = row * width + column, column < width
    sums = tl.load(x + at, mask=is_real, other=0.0)
    if added is not None:
        # Rounded, as a sum of its own would be.
        more = tl.load(added + at, mask=is_real, other=0.0)
        sums = (sums.to(tl.float32) + more.to(tl.float32)).to(sums.dtype)
    wide = sums.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(inverses + row, inverse)
    tl.store(found + at, (wide * inverse).to(found.dtype.element_ty), mask=is_real)


@triton.jit
def rms_backward(found, inverses, slopes, result, width: tl.constexpr, columns: tl.constexpr):
    """result (T, W), the slopes of the sums, from those of found."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, columns)
    at, is_real = row * width + column, column < width
    normed = tl.load(found + at, mask=is_real, other=0.0).to(tl.float32)
    slope = tl.load(slopes + at, mask=is_real, other=0.0).to(tl.float32)
    along = tl.sum(normed * slope, axis=0) / width
    back = tl.load(inverses + row) * (slope - normed * along)
    tl.store(result + at, back.to(result.dtype.element_ty), mask=is_real)
