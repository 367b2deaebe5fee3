"""Attention over packed samples: each token attends to the tokens of its own span."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whet.device.kernels.switches import is_own_kernel_on, is_supported
from whet.plan.kernel_support import supports_span_attention

_TILE, _PIECE, _WARPS = 64, 64, 4
"""Tokens of a program, those that it reads at a time, and its warps: the fastest over all on an H200 (docs/lab.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Whose token is whose, made once per forward pass and without asking the device anything."""

    firsts: Tensor
    """The first token of each token's span, int32 (T)."""
    tiles: Tensor
    """What each program of a kernel takes, int32 (P, 4): its first token and the one behind its last, the first token
    of the first one's span and the one behind the last one's."""

    @classmethod
    def of(cls, firsts: Tensor, lasts: Tensor) -> "Spans":
        """From the first token of each token's span, and the one behind its last, whole numbers (T)."""
        tokens = firsts.shape[0]
        begin = torch.arange(0, tokens, _TILE, device=firsts.device)
        end = (begin + _TILE).clamp(max=tokens)
        tiles = torch.stack((begin, end, firsts[begin], lasts[end - 1]), dim=1)
        return cls(firsts=firsts.int(), tiles=tiles.int())


def has_span_kernel(x: Tensor, head_size: int) -> bool:
    """Whether attention=own is in force and has kernels for tensors like this one."""
    return is_own_kernel_on("attention") and is_supported(x) and supports_span_attention(head_size)


def span_attention(
    mixture: Tensor, spans: Spans, *, num_heads: int, is_causal: bool = False, turns: Sequence[Tensor] = ()
) -> Tensor:
    """(T, H D) from (T, 3 H D): every token looks at the tokens of its own span, or at itself and earlier ones."""
    found: Tensor = span_attention_op(mixture, spans.firsts, spans.tiles, list(turns), num_heads, is_causal)[0]
    return found


@torch.library.custom_op("whet::span_attention", mutates_args=())
def span_attention_op(
    mixture: Tensor, firsts: Tensor, tiles: Tensor, turns: list[Tensor], num_heads: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q k / sqrt(D)) v, (T, H D), from queries, keys and values side by side, (T, 3 H D); and for the way back
    the level of each softmax, (H, T).

    `turns`: cosines and sines, float32 (places, D), by which queries and keys are turned in float32, and rounded; a
    token's place is counted from its span's first one. Empty for none.
    """
    from whet.device.kernels.spans_triton import span_forward

    mixture, grid = mixture.contiguous(), (len(tiles) * num_heads,)
    found, levels = _empty_outputs(mixture, num_heads)
    tables, sizes = _tables(turns, mixture), _sizes(mixture, num_heads, is_causal=is_causal, is_turned=bool(turns))
    span_forward[grid](mixture, firsts, tiles, *tables, found, levels, *sizes, num_warps=_WARPS, num_stages=1)
    return found, levels


@torch.library.custom_op("whet::span_attention_backward", mutates_args=())
def span_attention_backward_op(
    mixture: Tensor,
    firsts: Tensor,
    tiles: Tensor,
    turns: list[Tensor],
    found: Tensor,
    levels: Tensor,
    slopes: Tensor,
    num_heads: int,
    is_causal: bool,
) -> Tensor:
    """The slopes of mixture, (T, 3 H D), from those of found, (T, H D)."""
    from whet.device.kernels.spans_triton import span_backward_keys_values, span_backward_queries

    mixture, slopes, grid = mixture.contiguous(), slopes.contiguous(), (len(tiles) * num_heads,)
    result, means = torch.empty_like(mixture), torch.empty_like(levels)
    where = mixture, firsts, tiles, *_tables(turns, mixture)
    sizes = _sizes(mixture, num_heads, is_causal=is_causal, is_turned=bool(turns))
    span_backward_queries[grid](*where, found, levels, means, slopes, result, *sizes, num_warps=_WARPS, num_stages=1)
    span_backward_keys_values[grid](*where, levels, means, slopes, result, *sizes, num_warps=_WARPS, num_stages=1)
    return result


def _empty_outputs(mixture: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    tokens, width = mixture.shape
    return mixture.new_empty(tokens, width // 3), mixture.new_empty(num_heads, tokens, dtype=torch.float32)


def _tables(turns: list[Tensor], mixture: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel that turns nothing reads none, but takes two."""
    cosines, sines = turns or (mixture, mixture)
    return cosines, sines


def _sizes(mixture: Tensor, num_heads: int, *, is_causal: bool, is_turned: bool) -> tuple[float, ...]:
    """What every kernel takes behind its tensors, in that order."""
    tokens, width = mixture.shape
    size = width // 3 // num_heads
    return tokens, 1 / math.sqrt(size), num_heads, size, is_causal, is_turned, _TILE, _PIECE


@span_attention_op.register_fake
def _(
    mixture: Tensor,
    firsts: Tensor,  # noqa: ARG001
    tiles: Tensor,  # noqa: ARG001
    turns: list[Tensor],  # noqa: ARG001
    num_heads: int,
    is_causal: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _empty_outputs(mixture, num_heads)


@span_attention_backward_op.register_fake
def _(
    mixture: Tensor,
    firsts: Tensor,  # noqa: ARG001
    tiles: Tensor,  # noqa: ARG001
    turns: list[Tensor],  # noqa: ARG001
    found: Tensor,  # noqa: ARG001
    levels: Tensor,  # noqa: ARG001
    slopes: Tensor,  # noqa: ARG001
    num_heads: int,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
) -> Tensor:
    return torch.empty_like(mixture, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    mixture, firsts, tiles, turns, ctx.num_heads, ctx.is_causal = inputs
    ctx.save_for_backward(mixture, firsts, tiles, *turns, *output)
    # Nobody asks for slopes of the levels: no zeros are made for them.
    ctx.set_materialize_grads(False)


def _back(ctx, slopes, _):  # type: ignore[no-untyped-def]
    mixture, firsts, tiles, *turns, found, levels = ctx.saved_tensors
    without = [None] * len(turns)
    if slopes is None:
        return None, None, None, without, None, None
    result = span_attention_backward_op(
        mixture, firsts, tiles, turns, found, levels, slopes, ctx.num_heads, ctx.is_causal
    )
    return result, None, None, without, None, None


span_attention_op.register_autograd(_back, setup_context=_keep)


try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None  # type: ignore[assignment]

_MAX_HEAD_SIZE = 256
_MIN_COMPUTE_CAPABILITY = 8
"""CUDA's compute capability, the number before the point."""


def has_varlen_kernel(mixture: Tensor, *, num_heads: int) -> bool:
    """Whether queries, keys and values that lie side by side in `mixture`, 3 W wide, can be attended without padding.

    Asked of the host alone: nothing here waits for the device.
    """
    head = mixture.shape[-1] // (3 * num_heads)
    return (
        varlen_attn is not None
        and mixture.is_cuda
        and mixture.dtype in (torch.bfloat16, torch.float16)
        and head % 8 == 0
        and head <= _MAX_HEAD_SIZE
        and torch.cuda.get_device_properties(mixture.device).major >= _MIN_COMPUTE_CAPABILITY
    )


def varlen_attention(mixture: Tensor, starts: Tensor, *, num_heads: int, longest: int, dropout: float = 0.0) -> Tensor:
    """(T, W) from (T, 3 W): every token looks at the tokens of its own sample, from one of `starts` to the next."""
    queries, keys, values = mixture.unflatten(-1, (3, num_heads, -1)).unbind(1)
    if dropout:
        # The public function drops nothing; the kernel behind it does.
        found: Any = torch.ops.aten._flash_attention_forward(
            queries, keys, values, starts, starts, longest, longest, dropout, False, False
        )[0]
    else:
        found = varlen_attn(queries, keys, values, starts, starts, longest, longest)
    together: Tensor = found.flatten(1)
    return together
