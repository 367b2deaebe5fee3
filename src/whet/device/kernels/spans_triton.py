"""Triton kernels of span attention. Imported only where triton is installed."""

import triton
import triton.language as tl

from whet.device.kernels.attention_triton import rotate, rotate_back

_LOG2_E = tl.constexpr(1.4426950408889634)
"""Powers of e as powers of two, of which the GPU has an instruction."""
_MIN_SCORE = tl.constexpr(-1e30)
"""Below every score, and a number: the difference of two infinities is none."""


@triton.jit
def _rotation(cosines, sines, tokens, first, few, is_real, size: tl.constexpr):
    """The tables' rows of these tokens: a token's place is its distance from its span's first one."""
    at = (tokens - first)[:, None] * size + few
    cosine = tl.load(cosines + at, mask=is_real[:, None], other=0.0)
    return cosine, tl.load(sines + at, mask=is_real[:, None], other=0.0)


@triton.jit
def _load_rotated(
    halves, offsets, is_real, cosines, sines, tokens, first, few, size: tl.constexpr, is_turned: tl.constexpr
):
    """Two halves of queries or keys; turned in float32 and rounded to the format they came in."""
    one = tl.load(halves + offsets, mask=is_real[:, None], other=0.0)
    two = tl.load(halves + size // 2 + offsets, mask=is_real[:, None], other=0.0)
    if is_turned:
        cosine, sine = _rotation(cosines, sines, tokens, first, few, is_real, size)
        one, two = rotate(one, two, cosine, sine)
    return one, two


@triton.jit
def _store_rotated_back(
    halves, one, two, offsets, is_real, cosines, sines, tokens, first, few, size: tl.constexpr, is_turned: tl.constexpr
):
    """The slopes of halves that `_load_rotated` gave, turned back, go where the halves came from."""
    kind = halves.dtype.element_ty
    if is_turned:
        cosine, sine = _rotation(cosines, sines, tokens, first, few, is_real, size)
        one, two = rotate_back(one, two, cosine, sine)
    tl.store(halves + offsets, one.to(kind), mask=is_real[:, None])
    tl.store(halves + size // 2 + offsets, two.to(kind), mask=is_real[:, None])


@triton.jit
def _scores(rows1, rows2, columns1, columns2):
    return tl.dot(rows2, tl.trans(columns2), acc=tl.dot(rows1, tl.trans(columns1)))


@triton.jit
def _tile(tiles, heads: tl.constexpr):
    """This program's head, and the four numbers of its tile (`Spans.tiles`)."""
    tiles += tl.program_id(0) // heads * 4
    head = tl.program_id(0) % heads
    return head, tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)


@triton.jit(do_not_specialize=("num_tokens",))
def span_forward(
    mixture,
    firsts,
    tiles,
    cosines,
    sines,
    found,
    levels,
    num_tokens,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    is_causal: tl.constexpr,
    is_turned: tl.constexpr,
    block: tl.constexpr,
    piece: tl.constexpr,
):
    """found (T, H D) from mixture (T, 3 H D), and levels (H, T): the logarithm, to base 2, of a softmax's sum."""
    width: tl.constexpr = heads * size
    head, begin, end, low, high = _tile(tiles, heads)
    lines, steps = tl.arange(0, block), tl.arange(0, piece)
    few, all_ = tl.arange(0, size // 2)[None, :], tl.arange(0, size)[None, :]
    near, far = lines[:, None] * (3 * width), steps[:, None] * (3 * width)
    tokens = begin + lines
    is_real = tokens < end
    first = tl.load(firsts + tokens, mask=is_real, other=-1)
    mixture += head * size
    here = mixture + begin.to(tl.int64) * (3 * width)
    queries1, queries2 = _load_rotated(here, near + few, is_real, cosines, sines, tokens, first, few, size, is_turned)
    if is_causal:
        high = end
    highest = tl.full((block,), _MIN_SCORE, tl.float32)
    total = tl.zeros((block,), tl.float32)
    answer = tl.zeros((block, size), tl.float32)
    for number in range((high - low + piece - 1) // piece):
        start = low + number * piece
        others = start + steps
        is_there = others < high
        its_first = tl.load(firsts + others, mask=is_there, other=-2)
        there = mixture + start.to(tl.int64) * (3 * width) + width
        keys1, keys2 = _load_rotated(
            there, far + few, is_there, cosines, sines, others, its_first, few, size, is_turned
        )
        values = tl.load(there + width + far + all_, mask=is_there[:, None], other=0.0)
        is_seen = first[:, None] == its_first[None, :]
        if is_causal:
            is_seen &= tokens[:, None] >= others[None, :]
        scores = tl.where(is_seen, _scores(queries1, queries2, keys1, keys2) * (scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        shares = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(shares, axis=1)
        answer = tl.dot(shares.to(values.dtype), values, acc=answer * shrink[:, None])
        highest = higher
    answer = answer / total[:, None]
    at = (begin.to(tl.int64) * width + head * size) + lines[:, None] * width + all_
    tl.store(found + at, answer.to(found.dtype.element_ty), mask=is_real[:, None])
    tl.store(levels + head * num_tokens + tokens, highest + tl.log2(total), mask=is_real)


@triton.jit(do_not_specialize=("num_tokens",))
def span_backward_queries(
    mixture,
    firsts,
    tiles,
    cosines,
    sines,
    found,
    levels,
    means,
    slopes,
    result,
    num_tokens,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    is_causal: tl.constexpr,
    is_turned: tl.constexpr,
    block: tl.constexpr,
    piece: tl.constexpr,
):
    """The slopes of queries into result, as mixture is, from slopes, as found is; and means (H, T): of the slopes of a
    softmax's shares. Shares are computed again."""
    width: tl.constexpr = heads * size
    head, begin, end, low, high = _tile(tiles, heads)
    lines, steps = tl.arange(0, block), tl.arange(0, piece)
    few, all_ = tl.arange(0, size // 2)[None, :], tl.arange(0, size)[None, :]
    near, far = lines[:, None] * (3 * width), steps[:, None] * (3 * width)
    tokens = begin + lines
    is_real = tokens < end
    first = tl.load(firsts + tokens, mask=is_real, other=-1)
    mixture += head * size
    here = mixture + begin.to(tl.int64) * (3 * width)
    queries1, queries2 = _load_rotated(here, near + few, is_real, cosines, sines, tokens, first, few, size, is_turned)
    aside = begin.to(tl.int64) * width + head * size + lines[:, None] * width + all_
    slope = tl.load(slopes + aside, mask=is_real[:, None], other=0.0)
    answer = tl.load(found + aside, mask=is_real[:, None], other=0.0)
    level = tl.load(levels + head * num_tokens + tokens, mask=is_real, other=0.0)
    mean = tl.sum(slope.to(tl.float32) * answer.to(tl.float32), axis=1)
    tl.store(means + head * num_tokens + tokens, mean, mask=is_real)
    of_queries1, of_queries2 = tl.zeros((block, size // 2), tl.float32), tl.zeros((block, size // 2), tl.float32)
    if is_causal:
        high = end
    for number in range((high - low + piece - 1) // piece):
        start = low + number * piece
        others = start + steps
        is_there = others < high
        its_first = tl.load(firsts + others, mask=is_there, other=-2)
        there = mixture + start.to(tl.int64) * (3 * width) + width
        keys1, keys2 = _load_rotated(
            there, far + few, is_there, cosines, sines, others, its_first, few, size, is_turned
        )
        values = tl.load(there + width + far + all_, mask=is_there[:, None], other=0.0)
        is_seen = first[:, None] == its_first[None, :]
        if is_causal:
            is_seen &= tokens[:, None] >= others[None, :]
        scores = _scores(queries1, queries2, keys1, keys2) * (scale * _LOG2_E)
        shares = tl.where(is_seen, tl.exp2(scores - level[:, None]), 0.0)
        of_shares = tl.dot(slope, tl.trans(values))
        of_scores = (shares * (of_shares - mean[:, None]) * scale).to(slope.dtype)
        of_queries1 = tl.dot(of_scores, keys1, acc=of_queries1)
        of_queries2 = tl.dot(of_scores, keys2, acc=of_queries2)
    result += head * size + begin.to(tl.int64) * (3 * width)
    _store_rotated_back(
        result, of_queries1, of_queries2, near + few, is_real, cosines, sines, tokens, first, few, size, is_turned
    )


@triton.jit(do_not_specialize=("num_tokens",))
def span_backward_keys_values(
    mixture,
    firsts,
    tiles,
    cosines,
    sines,
    levels,
    means,
    slopes,
    result,
    num_tokens,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    is_causal: tl.constexpr,
    is_turned: tl.constexpr,
    block: tl.constexpr,
    piece: tl.constexpr,
):
    """The slopes of keys and values into result; all else as in `span_backward_queries`, which finds the means."""
    width: tl.constexpr = heads * size
    head, begin, end, low, high = _tile(tiles, heads)
    lines, steps = tl.arange(0, block), tl.arange(0, piece)
    few, all_ = tl.arange(0, size // 2)[None, :], tl.arange(0, size)[None, :]
    near, far = lines[:, None] * (3 * width), steps[:, None] * (3 * width)
    tokens = begin + lines
    is_real = tokens < end
    first = tl.load(firsts + tokens, mask=is_real, other=-1)
    mixture += head * size
    slopes += head * size
    levels += head * num_tokens
    means += head * num_tokens
    result += head * size + begin.to(tl.int64) * (3 * width)
    here = mixture + begin.to(tl.int64) * (3 * width) + width
    keys1, keys2 = _load_rotated(here, near + few, is_real, cosines, sines, tokens, first, few, size, is_turned)
    values = tl.load(here + width + near + all_, mask=is_real[:, None], other=0.0)
    kind = values.dtype
    of_keys1, of_keys2 = tl.zeros((block, size // 2), tl.float32), tl.zeros((block, size // 2), tl.float32)
    of_values = tl.zeros((block, size), tl.float32)
    if is_causal:
        low = begin
    for number in range((high - low + piece - 1) // piece):
        start = low + number * piece
        others = start + steps
        is_there = others < high
        its_first = tl.load(firsts + others, mask=is_there, other=-2)
        there = mixture + start.to(tl.int64) * (3 * width)
        queries1, queries2 = _load_rotated(
            there, far + few, is_there, cosines, sines, others, its_first, few, size, is_turned
        )
        aside = start.to(tl.int64) * width + steps[:, None] * width + all_
        slope = tl.load(slopes + aside, mask=is_there[:, None], other=0.0)
        level = tl.load(levels + others, mask=is_there, other=0.0)
        mean = tl.load(means + others, mask=is_there, other=0.0)
        is_seen = first[:, None] == its_first[None, :]
        if is_causal:
            is_seen &= tokens[:, None] <= others[None, :]
        scores = _scores(keys1, keys2, queries1, queries2) * (scale * _LOG2_E)
        shares = tl.where(is_seen, tl.exp2(scores - level[None, :]), 0.0)
        of_values = tl.dot(shares.to(kind), slope, acc=of_values)
        of_shares = tl.dot(values, tl.trans(slope))
        of_scores = (shares * (of_shares - mean[None, :]) * scale).to(kind)
        of_keys1 = tl.dot(of_scores, queries1, acc=of_keys1)
        of_keys2 = tl.dot(of_scores, queries2, acc=of_keys2)
    tl.store(result + 2 * width + near + all_, of_values.to(kind), mask=is_real[:, None])
    result += width
    _store_rotated_back(
        result, of_keys1, of_keys2, near + few, is_real, cosines, sines, tokens, first, few, size, is_turned
    )
