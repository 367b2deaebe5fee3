"""Triton kernels for span attention. Imported only if Triton is installed.

A program holds a tile of tokens of one head, and loops only over the tokens to which any of them may attend. So the
cost of many short spans depends on their number of tokens, not on the longest span or the length of the row. In the
backward pass, one kernel computes the gradients of queries, and another one those of keys and values. Programs do not
use atomic additions, so results are deterministic. Nothing is prefetched, because enough programs fit on a
multiprocessor to hide the latency of loads.

Parameters have only Triton annotations, because Triton interprets every annotation as one of its types.
"""

import triton
import triton.language as tl

from whet.device.kernels.attention_triton import rotate, rotate_back

_LOG2_E = tl.constexpr(1.4426950408889634)
"""Factor that turns exp into exp2, for which the GPU has an instruction."""
_MIN_SCORE = tl.constexpr(-1e30)
"""Initial maximum, below every score. It is finite, because the difference of two infinities is NaN."""


@triton.jit
def _rotation(cos_table, sin_table, tokens, span, half_cols, is_valid, head_size: tl.constexpr):
    """Return the table rows of these tokens. The position of a token is its distance from the start of its span."""
    at = (tokens - span)[:, None] * head_size + half_cols
    cos = tl.load(cos_table + at, mask=is_valid[:, None], other=0.0)
    return cos, tl.load(sin_table + at, mask=is_valid[:, None], other=0.0)


