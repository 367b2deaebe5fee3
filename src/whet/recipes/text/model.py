"""The small encoder. It reads padded and packed batches and computes the same logits for both.

Shapes: B texts, L tokens of the longest text, T tokens in total, W width, H heads, C classes. Linear layers and norms
accept both layouts of a batch, (B, L, W) and (T, W). Only attention and pooling depend on the text of each token.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import Packed, Padded
from whet.recipes.text.attention import TokenLayout, attend, mean_pool, token_layout
from whet.recipes.text.config import TextArch

_INIT_STD = 0.02
"""The standard deviation of the embeddings, and of the combined outputs of all blocks, at initialization.

They are of the same order, so that the words affect the output from the first step on.
"""


class Encoder(nn.Module):
    """Token and position embeddings, pre-norm blocks, mean pooling and a linear classifier."""

    def __init__(self, arch: TextArch, *, num_classes: int, dropout: float = 0.0, word_dropout: float = 0.0) -> None:
        super().__init__()
        width = arch.hidden_size
        self.word_dropout = word_dropout
        self.tokens = nn.Embedding(arch.vocab_size, width)
        self.positions = nn.Embedding(arch.max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_EncoderBlock(arch, dropout=dropout) for _ in range(arch.layers))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        for weight in (self.tokens.weight, self.positions.weight, self.classifier.weight):
            nn.init.normal_(weight, std=_INIT_STD)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, tokens: Padded | Packed) -> Tensor:
        """Return the class logits, (B, C), for a padded or packed batch."""
        layout = token_layout(tokens)
        # Clamp: padding may extend beyond the last learned position, but no token attends to it.
        positions = layout.positions.clamp(max=self.positions.num_embeddings - 1)
        x = self.dropout(self._embed(tokens.values) + self.positions(positions))
        for block in self.blocks:
            x = block(x, layout)
        return self.classifier(mean_pool(self.norm(x), layout))

    def _embed(self, ids: Tensor) -> Tensor:
        """Embed the tokens, (B, L, W) or (T, W). Word dropout zeroes some of them but keeps their positions."""
        embedded = self.tokens(ids)
        if not (self.training and self.word_dropout):
            return embedded
        # Drop whole tokens instead of single features, so that the model does not rely on individual words.
        is_kept = torch.rand(ids.shape, device=ids.device) >= self.word_dropout
        return embedded * is_kept[..., None]


class _EncoderBlock(nn.Module):
    """Pre-norm attention and feed-forward layer, each with a residual connection."""

    def __init__(self, arch: TextArch, *, dropout: float) -> None:
        super().__init__()
        width = arch.hidden_size
        self.num_heads = arch.heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 4 * width)
        self.feed_forward_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        for layer in (self.queries_keys_values, self.feed_forward_in):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(width))
            nn.init.zeros_(layer.bias)
        for layer in (self.attention_out, self.feed_forward_out):
            # The residual stream adds up 2 * layers outputs, so divide their variance by that number.
            nn.init.normal_(layer.weight, std=_INIT_STD / math.sqrt(2 * arch.layers))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, layout: TokenLayout) -> Tensor:
        attended = attend(self.queries_keys_values(self.attention_norm(x)), layout, num_heads=self.num_heads)
        x = x + self.dropout(self.attention_out(attended))
        inner = functional.gelu(self.feed_forward_in(self.feed_forward_norm(x)))
        return x + self.dropout(self.feed_forward_out(inner))
