"""Triton kernels of rotary attention and SwiGLU. Imported only where triton is installed."""

import triton
import triton.language as tl

WARPS = 8
"""Of attention's programs: measured on an H200 with 97 places and heads of 64, where 4 and 16 were slower."""
COLUMNS = 2048
"""Of the gate's programs."""


@triton.jit
def _load_halves(mixture, few, is_real, half: tl.constexpr):
    """Two halves of a head at all places, as they are."""
    one = tl.load(mixture + few, mask=is_real, other=0.0)
    return one, tl.load(mixture + half + few, mask=is_real, other=0.0)


@triton.jit
def rotate(one, two, cosines, sines):
    """The halves turned in float32, and rounded to the format they came in."""
    kind = one.dtype
    one, two = one.to(tl.float32), two.to(tl.float32)
    return (one * cosines - two * sines).to(kind), (two * cosines + one * sines).to(kind)


@triton.jit
def rotate_back(one, two, cosines, sines):
    """The slopes of halves from those of turned ones, float32."""
    return one * cosines + two * sines, two * cosines - one * sines


@triton.jit
def _store_rotated_back(result, one, two, cosines, sines, few, is_real, half: tl.constexpr):
    """The slopes of halves that were turned, turned back, go where the halves came from."""
    kind = result.dtype.element_ty
    one, two = rotate_back(one, two, cosines, sines)
    tl.store(result + few, one.to(kind), mask=is_real)
    tl.store(result + half + few, two.to(kind), mask=is_real)


@triton.jit
def _softmax_terms(queries1, queries2, keys1, keys2, is_seen, scale):
    """The softmax over all places before it is divided, float32, and what it is to be multiplied with, row by row."""
    scores = tl.dot(queries1, tl.trans(keys1))
    scores = tl.dot(queries2, tl.trans(keys2), acc=scores)
    scores = tl.where(is_seen, scores, float("-inf"))
    in_twos: tl.constexpr = 1.4426950408889634
    sizes = tl.exp2(scores * (scale * in_twos) - (tl.max(scores, axis=1) * (scale * in_twos))[:, None])
    return sizes, 1 / tl.sum(sizes, axis=1)[:, None]


@triton.jit
def rotary_forward(
    mixture,
    cosines,
    sines,
    found,
    num_places,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
):
    """found (B, S, H D) from mixture (B, S, 3 H D); tables (S, D), of which the first half is read."""
    half: tl.constexpr = size // 2
    width: tl.constexpr = heads * size
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * together
    few, all_ = tl.arange(0, half)[None, :], tl.arange(0, size)[None, :]
    places = tl.arange(0, block)[:, None]
    is_real, is_seen = places < num_places, tl.arange(0, block)[None, :] < num_places
    cosine = tl.load(cosines + places * size + few, mask=is_real, other=0.0)
    sine = tl.load(sines + places * size + few, mask=is_real, other=0.0)
    mixture += row * num_places * (3 * width) + places * (3 * width) + head * size
    found += row * num_places * width + places * width + head * size
    for _ in tl.range(together, num_stages=2):
        queries1, queries2 = _load_halves(mixture, few, is_real, half)
        keys1, keys2 = _load_halves(mixture + width, few, is_real, half)
        values = tl.load(mixture + 2 * width + all_, mask=is_real, other=0.0)
        queries1, queries2 = rotate(queries1, queries2, cosine, sine)
        keys1, keys2 = rotate(keys1, keys2, cosine, sine)
        sizes, share = _softmax_terms(queries1, queries2, keys1, keys2, is_seen, scale)
        answer = tl.dot(sizes.to(values.dtype), values) * share
        tl.store(found + all_, answer.to(values.dtype), mask=is_real)
        mixture += size
        found += size


@triton.jit
def rotary_backward(
    mixture,
    cosines,
    sines,
    slopes,
    result,
    num_places,
    scale,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
):
    """result, as mixture is, from slopes, as found is. The shares are computed again."""
    half: tl.constexpr = size // 2
    width: tl.constexpr = heads * size
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * together
    few, all_ = tl.arange(0, half)[None, :], tl.arange(0, size)[None, :]
    places = tl.arange(0, block)[:, None]
    is_real, is_seen = places < num_places, tl.arange(0, block)[None, :] < num_places
    cosine = tl.load(cosines + places * size + few, mask=is_real, other=0.0)
    sine = tl.load(sines + places * size + few, mask=is_real, other=0.0)
    first = row * num_places * (3 * width) + places * (3 * width) + head * size
    mixture += first
    result += first
    slopes += row * num_places * width + places * width + head * size
    for _ in tl.range(together, num_stages=2):
        queries1, queries2 = _load_halves(mixture, few, is_real, half)
        keys1, keys2 = _load_halves(mixture + width, few, is_real, half)
        slope = tl.load(slopes + all_, mask=is_real, other=0.0)
        values = tl.load(mixture + 2 * width + all_, mask=is_real, other=0.0)
        queries1, queries2 = rotate(queries1, queries2, cosine, sine)
        keys1, keys2 = rotate(keys1, keys2, cosine, sine)
        kind = slope.dtype
        sizes, share = _softmax_terms(queries1, queries2, keys1, keys2, is_seen, scale)
        shares = sizes * share
        of_values = tl.dot(tl.trans(shares.to(kind)), slope)
        tl.store(result + 2 * width + all_, of_values.to(kind), mask=is_real)
        of_shares = tl.dot(slope, tl.trans(values))
        mean = tl.sum(shares * of_shares, axis=1)[:, None]
        of_scores = (shares * (of_shares - mean) * scale).to(kind)
        _store_rotated_back(
            result, tl.dot(of_scores, keys1), tl.dot(of_scores, keys2), cosine, sine, few, is_real, half
        )
        turned = tl.trans(of_scores)
        _store_rotated_back(
            result + width, tl.dot(turned, queries1), tl.dot(turned, queries2), cosine, sine, few, is_real, half
        )
        mixture += size
        result += size
        slopes += size


@triton.jit
def swiglu_forward(mixture, found, inner, columns: tl.constexpr):
    """found (T, I) from mixture (T, 2 I), gates and then what passes them."""
    line, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    is_real = places < inner
    at = line * 2 * inner + places
    gate = tl.load(mixture + at, mask=is_real, other=0.0)
    kind = gate.dtype
    gate = gate.to(tl.float32)
    passing = tl.load(mixture + at + inner, mask=is_real, other=0.0)
    through = (gate / (1 + tl.exp(-gate))).to(kind)
    tl.store(found + line * inner + places, through * passing, mask=is_real)


@triton.jit
def swiglu_backward(mixture, slopes, result, inner, columns: tl.constexpr):
    """result (T, 2 I) from mixture (T, 2 I), gates and then what passes them, and slopes (T, I)."""
    line, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * columns + tl.arange(0, columns)
    is_real = places < inner
    at = line * 2 * inner + places
    gate = tl.load(mixture + at, mask=is_real, other=0.0)
    kind = gate.dtype
    gate = gate.to(tl.float32)
    passing = tl.load(mixture + at + inner, mask=is_real, other=0.0).to(tl.float32)
    slope = tl.load(slopes + line * inner + places, mask=is_real, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    tl.store(result + at, (slope * passing * share * (1 + gate * (1 - share))).to(kind), mask=is_real)
    tl.store(result + at + inner, (slope * gate * share).to(kind), mask=is_real)