@triton.jit
def _load_rotated(
    x_ptr,
    offsets,
    is_valid,
    cos_table,
    sin_table,
    tokens,
    span,
    half_cols,
    head_size: tl.constexpr,
    is_rotary: tl.constexpr,
):
    """Load the two halves of queries or keys, and rotate them if is_rotary."""
    x1 = tl.load(x_ptr + offsets, mask=is_valid[:, None], other=0.0)
    x2 = tl.load(x_ptr + head_size // 2 + offsets, mask=is_valid[:, None], other=0.0)
    if is_rotary:
        cos, sin = _rotation(cos_table, sin_table, tokens, span, half_cols, is_valid, head_size)
        x1, x2 = rotate(x1, x2, cos, sin)
    return x1, x2


@triton.jit
def _store_rotated_back(
    x_ptr,
    x1,
    x2,
    offsets,
    is_valid,
    cos_table,
    sin_table,
    tokens,
    span,
    half_cols,
    head_size: tl.constexpr,
    is_rotary: tl.constexpr,
):
    """Rotate gradients back if is_rotary, and store them at the offsets that `_load_rotated` loads."""
    dtype = x_ptr.dtype.element_ty
    if is_rotary:
        cos, sin = _rotation(cos_table, sin_table, tokens, span, half_cols, is_valid, head_size)
        x1, x2 = rotate_back(x1, x2, cos, sin)
    tl.store(x_ptr + offsets, x1.to(dtype), mask=is_valid[:, None])
    tl.store(x_ptr + head_size // 2 + offsets, x2.to(dtype), mask=is_valid[:, None])


@triton.jit
def _scores(a1, a2, b1, b2):
    return tl.dot(a2, tl.trans(b2), acc=tl.dot(a1, tl.trans(b1)))


@triton.jit
def _tile(tiles, heads: tl.constexpr):
    """Return the head of this program and the four numbers of its tile (`Spans.tiles`)."""
    tiles += tl.program_id(0) // heads * 4
    head = tl.program_id(0) % heads
    return head, tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)


@triton.jit(do_not_specialize=("num_tokens",))
def span_forward(
    qkv,
    span_starts,
    tiles,
    cos_table,
    sin_table,
    out,
    lses,
    num_tokens,
    scale,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    is_causal: tl.constexpr,
    is_rotary: tl.constexpr,
    block: tl.constexpr,
    piece: tl.constexpr,
):
    """Compute out (T, H D) from qkv (T, 3 H D), and lses (H, T), the base-2 log-sum-exps of the scores."""
    width: tl.constexpr = heads * head_size
    head, begin, end, low, high = _tile(tiles, heads)
    rows, piece_rows = tl.arange(0, block), tl.arange(0, piece)
    half_cols, cols = tl.arange(0, head_size // 2)[None, :], tl.arange(0, head_size)[None, :]
    row_offsets, piece_offsets = rows[:, None] * (3 * width), piece_rows[:, None] * (3 * width)
    tokens = begin + rows
    is_valid = tokens < end
    span = tl.load(span_starts + tokens, mask=is_valid, other=-1)
    qkv += head * head_size
    qkv_tile = qkv + begin.to(tl.int64) * (3 * width)
    q1, q2 = _load_rotated(
        qkv_tile, row_offsets + half_cols, is_valid, cos_table, sin_table, tokens, span, half_cols, head_size, is_rotary
    )
    if is_causal:
        high = end
    max_score = tl.full((block,), _MIN_SCORE, tl.float32)
    total = tl.zeros((block,), tl.float32)
    acc = tl.zeros((block, head_size), tl.float32)
    for index in range((high - low + piece - 1) // piece):
        start = low + index * piece
        keys = start + piece_rows
        is_key = keys < high
        key_span = tl.load(span_starts + keys, mask=is_key, other=-2)
        kv_piece = qkv + start.to(tl.int64) * (3 * width) + width
        k1, k2 = _load_rotated(
            kv_piece,
            piece_offsets + half_cols,
            is_key,
            cos_table,
            sin_table,
            keys,
            key_span,
            half_cols,
            head_size,
            is_rotary,
        )
        v = tl.load(kv_piece + width + piece_offsets + cols, mask=is_key[:, None], other=0.0)
        is_visible = span[:, None] == key_span[None, :]
        if is_causal:
            is_visible &= tokens[:, None] >= keys[None, :]
        scores = tl.where(is_visible, _scores(q1, q2, k1, k2) * (scale * _LOG2_E), float("-inf"))
        # Online softmax: rescale the sums that were accumulated with the previous maximum.
        new_max = tl.maximum(max_score, tl.max(scores, axis=1))
        probs = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(max_score - new_max)
        total = total * rescale + tl.sum(probs, axis=1)
        acc = tl.dot(probs.to(v.dtype), v, acc=acc * rescale[:, None])
        max_score = new_max
    acc = acc / total[:, None]
    at = (begin.to(tl.int64) * width + head * head_size) + rows[:, None] * width + cols
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_valid[:, None])
    # The backward pass recomputes the probabilities from this value.
    tl.store(lses + head * num_tokens + tokens, max_score + tl.log2(total), mask=is_valid)


@triton.jit(do_not_specialize=("num_tokens",))
def span_backward_queries(
    qkv,
    span_starts,
    tiles,
    cos_table,
    sin_table,
    out,
    lses,
    deltas,
    grad_out,
    grad_qkv,
    num_tokens,
    scale,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    is_causal: tl.constexpr,
    is_rotary: tl.constexpr,
    block: tl.constexpr,
    piece: tl.constexpr,
):
    """Compute the gradients of queries, and deltas (H, T): the sum of grad_out * out for each head and token."""
    width: tl.constexpr = heads * head_size
    head, begin, end, low, high = _tile(tiles, heads)
    rows, piece_rows = tl.arange(0, block), tl.arange(0, piece)
    half_cols, cols = tl.arange(0, head_size // 2)[None, :], tl.arange(0, head_size)[None, :]
    row_offsets, piece_offsets = rows[:, None] * (3 * width), piece_rows[:, None] * (3 * width)
    tokens = begin + rows
    is_valid = tokens < end
    span = tl.load(span_starts + tokens, mask=is_valid, other=-1)
    qkv += head * head_size
    qkv_tile = qkv + begin.to(tl.int64) * (3 * width)
    q1, q2 = _load_rotated(
        qkv_tile, row_offsets + half_cols, is_valid, cos_table, sin_table, tokens, span, half_cols, head_size, is_rotary
    )
    out_offsets = begin.to(tl.int64) * width + head * head_size + rows[:, None] * width + cols
    grad = tl.load(grad_out + out_offsets, mask=is_valid[:, None], other=0.0)
    out_tile = tl.load(out + out_offsets, mask=is_valid[:, None], other=0.0)
    lse = tl.load(lses + head * num_tokens + tokens, mask=is_valid, other=0.0)
    # sum(grad_out * out) equals the sum of probs * grad_probs over all keys.
    delta = tl.sum(grad.to(tl.float32) * out_tile.to(tl.float32), axis=1)
    tl.store(deltas + head * num_tokens + tokens, delta, mask=is_valid)
    grad_q1, grad_q2 = tl.zeros((block, head_size // 2), tl.float32), tl.zeros((block, head_size // 2), tl.float32)
    if is_causal:
        high = end
    for index in range((high - low + piece - 1) // piece):
        start = low + index * piece
        keys = start + piece_rows
        is_key = keys < high
        key_span = tl.load(span_starts + keys, mask=is_key, other=-2)
        kv_piece = qkv + start.to(tl.int64) * (3 * width) + width
        k1, k2 = _load_rotated(
            kv_piece,
            piece_offsets + half_cols,
            is_key,
            cos_table,
            sin_table,
            keys,
            key_span,
            half_cols,
            head_size,
            is_rotary,
        )
        v = tl.load(kv_piece + width + piece_offsets + cols, mask=is_key[:, None], other=0.0)
        is_visible = span[:, None] == key_span[None, :]
        if is_causal:
            is_visible &= tokens[:, None] >= keys[None, :]
        scores = _scores(q1, q2, k1, k2) * (scale * _LOG2_E)
        probs = tl.where(is_visible, tl.exp2(scores - lse[:, None]), 0.0)
        grad_probs = tl.dot(grad, tl.trans(v))
        grad_scores = (probs * (grad_probs - delta[:, None]) * scale).to(grad.dtype)
        grad_q1 = tl.dot(grad_scores, k1, acc=grad_q1)
        grad_q2 = tl.dot(grad_scores, k2, acc=grad_q2)
    grad_qkv += head * head_size + begin.to(tl.int64) * (3 * width)
    _store_rotated_back(
        grad_qkv,
        grad_q1,
        grad_q2,
        row_offsets + half_cols,
        is_valid,
        cos_table,
        sin_table,
        tokens,
        span,
        half_cols,
        head_size,
        is_rotary,
    )


@triton.jit(do_not_specialize=("num_tokens",))
def span_backward_keys_values(
    qkv,
    span_starts,
    tiles,
    cos_table,
    sin_table,
    lses,
    deltas,
    grad_out,
    grad_qkv,
    num_tokens,
    scale,
    heads: tl.constexpr,
    head_size: tl.constexpr,
    is_causal: tl.constexpr,
    is_rotary: tl.constexpr,
    block: tl.constexpr,
    piece: tl.constexpr,
):
    """Compute the gradients of keys and values. Run `span_backward_queries` first, because it computes the deltas."""
    width: tl.constexpr = heads * head_size
    head, begin, end, low, high = _tile(tiles, heads)
    rows, piece_rows = tl.arange(0, block), tl.arange(0, piece)
    half_cols, cols = tl.arange(0, head_size // 2)[None, :], tl.arange(0, head_size)[None, :]
    row_offsets, piece_offsets = rows[:, None] * (3 * width), piece_rows[:, None] * (3 * width)
    tokens = begin + rows
    is_valid = tokens < end
    span = tl.load(span_starts + tokens, mask=is_valid, other=-1)
    qkv += head * head_size
    grad_out += head * head_size
    lses += head * num_tokens
    deltas += head * num_tokens
    grad_qkv += head * head_size + begin.to(tl.int64) * (3 * width)
    qkv_tile = qkv + begin.to(tl.int64) * (3 * width) + width
    k1, k2 = _load_rotated(
        qkv_tile, row_offsets + half_cols, is_valid, cos_table, sin_table, tokens, span, half_cols, head_size, is_rotary
    )
    v = tl.load(qkv_tile + width + row_offsets + cols, mask=is_valid[:, None], other=0.0)
    dtype = v.dtype
    grad_k1, grad_k2 = tl.zeros((block, head_size // 2), tl.float32), tl.zeros((block, head_size // 2), tl.float32)
    grad_v = tl.zeros((block, head_size), tl.float32)
    if is_causal:
        low = begin
    for index in range((high - low + piece - 1) // piece):
        start = low + index * piece
        queries = start + piece_rows
        is_query = queries < high
        query_span = tl.load(span_starts + queries, mask=is_query, other=-2)
        q_piece = qkv + start.to(tl.int64) * (3 * width)
        q1, q2 = _load_rotated(
            q_piece,
            piece_offsets + half_cols,
            is_query,
            cos_table,
            sin_table,
            queries,
            query_span,
            half_cols,
            head_size,
            is_rotary,
        )
        out_offsets = start.to(tl.int64) * width + piece_rows[:, None] * width + cols
        grad = tl.load(grad_out + out_offsets, mask=is_query[:, None], other=0.0)
        lse = tl.load(lses + queries, mask=is_query, other=0.0)
        delta = tl.load(deltas + queries, mask=is_query, other=0.0)
        is_visible = span[:, None] == query_span[None, :]
        if is_causal:
            is_visible &= tokens[:, None] <= queries[None, :]
        scores = _scores(k1, k2, q1, q2) * (scale * _LOG2_E)
        probs = tl.where(is_visible, tl.exp2(scores - lse[None, :]), 0.0)
        grad_v = tl.dot(probs.to(dtype), grad, acc=grad_v)
        grad_probs = tl.dot(v, tl.trans(grad))
        grad_scores = (probs * (grad_probs - delta[None, :]) * scale).to(dtype)
        grad_k1 = tl.dot(grad_scores, q1, acc=grad_k1)
        grad_k2 = tl.dot(grad_scores, q2, acc=grad_k2)
    tl.store(grad_qkv + 2 * width + row_offsets + cols, grad_v.to(dtype), mask=is_valid[:, None])
    grad_qkv += width
    _store_rotated_back(
        grad_qkv,
        grad_k1,
        grad_k2,
        row_offsets + half_cols,
        is_valid,
        cos_table,
        sin_table,
        tokens,
        span,
        half_cols,
        head_size,
        is_rotary,
    )
