"""A plain transformer of the same parts as the recursive model, so that both can be compared: norm first, no recursion.

With arch.match=parameters it has as many blocks as the recursive model has; with arch.match=compute as many as a token
passes through there, so that a token costs the same.
"""

import math

import torch
from torch import Tensor, nn

from whet.recipes.chat.arch import Arch
from whet.recipes.chat.model.causal import CausalModel
from whet.recipes.layers import AttentionArgs, SelfAttention, SwiGLU, rms_norm


class Gpt(CausalModel):
    """Embedding, blocks that add to what comes in, a norm, and the head."""

    def __init__(self, arch: Arch, *, vocab_size: int, dropout: float) -> None:
        super().__init__(arch, vocab_size=vocab_size, dropout=dropout)
        self.blocks = nn.ModuleList(_PreNormBlock(arch, dropout=dropout) for _ in range(arch.depth))

    def states(self, x: Tensor, look: AttentionArgs) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = block(x, look)
        return (rms_norm(x),)


class _PreNormBlock(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in; what is added begins small."""

    def __init__(self, arch: Arch, *, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(arch.hidden_size, num_heads=arch.num_heads)
        self.feed_forward = SwiGLU(arch.hidden_size, expansion=arch.expansion)
        self.dropout = nn.Dropout(dropout)
        with torch.no_grad():
            for layer in (self.attention.out, self.feed_forward.down):
                layer.weight.div_(math.sqrt(2 * arch.depth))

    def forward(self, x: Tensor, look: AttentionArgs) -> Tensor:
        x = x + self.dropout(self.attention(rms_norm(x), look))
        return x + self.dropout(self.feed_forward(rms_norm(x)))
