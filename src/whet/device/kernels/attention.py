"""Attention from packed queries, keys and values (..., 3 H D): rotary attention, span attention, and torch's varlen.

torch's compiler generates one kernel for the rotation, one for attention, and five more for the backward pass. Between
them, data goes through global memory. A single kernel keeps it on chip. Shapes: B rows, S positions, T tokens, H heads
of size D.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from whet.device.kernels.switches import is_supported, is_whet_kernel_on
from whet.plan.kernel_support import supports_span_attention

# --- rotary attention over whole rows --------------------------------------------------------------------------------

_MIN_PROGRAMS = 512
"""Minimum number of programs that keeps a large GPU busy. With fewer rows, each program computes fewer heads."""
_MAX_PREFETCH_HEAD, _PREFETCH_BYTES = 64, 160 * 1024
"""Maximum head size for prefetching the next head, and the bytes of shared memory that the backward pass then needs."""


@torch.library.custom_op("whet::rotary_attention", mutates_args=())
def rotary_attention(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v (B, S, H D) from qkv (B, S, 3 H D).

    Queries and keys are rotated in float32 with the tables cos and sin (S, D), and then rounded to the dtype of qkv.
    """
    from whet.device.kernels import attention_triton

    qkv = qkv.contiguous()
    rows, positions, width = qkv.shape
    out = qkv.new_empty(rows, positions, width // 3)
    grid, sizes = _rotary_sizes(qkv, num_heads)
    # Limit each program to half of a multiprocessor's registers, so that two programs fit on it.
    max_registers = 128 if width // 3 // num_heads <= _MAX_PREFETCH_HEAD else None
    attention_triton.rotary_forward[grid](
        qkv, cos, sin, out, positions, *sizes, num_warps=attention_triton.WARPS, maxnreg=max_registers
    )
    return out


@torch.library.custom_op("whet::rotary_attention_backward", mutates_args=())
def rotary_attention_backward(qkv: Tensor, cos: Tensor, sin: Tensor, grad_out: Tensor, num_heads: int) -> Tensor:
    """Return grad_qkv (B, S, 3 H D) from grad_out (B, S, H D)."""
    from whet.device.kernels import attention_triton

    qkv, grad_out = qkv.contiguous(), grad_out.contiguous()
    positions = qkv.shape[1]
    grad_qkv = torch.empty_like(qkv)
    grid, sizes = _rotary_sizes(qkv, num_heads)
    attention_triton.rotary_backward[grid](
        qkv, cos, sin, grad_out, grad_qkv, positions, *sizes, num_warps=attention_triton.WARPS
    )
    return grad_qkv


def _rotary_sizes(qkv: Tensor, num_heads: int) -> tuple[tuple[int, int], tuple[float, int, int, int, int]]:
    """Return the grid and the kernel arguments: score scale, heads, head size, block size and heads per program."""
    rows, positions, width = qkv.shape
    head_size = width // 3 // num_heads
    heads_per_program = _heads_per_program(rows, num_heads) if _can_prefetch(qkv.device, head_size) else 1
    block = max(16, 1 << (positions - 1).bit_length())
    grid = (rows, num_heads // heads_per_program)
    return grid, (1 / math.sqrt(head_size), num_heads, head_size, block, heads_per_program)


def _heads_per_program(rows: int, num_heads: int) -> int:
    """Return the largest number of heads per program that still gives enough programs to occupy the GPU.

    >>> _heads_per_program(768, 8), _heads_per_program(100, 8), _heads_per_program(4, 8)
    (8, 1, 1)
    """
    candidates = (
        number
        for number in range(num_heads, 1, -1)
        if num_heads % number == 0 and rows * num_heads >= number * _MIN_PROGRAMS
    )
    return next(candidates, 1)


def _can_prefetch(device: torch.device, head_size: int) -> bool:
    """Return whether a program has enough shared memory to prefetch the next head."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)
    return head_size <= _MAX_PREFETCH_HEAD and properties.shared_memory_per_block_optin >= _PREFETCH_BYTES


@rotary_attention.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:  # noqa: ARG001
    rows, positions, width = qkv.shape
    return qkv.new_empty(rows, positions, width // 3)


@rotary_attention_backward.register_fake
def _(qkv: Tensor, cos: Tensor, sin: Tensor, grad_out: Tensor, num_heads: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save_rotary(ctx, inputs, output):  # type: ignore[no-untyped-def] # noqa: ARG001
    *tensors, ctx.num_heads = inputs
    ctx.save_for_backward(*tensors)


def _rotary_gradient(ctx, grad_out):  # type: ignore[no-untyped-def]
    return rotary_attention_backward(*ctx.saved_tensors, grad_out, ctx.num_heads), None, None, None


rotary_attention.register_autograd(_rotary_gradient, setup_context=_save_rotary)


# --- attention over spans --------------------------------------------------------------------------------------------

_TILE, _PIECE, _WARPS = 64, 64, 4
"""Tokens per program, tokens per load, and warps per program. This was the best choice on an H200 (docs/lab.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Spans of tokens that attend to each other, such as the samples of a packed batch or the documents in a row.

    They are built once per forward pass, without waiting for the device.
    """

    starts: Tensor
    """Index of the first token of each token's span, int32 (T)."""
    tiles: Tensor
    """Tiles of tokens, int32 (P, 4): start, end, start of the first token's span, and end of the last token's span."""

    @classmethod
    def of(cls, starts: Tensor, ends: Tensor) -> "Spans":
        """Return the spans. `starts` and `ends` are integers (T): the start and end of each token's span."""
        tokens = starts.shape[0]
        begin = torch.arange(0, tokens, _TILE, device=starts.device)
        end = (begin + _TILE).clamp(max=tokens)
        tiles = torch.stack((begin, end, starts[begin], ends[end - 1]), dim=1)
        return cls(starts=starts.int(), tiles=tiles.int())


def has_span_kernel(x: Tensor, head_size: int) -> bool:
    """Return whether attention=whet is selected and the kernels support these tensors."""
    return is_whet_kernel_on("attention") and is_supported(x) and supports_span_attention(head_size)


def span_attention(
    qkv: Tensor, spans: Spans, *, num_heads: int, is_causal: bool = False, rotary: Sequence[Tensor] = ()
) -> Tensor:
    """Return attention within spans (T, H D) from qkv (T, 3 H D).

    Each token attends to all tokens of its span, or with `is_causal` only to itself and earlier tokens. `rotary` holds
    two float32 tables of cosines and sines (positions, D), which rotate queries and keys. If it is empty, nothing is
    rotated. The position of a token is its distance from the start of its span.
    """
    out: Tensor = span_attention_op(qkv, spans.starts, spans.tiles, list(rotary), num_heads, is_causal)[0]
    return out


@torch.library.custom_op("whet::span_attention", mutates_args=())
def span_attention_op(
    qkv: Tensor, starts: Tensor, tiles: Tensor, rotary: list[Tensor], num_heads: int, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T / sqrt(D)) v (T, H D), and the base-2 log-sum-exps of the scores (H, T) for backward."""
    from whet.device.kernels.span_attention_triton import span_forward

    qkv, grid = qkv.contiguous(), (len(tiles) * num_heads,)
    out, lses = _empty_span_outputs(qkv, num_heads)
    tables, sizes = _tables(rotary, qkv), _span_sizes(qkv, num_heads, is_causal=is_causal, is_rotary=bool(rotary))
    span_forward[grid](qkv, starts, tiles, *tables, out, lses, *sizes, num_warps=_WARPS, num_stages=1)
    return out, lses


@torch.library.custom_op("whet::span_attention_backward", mutates_args=())
def span_attention_backward_op(
    qkv: Tensor,
    starts: Tensor,
    tiles: Tensor,
    rotary: list[Tensor],
    out: Tensor,
    lses: Tensor,
    grad_out: Tensor,
    num_heads: int,
    is_causal: bool,
) -> Tensor:
    """Return grad_qkv (T, 3 H D) from grad_out (T, H D)."""
    from whet.device.kernels.span_attention_triton import span_backward_keys_values, span_backward_queries

    qkv, grad_out, grid = qkv.contiguous(), grad_out.contiguous(), (len(tiles) * num_heads,)
    grad_qkv, deltas = torch.empty_like(qkv), torch.empty_like(lses)
    inputs = qkv, starts, tiles, *_tables(rotary, qkv)
    sizes = _span_sizes(qkv, num_heads, is_causal=is_causal, is_rotary=bool(rotary))
    span_backward_queries[grid](*inputs, out, lses, deltas, grad_out, grad_qkv, *sizes, num_warps=_WARPS, num_stages=1)
    span_backward_keys_values[grid](*inputs, lses, deltas, grad_out, grad_qkv, *sizes, num_warps=_WARPS, num_stages=1)
    return grad_qkv


def _empty_span_outputs(qkv: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    tokens, width = qkv.shape
    return qkv.new_empty(tokens, width // 3), qkv.new_empty(num_heads, tokens, dtype=torch.float32)


def _tables(rotary: list[Tensor], qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables. Without rotation, return two placeholders that the kernel does not read."""
    cos, sin = rotary or (qkv, qkv)
    return cos, sin


def _span_sizes(qkv: Tensor, num_heads: int, *, is_causal: bool, is_rotary: bool) -> tuple[float, ...]:
    """Return the arguments that every span kernel takes after its tensors."""
    tokens, width = qkv.shape
    head_size = width // 3 // num_heads
    return tokens, 1 / math.sqrt(head_size), num_heads, head_size, is_causal, is_rotary, _TILE, _PIECE


@span_attention_op.register_fake
def _(
    qkv: Tensor,
    starts: Tensor,  # noqa: ARG001
    tiles: Tensor,  # noqa: ARG001
    rotary: list[Tensor],  # noqa: ARG001
    num_heads: int,
    is_causal: bool,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _empty_span_outputs(qkv, num_heads)


@span_attention_backward_op.register_fake
def _(
    qkv: Tensor,
    starts: Tensor,  # noqa: ARG001
    tiles: Tensor,  # noqa: ARG001
    rotary: list[Tensor],  # noqa: ARG001
    out: Tensor,  # noqa: ARG001
    lses: Tensor,  # noqa: ARG001
    grad_out: Tensor,  # noqa: ARG001
    num_heads: int,  # noqa: ARG001
    is_causal: bool,  # noqa: ARG001
) -> Tensor:
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def _save_spans(ctx, inputs, output):  # type: ignore[no-untyped-def]
    qkv, starts, tiles, rotary, ctx.num_heads, ctx.is_causal = inputs
    ctx.save_for_backward(qkv, starts, tiles, *rotary, *output)
    # Do not allocate zeros for the missing gradient of the log-sum-exps.
    ctx.set_materialize_grads(False)


def _span_gradient(ctx, grad_out, _):  # type: ignore[no-untyped-def]
    qkv, starts, tiles, *rotary, out, lses = ctx.saved_tensors
    no_tables = [None] * len(rotary)
    if grad_out is None:
        return None, None, None, no_tables, None, None
    grad_qkv = span_attention_backward_op(qkv, starts, tiles, rotary, out, lses, grad_out, ctx.num_heads, ctx.is_causal)
    return grad_qkv, None, None, no_tables, None, None


span_attention_op.register_autograd(_span_gradient, setup_context=_save_spans)


# --- torch's kernel for packed samples -------------------------------------------------------------------------------

_MAX_HEAD_SIZE = 256
_MIN_COMPUTE_CAPABILITY = 8
"""Minimum major version of the CUDA compute capability."""


def has_varlen_kernel(qkv: Tensor, *, num_heads: int) -> bool:
    """Return whether torch's varlen kernel supports this qkv (T, 3 H D). Does not wait for the device."""
    head_size = qkv.shape[-1] // (3 * num_heads)
    return (
        qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and head_size % 8 == 0
        and head_size <= _MAX_HEAD_SIZE
        and torch.cuda.get_device_properties(qkv.device).major >= _MIN_COMPUTE_CAPABILITY
    )


def varlen_attention(qkv: Tensor, starts: Tensor, *, num_heads: int, max_length: int, dropout: float = 0.0) -> Tensor:
    """Return attention within samples (T, H D) from qkv (T, 3 H D).

    `starts` are the cumulative lengths of the samples, int32, with a leading 0. `max_length` is the longest length.
    """
    q, k, v = qkv.unflatten(-1, (3, num_heads, -1)).unbind(1)
    if dropout:
        # The public function does not support dropout, but the underlying operator does.
        out: Any = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, max_length, max_length, dropout, False, False
        )[0]
    else:
        out = varlen_attn(q, k, v, starts, starts, max_length, max_length)
    flat: Tensor = out.flatten(1)
    return flat
