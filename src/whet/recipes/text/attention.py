"""Attention and pooling over padded and packed batches alike.

Shapes: B texts (including filler texts), L tokens of the longest, T tokens in total, W width, H heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whet.data.batch import Packed, Padded
from whet.device.kernels import spans
from whet.device.kernels.spans import Spans, has_span_kernel, span_attention
from whet.device.kernels.switches import is_own_kernel_on


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """Where each token of a batch belongs, made once per forward pass and without asking the device anything."""

    positions: Tensor
    """Each token's place in its own text: (L) or (T)."""
    is_real: Tensor
    """(B, L): false where a rectangle is only filled up."""
    is_seen: Tensor
    """(B, L): the real cells, and the first one of a text of no tokens, since a softmax over nothing is NaN."""
    cells: Tensor | None
    """(T): the cell of the B x L rectangle that each packed token belongs into; None when it is a rectangle already."""
    starts: Tensor | None
    """(B + 1): where each packed text begins."""
    spans: Spans | None
    """The same as each packed token knows it; None where whet's own attention is not in force."""
    num_texts: int
    """Those that are asked for come first; the fillers behind them are not pooled."""

    def as_rectangle(self, x: Tensor) -> Tensor:
        """(B, L, ...); the cells that packed tokens leave empty are zero."""
        if self.cells is None:
            return x
        rectangle = x.new_zeros(self.is_real.numel(), *x.shape[1:])
        return rectangle.index_copy(0, self.cells, x).unflatten(0, self.is_real.shape)

    def as_it_came(self, rectangle: Tensor) -> Tensor:
        """The way back: (B, L, ...) or (T, ...)."""
        return rectangle if self.cells is None else rectangle.flatten(0, 1)[self.cells]


def token_layout(tokens: Padded | Packed) -> TokenLayout:
    """Where the tokens of a batch belong."""
    device = tokens.values.device
    starts: Tensor | None
    if isinstance(tokens, Padded):
        lengths, longest = tokens.lengths, tokens.values.shape[1]
        positions, cells, starts, spans = torch.arange(longest, device=device), None, None, None
        num_texts = tokens.values.shape[0]
    else:
        starts, longest, num_texts = tokens.starts, tokens.max_length, tokens.num_samples
        lengths = starts.diff()
        everywhere = torch.arange(tokens.values.shape[0], device=device, dtype=starts.dtype)
        # Not in starts[1:]: compiled for a GPU, a view is read from its storage's begin on (pytorch#161609).
        owner = torch.bucketize(everywhere, starts, right=True) - 1
        positions = everywhere - starts[owner]
        spans = Spans.of(starts[owner], starts[owner + 1]) if is_own_kernel_on("attention") else None
        cells = owner * longest + positions
    columns = torch.arange(longest, device=device)
    is_real = columns < lengths[:, None]
    return TokenLayout(
        positions=positions,
        is_real=is_real,
        is_seen=is_real | (columns == 0),
        cells=cells,
        starts=starts,
        spans=spans,
        num_texts=num_texts,
    )


def attend(mixture: Tensor, layout: TokenLayout, *, num_heads: int, dropout: float = 0.0) -> Tensor:
    """Every token looks at the tokens of its own text; `mixture` holds queries, keys and values, 3 W wide.

    A packed batch stays as it is where the device has a kernel for it. Elsewhere it becomes a rectangle for this alone:
    B x L^2 scores, where a block-diagonal mask would take T^2.
    """
    size = mixture.shape[-1] // 3 // num_heads
    if layout.spans is not None and dropout == 0 and has_span_kernel(mixture, size):
        return span_attention(mixture, layout.spans, num_heads=num_heads)
    if layout.starts is not None and spans.has_varlen_kernel(mixture, num_heads=num_heads):
        longest = layout.is_real.shape[1]
        return spans.varlen_attention(mixture, layout.starts, num_heads=num_heads, longest=longest, dropout=dropout)
    cells = layout.as_rectangle(mixture)
    queries, keys, values = cells.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, L, W / H)
    mask = layout.is_seen[:, None, None]
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
    return layout.as_it_came(found.transpose(1, 2).flatten(2))


def mean_pool(x: Tensor, layout: TokenLayout) -> Tensor:
    """The mean over each text's own tokens, (texts, W)."""
    real = layout.is_real[: layout.num_texts, :, None]
    return (layout.as_rectangle(x)[: layout.num_texts] * real).sum(1) / real.sum(1).clamp(min=1)


def first_token(x: Tensor, layout: TokenLayout) -> Tensor:
    """The first token of each text, (texts, W)."""
    if layout.starts is None:
        return x[:, 0]
    # A text of no tokens at the very end begins behind the last one.
    return x.index_select(0, layout.starts[: layout.num_texts].clamp(max=x.shape[0] - 1))
