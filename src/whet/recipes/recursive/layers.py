"""Norm, feed-forward and attention of the recursive models: no biases, no learned norms.

Shapes: B rows, S places, W width, H heads. Who may look at whom is one value, a `Look`, made once per forward pass.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.own.attention import turned_attention
from whet.device.own.gate import gated
from whet.device.own.rms_norm import is_rms_taken, rms_sum
from whet.device.own.spans import Spans, attend_spans
from whet.device.own.wanted import can_take, is_attention_wanted
from whet.plan.own_attention import has_own_kernels
from whet.recipes.recursive.initial import truncated_normal_

_EPSILON = 1e-5
_GRAIN = 256
_THETA = 10_000.0

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, float32 (S, W / H) or (B, 1, S, W / H)."""


class Memory(Protocol):
    """Keys and values of earlier places. It is asked once for each attention of a forward pass, always in one order."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Takes those of new places, each (B, H, S, W / H), and gives those of all places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Who looks at whom in attention: everybody at everybody, unless said otherwise."""

    rotation: Rotation | None = None
    """How queries and keys are turned by their places; None for no positions."""
    mask: Tensor | None = None
    """Added to the scores, or bool and true where one may look; (S, S) or (B, 1, S, S)."""
    is_causal: bool = False
    """Each place at itself and earlier ones only; not together with a mask."""
    spans: Spans | None = None
    """The documents of all rows, one behind the other, each of which looks at itself alone; then `rotation` is one for
    the places of a document, and there is no mask."""
    memory: Memory | None = None


def inner_width(width: int, expansion: float) -> int:
    """The width inside a SwiGLU: two thirds of expansion times width, rounded up to a multiple of 256.

    >>> inner_width(512, 4), inner_width(97, 4), inner_width(916, 4)
    (1536, 512, 2560)
    """
    return _GRAIN * math.ceil(round(expansion * width * 2 / 3) / _GRAIN)


def rms_norm(x: Tensor, added: Tensor | None = None, *, epsilon: float = _EPSILON) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) over the last axis, computed in float32 and given in the format of x.

    What is added comes to x before.
    """
    if is_rms_taken(x, added):
        found: Tensor = rms_sum(x, added, epsilon)[0]
        return found
    x = x if added is None else x + added
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Without a bias; the deviation of its weights is 1 / sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    truncated_normal_(layer.weight, deviation=1 / math.sqrt(inputs))
    return layer


def embedding(num_tokens: int, width: int) -> nn.Embedding:
    """A table of vectors whose deviation is 1 / sqrt(width)."""
    table = nn.Embedding(num_tokens, width)
    truncated_normal_(table.weight, deviation=1 / math.sqrt(width))
    return table


def rotation(positions: Tensor, size: int, *, theta: float = _THETA) -> Rotation:
    """For heads of `size` at these positions, (S) or (B, S): pair i turns by position * theta^(-2 i / size)."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions.to(torch.float32)[..., None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """The first half of each head is turned against the second half; in float32, given in the format of x."""
    cosines, sines = by
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate) * up), with gate and up from one matrix."""

    def __init__(self, width: int, *, expansion: float) -> None:
        super().__init__()
        inner = inner_width(width, expansion)
        self.gate_up = linear(width, 2 * inner)
        self.down = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x)))


class Attention(nn.Module):
    """softmax(q k / sqrt(W / H)) v; one matrix gives all queries, then all keys, then all values."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = linear(width, 3 * width)
        self.out = linear(width, width)

    def forward(self, x: Tensor, look: Look) -> Tensor:
        mixture = self.queries_keys_values(x)
        if look.spans is not None:
            turns, is_causal = look.rotation or (), look.is_causal
            found = attend_spans(
                mixture.flatten(0, 1), look.spans, num_heads=self.num_heads, is_causal=is_causal, turns=turns
            )
            return self.out(found.unflatten(0, x.shape[:2]))
        if look.rotation is not None and self._has_kernel(mixture, look):
            return self.out(turned_attention(mixture, *look.rotation, self.num_heads))
        parts = mixture.unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each (B, H, S, W / H)
        if look.rotation is not None:
            queries, keys = rotate(queries, look.rotation), rotate(keys, look.rotation)
        if look.memory is not None:
            keys, values = look.memory.extend(keys, values)
        found = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=look.mask, is_causal=look.is_causal
        )
        return self.out(found.transpose(1, 2).flatten(2))

    def _has_kernel(self, mixture: Tensor, look: Look) -> bool:
        """Whether one kernel can turn and attend (attention=own): everybody looks at everybody, places are few."""
        is_plain = look.mask is None and not look.is_causal and look.memory is None
        return (
            is_attention_wanted()
            and is_plain
            and can_take(mixture)
            and has_own_kernels(mixture.shape[1], mixture.shape[2] // 3 // self.num_heads)
        )


class PostNormBlock(nn.Module):
    """Attention, then a feed-forward layer; each is added to what came in, and the sum is normed."""

    def __init__(self, width: int, *, num_heads: int, expansion: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = Attention(width, num_heads=num_heads)
        self.feed_forward = SwiGLU(width, expansion=expansion)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, look: Look) -> Tensor:
        x = rms_norm(x, self.dropout(self.attention(x, look)))
        return rms_norm(x, self.dropout(self.feed_forward(x)))
