"""What is trained? A small encoder that reads padded and packed batches alike and gives both the same answer.

Shapes: B texts, L tokens of the longest, T tokens in all, W width, H heads, C classes. The linear layers and norms see
a batch as it comes, (B, L, W) or (T, W); only attention and pooling need to know whose token is whose.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.ragged import Packed, Padded
from whet.recipes.text.config import Arch

_SMALL = 0.02
"""The standard deviation of first embeddings and of what a block adds, so that words count from the first step."""


class Encoder(nn.Module):
    """Token and position embeddings, pre-norm blocks, the mean over a text's tokens, and a linear classifier."""

    def __init__(self, arch: Arch, *, num_classes: int, dropout: float = 0.0, word_dropout: float = 0.0) -> None:
        super().__init__()
        width = arch.hidden_size
        self.word_dropout = word_dropout
        self.tokens = nn.Embedding(arch.vocab_size, width)
        self.positions = nn.Embedding(arch.max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_Block(arch, dropout=dropout) for _ in range(arch.layers))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        for weight in (self.tokens.weight, self.positions.weight, self.classifier.weight):
            nn.init.normal_(weight, std=_SMALL)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, tokens: Padded | Packed) -> Tensor:
        """The logits, (B, C)."""
        layout = _layout(tokens)
        # Padding may reach beyond the last position that was learned; whatever stands there is never looked at.
        positions = layout.positions.clamp(max=self.positions.num_embeddings - 1)
        x = self.dropout(self._read(tokens.values) + self.positions(positions))
        for block in self.blocks:
            x = block(x, layout)
        return self.classifier(_mean(self.norm(x), layout))

    def _read(self, ids: Tensor) -> Tensor:
        """What the tokens mean, (B, L, W) or (T, W); while training some are not seen, and their places stay."""
        meanings = self.tokens(ids)
        if not (self.training and self.word_dropout):
            return meanings
        is_seen = torch.rand(ids.shape, device=ids.device) >= self.word_dropout
        return meanings * is_seen[..., None]


class _Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, arch: Arch, *, dropout: float) -> None:
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
            nn.init.normal_(layer.weight, std=_SMALL / math.sqrt(2 * arch.layers))
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, layout: "_Layout") -> Tensor:
        mixed = _attend(self.queries_keys_values(self.attention_norm(x)), layout, num_heads=self.num_heads)
        x = x + self.dropout(self.attention_out(mixed))
        inner = functional.gelu(self.feed_forward_in(self.feed_forward_norm(x)))
        return x + self.dropout(self.feed_forward_out(inner))


# --- whose token is whose --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where each token of a batch belongs, made once per forward pass and without asking the device anything."""

    positions: Tensor
    """Each token's place in its own text: (L) or (T)."""
    is_real: Tensor
    """(B, L): false where a rectangle is only filled up."""
    is_seen: Tensor
    """(B, L): the real cells, and the first one of a text of no tokens, since a softmax over nothing is NaN."""
    cells: Tensor | None
    """(T): the cell of the B x L rectangle that each packed token belongs into; None when it is a rectangle already."""

    def as_rectangle(self, x: Tensor) -> Tensor:
        """(B, L, ...); the cells that packed tokens leave empty are zero."""
        if self.cells is None:
            return x
        rectangle = x.new_zeros(self.is_real.numel(), *x.shape[1:])
        return rectangle.index_copy(0, self.cells, x).unflatten(0, self.is_real.shape)

    def as_it_came(self, rectangle: Tensor) -> Tensor:
        """The way back: (B, L, ...) or (T, ...)."""
        return rectangle if self.cells is None else rectangle.flatten(0, 1)[self.cells]


def _layout(tokens: Padded | Packed) -> _Layout:
    device = tokens.values.device
    if isinstance(tokens, Padded):
        lengths, longest = tokens.lengths, tokens.values.shape[1]
        positions, cells = torch.arange(longest, device=device), None
    else:
        starts, longest = tokens.starts, tokens.max_length
        lengths = starts.diff()
        everywhere = torch.arange(len(tokens.values), device=device, dtype=starts.dtype)
        owner = torch.bucketize(everywhere, starts[1:], right=True)
        positions = everywhere - starts[owner]
        cells = owner * longest + positions
    columns = torch.arange(longest, device=device)
    is_real = columns < lengths[:, None]
    return _Layout(positions=positions, is_real=is_real, is_seen=is_real | (columns == 0), cells=cells)


def _attend(mixture: Tensor, layout: _Layout, *, num_heads: int) -> Tensor:
    """Every token looks at the tokens of its own text; `mixture` holds queries, keys and values, 3 W wide.

    A packed batch becomes a rectangle for this alone: B x L^2 scores, where a block-diagonal mask would take T^2.
    """
    cells = layout.as_rectangle(mixture)
    queries, keys, values = cells.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, L, W / H)
    mask = layout.is_seen[:, None, None]
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return layout.as_it_came(found.transpose(1, 2).flatten(2))


def _mean(x: Tensor, layout: _Layout) -> Tensor:
    """The mean over each text's own tokens, (B, W)."""
    real = layout.is_real[..., None]
    return (layout.as_rectangle(x) * real).sum(1) / real.sum(1).clamp(min=1)
