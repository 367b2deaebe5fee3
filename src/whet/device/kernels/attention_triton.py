"""Triton kernels for rotary attention. Imported only if Triton is installed.

A program processes all positions of a head of one row as a single block. So it needs no sums over blocks and saves no
softmax statistics, and it loads q, k and v once. It loops over several heads, and prefetches the next head while it
computes.

Parameters have only Triton annotations, because Triton interprets every annotation as one of its types.
"""

import triton
import triton.language as tl

WARPS = 8
"""Warps per program. 4 and 16 were slower on an H200 with 97 positions and heads of size 64."""


@triton.jit
def _load_halves(qkv, half_cols, is_valid, half: tl.constexpr):
    """Load the first and the second half of a head's columns at all positions."""
    x1 = tl.load(qkv + half_cols, mask=is_valid, other=0.0)
    return x1, tl.load(qkv + half + half_cols, mask=is_valid, other=0.0)


@triton.jit
def rotate(x1, x2, cos, sin):
    """Rotate the two halves in float32, and round the result to their dtype."""
    dtype = x1.dtype
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit
def rotate_back(x1, x2, cos, sin):
    """Return the gradients of the halves, given float32 gradients of the rotated halves."""
    return x1 * cos + x2 * sin, x2 * cos - x1 * sin


@triton.jit
def _store_grad_halves(grad_qkv, x1, x2, cos, sin, half_cols, is_valid, half: tl.constexpr):
    """Rotate gradients back, and store them at the offsets that `_load_halves` loads."""
    dtype = grad_qkv.dtype.element_ty
    x1, x2 = rotate_back(x1, x2, cos, sin)
    tl.store(grad_qkv + half_cols, x1.to(dtype), mask=is_valid)
    tl.store(grad_qkv + half + half_cols, x2.to(dtype), mask=is_valid)


@triton.jit
def _softmax_terms(q1, q2, k1, k2, is_key, scale):
    """Return the unnormalized softmax weights in float32, and the inverse of their sum for each query."""
    scores = tl.dot(q1, tl.trans(k1))
    scores = tl.dot(q2, tl.trans(k2), acc=scores)
    scores = tl.where(is_key, scores, float("-inf"))
    log2_e: tl.constexpr = 1.4426950408889634
    weights = tl.exp2(scores * (scale * log2_e) - (tl.max(scores, axis=1) * (scale * log2_e))[:, None])
    return weights, 1 / tl.sum(weights, axis=1)[:, None]


@triton.jit
def rotary_forward(
    qkv,
    cos_table,
    sin_table,
    out,
    num_positions,
    scale,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    block: tl.constexpr,
    heads_per_program: tl.constexpr,
):
    """Compute out (B, S, H D) from qkv (B, S, 3 H D). Only the first half of the tables (S, D) is read."""
    half: tl.constexpr = head_size // 2
    width: tl.constexpr = heads * head_size
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * heads_per_program
    half_cols, cols = tl.arange(0, half)[None, :], tl.arange(0, head_size)[None, :]
    positions = tl.arange(0, block)[:, None]
    is_valid, is_key = positions < num_positions, tl.arange(0, block)[None, :] < num_positions
    cos = tl.load(cos_table + positions * head_size + half_cols, mask=is_valid, other=0.0)
    sin = tl.load(sin_table + positions * head_size + half_cols, mask=is_valid, other=0.0)
    qkv += row * num_positions * (3 * width) + positions * (3 * width) + head * head_size
    out += row * num_positions * width + positions * width + head * head_size
    for _ in tl.range(heads_per_program, num_stages=2):
        q1, q2 = _load_halves(qkv, half_cols, is_valid, half)
        k1, k2 = _load_halves(qkv + width, half_cols, is_valid, half)
        v = tl.load(qkv + 2 * width + cols, mask=is_valid, other=0.0)
        q1, q2 = rotate(q1, q2, cos, sin)
        k1, k2 = rotate(k1, k2, cos, sin)
        weights, inv_sum = _softmax_terms(q1, q2, k1, k2, is_key, scale)
        acc = tl.dot(weights.to(v.dtype), v) * inv_sum
        tl.store(out + cols, acc.to(v.dtype), mask=is_valid)
        qkv += head_size
        out += head_size


@triton.jit
def rotary_backward(
    qkv,
    cos_table,
    sin_table,
    grad_out,
    grad_qkv,
    num_positions,
    scale,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    block: tl.constexpr,
    heads_per_program: tl.constexpr,
):
    """Compute grad_qkv (B, S, 3 H D) from grad_out (B, S, H D), recomputing the softmax."""
    half: tl.constexpr = head_size // 2
    width: tl.constexpr = heads * head_size
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * heads_per_program
    half_cols, cols = tl.arange(0, half)[None, :], tl.arange(0, head_size)[None, :]
    positions = tl.arange(0, block)[:, None]
    is_valid, is_key = positions < num_positions, tl.arange(0, block)[None, :] < num_positions
    cos = tl.load(cos_table + positions * head_size + half_cols, mask=is_valid, other=0.0)
    sin = tl.load(sin_table + positions * head_size + half_cols, mask=is_valid, other=0.0)
    offset = row * num_positions * (3 * width) + positions * (3 * width) + head * head_size
    qkv += offset
    grad_qkv += offset
    grad_out += row * num_positions * width + positions * width + head * head_size
    for _ in tl.range(heads_per_program, num_stages=2):
        q1, q2 = _load_halves(qkv, half_cols, is_valid, half)
        k1, k2 = _load_halves(qkv + width, half_cols, is_valid, half)
        grad = tl.load(grad_out + cols, mask=is_valid, other=0.0)
        v = tl.load(qkv + 2 * width + cols, mask=is_valid, other=0.0)
        q1, q2 = rotate(q1, q2, cos, sin)
        k1, k2 = rotate(k1, k2, cos, sin)
        dtype = grad.dtype
        weights, inv_sum = _softmax_terms(q1, q2, k1, k2, is_key, scale)
        probs = weights * inv_sum
        grad_v = tl.dot(tl.trans(probs.to(dtype)), grad)
        tl.store(grad_qkv + 2 * width + cols, grad_v.to(dtype), mask=is_valid)
        grad_probs = tl.dot(grad, tl.trans(v))
        delta = tl.sum(probs * grad_probs, axis=1)[:, None]
        grad_scores = (probs * (grad_probs - delta) * scale).to(dtype)
        _store_grad_halves(
            grad_qkv, tl.dot(grad_scores, k1), tl.dot(grad_scores, k2), cos, sin, half_cols, is_valid, half
        )
        grad_scores_t = tl.trans(grad_scores)
        _store_grad_halves(
            grad_qkv + width, tl.dot(grad_scores_t, q1), tl.dot(grad_scores_t, q2), cos, sin, half_cols, is_valid, half
        )
        qkv += head_size
        grad_qkv += head_size
        grad_out += head_size
