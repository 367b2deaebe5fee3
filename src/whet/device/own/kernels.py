"""The kernels, in triton's language. Nothing imports this file where triton is not installed.

A program of attention holds one head of one row whole: all its places are one block, so no sum runs over blocks, no
statistics are kept for the way back, and queries, keys and values are read once, turned on the way.
"""

from typing import Any

import triton
import triton.language as tl

WARPS = 8
COLUMNS = 512


@triton.jit
def _turned(halves: Any, first: Any, cosines: Any, sines: Any, is_real: Any, half: tl.constexpr) -> Any:
    """The two halves of a block's heads, turned in float32 and rounded to the format they came in."""
    one = tl.load(halves + first, mask=is_real, other=0.0)
    two = tl.load(halves + first + half, mask=is_real, other=0.0)
    kind = one.dtype
    one, two = one.to(tl.float32), two.to(tl.float32)
    return (one * cosines - two * sines).to(kind), (two * cosines + one * sines).to(kind)


@triton.jit
def _shares(queries1: Any, queries2: Any, keys1: Any, keys2: Any, is_seen: Any, scale: Any) -> Any:
    """The softmax over all places, float32."""
    scores = tl.dot(queries1, tl.trans(keys1))
    scores = tl.dot(queries2, tl.trans(keys2), acc=scores) * scale
    scores = tl.where(is_seen, scores, float("-inf"))
    sizes = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return sizes / tl.sum(sizes, axis=1)[:, None]


@triton.jit
def attend_forward(
    mixture: Any,
    cosines: Any,
    sines: Any,
    found: Any,
    num_places: Any,
    scale: Any,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """found (B, S, H D) from mixture (B, S, 3 H D); tables (S, D), of which the first half is read."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = size // 2
    width: tl.constexpr = heads * size
    places, few, all_ = tl.arange(0, block), tl.arange(0, half), tl.arange(0, size)
    is_real = (places < num_places)[:, None]
    turns = places[:, None] * size + few[None, :]
    cosine = tl.load(cosines + turns, mask=is_real, other=0.0)
    sine = tl.load(sines + turns, mask=is_real, other=0.0)
    lines = (row * num_places + places)[:, None]
    first = lines * (3 * width) + head * size + few[None, :]
    queries1, queries2 = _turned(mixture, first, cosine, sine, is_real, half)
    keys1, keys2 = _turned(mixture, first + width, cosine, sine, is_real, half)
    values = tl.load(mixture + lines * (3 * width) + 2 * width + head * size + all_[None, :], mask=is_real, other=0.0)
    shares = _shares(queries1, queries2, keys1, keys2, (places < num_places)[None, :], scale)
    answer = tl.dot(shares.to(values.dtype), values)
    tl.store(found + lines * width + head * size + all_[None, :], answer.to(values.dtype), mask=is_real)


@triton.jit
def attend_backward(
    mixture: Any,
    cosines: Any,
    sines: Any,
    slopes: Any,
    result: Any,
    num_places: Any,
    scale: Any,
    heads: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """result, as mixture is, from slopes, as found is. The shares are computed again."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = size // 2
    width: tl.constexpr = heads * size
    places, few, all_ = tl.arange(0, block), tl.arange(0, half), tl.arange(0, size)
    is_real = (places < num_places)[:, None]
    turns = places[:, None] * size + few[None, :]
    cosine = tl.load(cosines + turns, mask=is_real, other=0.0)
    sine = tl.load(sines + turns, mask=is_real, other=0.0)
    lines = (row * num_places + places)[:, None]
    first = lines * (3 * width) + head * size + few[None, :]
    queries1, queries2 = _turned(mixture, first, cosine, sine, is_real, half)
    keys1, keys2 = _turned(mixture, first + width, cosine, sine, is_real, half)
    at_values = lines * (3 * width) + 2 * width + head * size + all_[None, :]
    values = tl.load(mixture + at_values, mask=is_real, other=0.0)
    slope = tl.load(slopes + lines * width + head * size + all_[None, :], mask=is_real, other=0.0)
    kind = values.dtype
    shares = _shares(queries1, queries2, keys1, keys2, (places < num_places)[None, :], scale)
    of_values = tl.dot(tl.trans(shares.to(kind)), slope)
    tl.store(result + at_values, of_values.to(kind), mask=is_real)
    of_shares = tl.dot(slope, tl.trans(values))
    mean = tl.sum(shares * of_shares, axis=1)[:, None]
    of_scores = (shares * (of_shares - mean) * scale).to(kind)
    one, two = tl.dot(of_scores, keys1), tl.dot(of_scores, keys2)
    tl.store(result + first, (one * cosine + two * sine).to(kind), mask=is_real)
    tl.store(result + first + half, (two * cosine - one * sine).to(kind), mask=is_real)
    turned = tl.trans(of_scores)
    one, two = tl.dot(turned, queries1), tl.dot(turned, queries2)
    tl.store(result + first + width, (one * cosine + two * sine).to(kind), mask=is_real)
    tl.store(result + first + width + half, (two * cosine - one * sine).to(kind), mask=is_real)


@triton.jit
def gate_forward(mixture: Any, found: Any, inner: Any, columns: tl.constexpr) -> None:
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
def gate_backward(mixture: Any, slopes: Any, result: Any, inner: Any, columns: tl.constexpr) -> None:
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
