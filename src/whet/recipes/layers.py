"""Transformer layers without biases or norm weights, and TRM's recursion. Shared by the puzzle and chat models.

TRM is the Tiny Recursive Model. Shapes: B rows, S positions, W width, H heads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.device.kernels.attention import Spans, rotary_attention, span_attention
from whet.device.kernels.rowwise import has_rms_kernel, rms_norm_sum, swiglu
from whet.device.kernels.switches import is_supported, is_whet_kernel_on
from whet.plan.kernel_support import supports_short_attention

_EPSILON = 1e-5
# The constants of the official TRM implementation.
_INNER_MULTIPLE = 256
_ROTARY_BASE = 10_000.0

_TRUNCATE_AT = 2.0
"""The bound of the standard normal distribution before rescaling, in standard deviations."""
# The probability mass of a standard normal distribution within the bounds, and its density at a bound.
_INSIDE = math.erf(_TRUNCATE_AT / math.sqrt(2))
_DENSITY = math.exp(-(_TRUNCATE_AT**2) / 2) / math.sqrt(2 * math.pi)
_RESCALE = 1 / math.sqrt(1 - 2 * _TRUNCATE_AT * _DENSITY / _INSIDE)
"""Truncation reduces the standard deviation to 0.8796. This factor restores it to 1."""

RotaryAngles = tuple[Tensor, Tensor]
"""Cosines and sines, float32 of shape (S, W / H) or (B, 1, S, W / H)."""
StateUpdate = Callable[[Tensor, Tensor], Tensor]
"""Computes the next state from the current state and a tensor to add to it."""


# --- initialization ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def truncated_normal_(weights: Tensor, *, deviation: float) -> Tensor:
    """Fill `weights` from a normal distribution truncated at 2.27 standard deviations.

    Unlike the `std` of `torch.nn.init.trunc_normal_`, `deviation` is the standard deviation after truncation.

    >>> drawn = truncated_normal_(torch.empty(100_000), deviation=0.5)
    >>> round(float(drawn.std()), 2), bool(drawn.abs().max() < 1.14)
    (0.5, True)
    """
    limit = _TRUNCATE_AT * _RESCALE * deviation
    # Inverse transform sampling: draw uniformly within the truncated range of the error function, then invert it.
    weights.uniform_(-_INSIDE, _INSIDE).erfinv_()
    return weights.mul_(math.sqrt(2) * _RESCALE * deviation).clamp_(-limit, limit)


def init_linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without bias, initialized with standard deviation 1 / sqrt(inputs)."""
    layer = nn.Linear(inputs, outputs, bias=False)
    truncated_normal_(layer.weight, deviation=1 / math.sqrt(inputs))
    return layer


def init_embedding(num_tokens: int, width: int) -> nn.Embedding:
    """Return an embedding table, initialized with standard deviation 1 / sqrt(width)."""
    table = nn.Embedding(num_tokens, width)
    truncated_normal_(table.weight, deviation=1 / math.sqrt(width))
    return table


# --- norm and positions -----------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, added: Tensor | None = None, *, epsilon: float = _EPSILON) -> Tensor:
    """Add `added` to x, then return x / sqrt(mean(x^2) + epsilon) over the last dimension, computed in float32."""
    if has_rms_kernel(x, added):
        normed: Tensor = rms_norm_sum(x, added, epsilon)[0]
        return normed
    x = x if added is None else x + added
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotary_angles(positions: Tensor, size: int, *, base: float = _ROTARY_BASE) -> RotaryAngles:
    """Return cosines and sines of the rotary angles, position * base^(-2 i / size) for pair i of a head.

    Args:
        positions: (S) or (B, S).
        size: The width of a head.
    """
    # Compute in float32: bfloat16 cannot represent every integer position above 256.
    exponents = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions.to(torch.float32)[..., None] * (1.0 / base**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    if positions.dim() == 2:
        angles = angles[:, None]
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, by: RotaryAngles) -> Tensor:
    """Rotate the first half of each head against the second half, in float32."""
    cosines, sines = by
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosines + torch.cat((-second, first), dim=-1) * sines).to(x.dtype)


# --- attention and feed-forward ---------------------------------------------------------------------------------------


