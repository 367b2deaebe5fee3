"""Attention and pooling for both padded and packed batches.

Shapes: B texts (filler texts included), L tokens of the longest text, T tokens in total, W width, H heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from whet.data.batch import Packed, Padded
from whet.device.kernels.attention import Spans, has_span_kernel, has_varlen_kernel, span_attention, varlen_attention
from whet.device.kernels.switches import is_whet_kernel_on


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLayout:
    """The text and position of each token. Computed once per forward pass, without a device synchronization."""

    positions: Tensor
    """The position of each token in its text: (L) or (T)."""
    is_real: Tensor
    """(B, L): false for padding."""
    is_seen: Tensor
    """(B, L): the attention mask. Includes the first cell of an empty text, because a softmax over nothing is NaN."""
    cells: Tensor | None
    """(T): the index of each packed token in the flattened (B, L) rectangle; None for a padded batch."""
    starts: Tensor | None
    """(B + 1): the start of each packed text; None for a padded batch."""
    spans: Spans | None
    """The start and end of each packed token's text, for whet's attention kernels; None if they are not used."""
    num_texts: int
    """The number of texts, excluding the filler texts at the end of a packed batch, which are not pooled."""

    def to_padded(self, x: Tensor) -> Tensor:
        """Return x as (B, L, ...), padded with zeros."""
        if self.cells is None:
            return x
        rectangle = x.new_zeros(self.is_real.numel(), *x.shape[1:])
        return rectangle.index_copy(0, self.cells, x).unflatten(0, self.is_real.shape)

    def from_padded(self, rectangle: Tensor) -> Tensor:
        """Invert `to_padded`: return (B, L, ...) or (T, ...)."""
        return rectangle if self.cells is None else rectangle.flatten(0, 1)[self.cells]


def token_layout(tokens: Padded | Packed) -> TokenLayout:
    """Compute the positions and spans of the tokens of a padded or packed batch."""
    device = tokens.values.device
    starts: Tensor | None
    if isinstance(tokens, Padded):
        lengths, longest = tokens.lengths, tokens.values.shape[1]
        positions, cells, starts, spans = torch.arange(longest, device=device), None, None, None
        num_texts = tokens.values.shape[0]
    else:
        starts, longest, num_texts = tokens.starts, tokens.max_length, tokens.num_samples
        lengths = starts.diff()
        indices = torch.arange(tokens.values.shape[0], device=device, dtype=starts.dtype)
        # Do not pass the view starts[1:]: in code compiled for a GPU, bucketize ignores the storage offset of a view
        # (pytorch#161609).
        text = torch.bucketize(indices, starts, right=True) - 1
        positions = indices - starts[text]
        spans = Spans.of(starts[text], starts[text + 1]) if is_whet_kernel_on("attention") else None
        # The index of each token in the flattened (B, L) rectangle.
        cells = text * longest + positions
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


def attend(qkv: Tensor, layout: TokenLayout, *, num_heads: int, dropout: float = 0.0) -> Tensor:
    """Compute self-attention within each text. `qkv` contains queries, keys and values side by side, 3 W wide.

    A packed batch stays packed if the device has a kernel for it. Otherwise it is padded for the attention only, which
    then needs B x L^2 scores. A block-diagonal mask would need T^2.
    """
    head_size = qkv.shape[-1] // 3 // num_heads
    # In order of speed: whet's kernels, torch's variable-length kernel, a padded rectangle.
    if layout.spans is not None and dropout == 0 and has_span_kernel(qkv, head_size):
        return span_attention(qkv, layout.spans, num_heads=num_heads)
    if layout.starts is not None and has_varlen_kernel(qkv, num_heads=num_heads):
        longest = layout.is_real.shape[1]
        return varlen_attention(qkv, layout.starts, num_heads=num_heads, max_length=longest, dropout=dropout)
    padded = layout.to_padded(qkv)
    # Queries, keys and values, each (B, H, L, W / H).
    queries, keys, values = padded.unflatten(-1, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    # The mask is true where attention is allowed. It is broadcast over heads and queries.
    mask = layout.is_seen[:, None, None]
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout)
    return layout.from_padded(out.transpose(1, 2).flatten(2))


def mean_pool(x: Tensor, layout: TokenLayout) -> Tensor:
    """Return the mean over the tokens of each text, (texts, W)."""
    real = layout.is_real[: layout.num_texts, :, None]
    # Clamp the count: an empty text has no tokens to average.
    return (layout.to_padded(x)[: layout.num_texts] * real).sum(1) / real.sum(1).clamp(min=1)


def first_token(x: Tensor, layout: TokenLayout) -> Tensor:
    """Return the first token of each text, (texts, W)."""
    if layout.starts is None:
        return x[:, 0]
    # Clamp the index: an empty text at the very end starts after the last token.
    return x.index_select(0, layout.starts[: layout.num_texts].clamp(max=x.shape[0] - 1))
