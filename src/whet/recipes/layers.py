"""Layers of the recursive models, shared by the puzzle and chat recipes: no biases, no learned norms."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.attention import rotary_attention
from whet.device.kernels.gate import swiglu
from whet.device.kernels.rms_norm import has_rms_kernel, rms_norm_sum
from whet.device.kernels.spans import Spans, span_attention
from whet.device.kernels.switches import is_own_kernel_on, is_supported
from whet.plan.kernel_support import supports_short_attention

_TRUNCATE_AT = 2.0
"""Drawn numbers lie within so many deviations, before they are widened."""
_INSIDE = math.erf(_TRUNCATE_AT / math.sqrt(2))
_DENSITY = math.exp(-(_TRUNCATE_AT**2) / 2) / math.sqrt(2 * math.pi)
_WIDEN = 1 / math.sqrt(1 - 2 * _TRUNCATE_AT * _DENSITY / _INSIDE)
"""Cutting makes a normal narrower, to a deviation of 0.8796; this makes it 1 again."""


@torch.no_grad()
def truncated_normal_(weights: Tensor, *, deviation: float) -> Tensor:
    """Fills with draws of torch's generator that have this deviation, none of them beyond 2.27 times it.

    >>> drawn = truncated_normal_(torch.empty(100_000), deviation=0.5)
    >>> round(float(drawn.std()), 2), bool(drawn.abs().max() < 1.14)
    (0.5, True)
    """
    edge = _TRUNCATE_AT * _WIDEN * deviation
    weights.uniform_(-_INSIDE, _INSIDE).erfinv_()
    return weights.mul_(math.sqrt(2) * _WIDEN * deviation).clamp_(-edge, edge)


_EPSILON = 1e-5
_INNER_MULTIPLE = 256
_ROTARY_BASE = 10_000.0

RotaryAngles = tuple[Tensor, Tensor]
"""Cosines and sines, float32 (S, W / H) or (B, 1, S, W / H)."""


class KeyValueCache(Protocol):
    """Keys and values of earlier places. It is asked once for each attention of a forward pass, always in one order."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Takes those of new places, each (B, H, S, W / H), and gives those of all places."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionArgs:
    """Who looks at whom in attention: everybody at everybody, unless said otherwise."""

    rotation: RotaryAngles | None = None
    """How queries and keys are turned by their places; None for no positions."""
    mask: Tensor | None = None
    """Added to the scores, or bool and true where one may look; (S, S) or (B, 1, S, S)."""
    is_causal: bool = False
    """Each place at itself and earlier ones only; not together with a mask."""
    spans: Spans | None = None
    """The documents of all rows, one behind the other, each of which looks at itself alone; then `rotary_angles` is one for
    the places of a document, and there is no mask."""
    memory: KeyValueCache | None = None


def inner_width(width: int, expansion: float) -> int:
    """The width inside a SwiGLU: two thirds of expansion times width, rounded up to a multiple of 256.

    >>> inner_width(512, 4), inner_width(97, 4), inner_width(916, 4)
    (1536, 512, 2560)
    """
    return _INNER_MULTIPLE * math.ceil(round(expansion * width * 2 / 3) / _INNER_MULTIPLE)


def rms_norm(x: Tensor, added: Tensor | None = None, *, epsilon: float = _EPSILON) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) over the last axis, computed in float32 and given in the format of x.

    What is added comes to x before.
    """
    if has_rms_kernel(x, added):
        found: Tensor = rms_norm_sum(x, added, epsilon)[0]
        return found
    x = x if added is None else x + added
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def init_linear(inputs: int, outputs: int) -> nn.Linear:
    """Without a bias; the deviation of its weights is 1 / sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    truncated_normal_(layer.weight, deviation=1 / math.sqrt(inputs))
    return layer


def init_embedding(num_tokens: int, width: int) -> nn.Embedding:
    """A table of vectors whose deviation is 1 / sqrt(width)."""
    table = nn.Embedding(num_tokens, width)
    truncated_normal_(table.weight, deviation=1 / math.sqrt(width))
    return table


def rotary_angles(positions: Tensor, size: int, *, theta: float = _ROTARY_BASE) -> RotaryAngles:
    """For heads of `size` at these positions, (S) or (B, S): pair i turns by position * theta^(-2 i / size)."""
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions.to(torch.float32)[..., None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, by: RotaryAngles) -> Tensor:
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
        self.gate_up = init_linear(width, 2 * inner)
        self.down = init_linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class SelfAttention(nn.Module):
    """softmax(q k / sqrt(W / H)) v; one matrix gives all queries, then all keys, then all values."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = init_linear(width, 3 * width)
        self.out = init_linear(width, width)

    def forward(self, x: Tensor, look: AttentionArgs) -> Tensor:
        mixture = self.queries_keys_values(x)
        if look.spans is not None:
            turns, is_causal = look.rotation or (), look.is_causal
            found = span_attention(
                mixture.flatten(0, 1), look.spans, num_heads=self.num_heads, is_causal=is_causal, turns=turns
            )
            return self.out(found.unflatten(0, x.shape[:2]))
        if look.rotation is not None and self._has_kernel(mixture, look):
            return self.out(rotary_attention(mixture, *look.rotation, self.num_heads))
        parts = mixture.unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)  # each (B, H, S, W / H)
        if look.rotation is not None:
            queries, keys = apply_rotary(queries, look.rotation), apply_rotary(keys, look.rotation)
        if look.memory is not None:
            keys, values = look.memory.extend(keys, values)
        found = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=look.mask, is_causal=look.is_causal
        )
        return self.out(found.transpose(1, 2).flatten(2))

    def _has_kernel(self, mixture: Tensor, look: AttentionArgs) -> bool:
        """Whether one kernel can turn and attend (attention=own): everybody looks at everybody, places are few."""
        is_plain = look.mask is None and not look.is_causal and look.memory is None
        return (
            is_own_kernel_on("attention")
            and is_plain
            and is_supported(mixture)
            and supports_short_attention(mixture.shape[1], mixture.shape[2] // 3 // self.num_heads)
        )


class PostNormBlock(nn.Module):
    """Attention, then a feed-forward layer; each is added to what came in, and the sum is normed."""

    def __init__(self, width: int, *, num_heads: int, expansion: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads=num_heads)
        self.feed_forward = SwiGLU(width, expansion=expansion)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, look: AttentionArgs) -> Tensor:
        x = rms_norm(x, self.dropout(self.attention(x, look)))
        return rms_norm(x, self.dropout(self.feed_forward(x)))


StateUpdate = Callable[[Tensor, Tensor], Tensor]
"""From a state and what is added to it to the next state."""


def refine(net: StateUpdate, y: Tensor, z: Tensor, x: Tensor, *, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """y and z after `outer` cycles, each of `inner` updates of z and one of y; only the last cycle has gradients."""
    has_gradients = torch.is_grad_enabled()
    for cycle in range(outer):
        with torch.set_grad_enabled(has_gradients and cycle == outer - 1):
            for _ in range(inner):
                z = net(z, y + x)
            y = net(y, z)
    return y, z