class KeyValueCache(Protocol):
    """Keys and values of earlier positions. Attention layers call `extend` in the same order in every forward pass."""

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new positions, each (B, H, S, W / H), and return those of all positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionArgs:
    """Arguments shared by all attention layers of a forward pass. The default is full attention."""

    rotation: RotaryAngles | None = None
    """The rotary embedding of queries and keys; None for attention without position information."""
    mask: Tensor | None = None
    """A float mask to add to the scores, or a bool mask that is true for allowed pairs; (S, S) or (B, 1, S, S)."""
    is_causal: bool = False
    """Whether each position attends only to itself and earlier positions. Cannot be combined with a mask."""
    spans: Spans | None = None
    """The document boundaries in the concatenated rows. Tokens attend only within their document.

    `rotation` then contains the angles for positions within a document, and `mask` is not used.
    """
    memory: KeyValueCache | None = None


class SelfAttention(nn.Module):
    """Multi-head self-attention. One matrix product computes queries, keys and values, concatenated in this order."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = init_linear(width, 3 * width)
        self.out = init_linear(width, width)

    def forward(self, x: Tensor, args: AttentionArgs) -> Tensor:
        qkv = self.queries_keys_values(x)
        if args.spans is not None:
            attended = span_attention(
                qkv.flatten(0, 1),
                args.spans,
                num_heads=self.num_heads,
                is_causal=args.is_causal,
                rotary=args.rotation or (),
            )
            return self.out(attended.unflatten(0, x.shape[:2]))
        if args.rotation is not None and self._has_kernel(qkv, args):
            return self.out(rotary_attention(qkv, *args.rotation, self.num_heads))
        # Split the heads: (B, H, S, W / H).
        queries, keys, values = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if args.rotation is not None:
            queries, keys = apply_rotary(queries, args.rotation), apply_rotary(keys, args.rotation)
        if args.memory is not None:
            # Extend the cache after the rotation, because cached keys are already rotated.
            keys, values = args.memory.extend(keys, values)
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=args.mask, is_causal=args.is_causal
        )
        return self.out(attended.transpose(1, 2).flatten(2))

    def _has_kernel(self, qkv: Tensor, args: AttentionArgs) -> bool:
        """Return whether whet's fused kernel can compute the rotary embedding and attention (attention=whet).

        The kernel supports full attention over a small number of positions.
        """
        is_full = args.mask is None and not args.is_causal and args.memory is None
        return (
            is_whet_kernel_on("attention")
            and is_full
            and is_supported(qkv)
            and supports_short_attention(qkv.shape[1], qkv.shape[2] // 3 // self.num_heads)
        )


def inner_width(width: int, expansion: float) -> int:
    """Return the inner width of a SwiGLU: two thirds of expansion * width, rounded up to a multiple of 256.

    >>> inner_width(512, 4), inner_width(97, 4), inner_width(916, 4)
    (1536, 512, 2560)
    """
    # Call round() before ceil(): a floating-point error just above a multiple would otherwise add another 256.
    return _INNER_MULTIPLE * math.ceil(round(expansion * width * 2 / 3) / _INNER_MULTIPLE)


class SwiGLU(nn.Module):
    """Compute down(silu(gate) * up). One matrix computes gate and up."""

    def __init__(self, width: int, *, expansion: float) -> None:
        super().__init__()
        inner = inner_width(width, expansion)
        self.gate_up = init_linear(width, 2 * inner)
        self.down = init_linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


class PostNormBlock(nn.Module):
    """Attention and a feed-forward layer, each followed by a residual sum and a norm."""

    def __init__(self, width: int, *, num_heads: int, expansion: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = SelfAttention(width, num_heads=num_heads)
        self.feed_forward = SwiGLU(width, expansion=expansion)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, args: AttentionArgs) -> Tensor:
        x = rms_norm(x, self.dropout(self.attention(x, args)))
        return rms_norm(x, self.dropout(self.feed_forward(x)))


def refine(net: StateUpdate, y: Tensor, z: Tensor, x: Tensor, *, outer: int, inner: int) -> tuple[Tensor, Tensor]:
    """Refine the answer y and the latent z with one network. Only the last outer cycle computes gradients.

    Each of the `outer` cycles updates z `inner` times, then y once. Updates of z receive the input x and updates of y
    do not, which is how the network distinguishes them.
    """
    has_gradients = torch.is_grad_enabled()
    for cycle in range(outer):
        # Never enable gradients that the caller has disabled.
        with torch.set_grad_enabled(has_gradients and cycle == outer - 1):
            for _ in range(inner):
                z = net(z, y + x)
            y = net(y, z)
    return y, z
