"""Causal language models, recursive (trm) and plain (gpt), and their loss.

Shapes: B rows, S positions, W width, V tokens of the vocabulary.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import DictBatch
from whet.data.padding import IGNORED_LABEL
from whet.device.kernels.attention import Spans, has_span_kernel
from whet.recipes.chat.architecture import ChatArch
from whet.recipes.layers import (
    AttentionArgs,
    KeyValueCache,
    PostNormBlock,
    SelfAttention,
    SwiGLU,
    init_embedding,
    init_linear,
    refine,
    rms_norm,
    rotary_angles,
    truncated_normal_,
)


def document_attention(is_start: Tensor, *, head_size: int, like: Tensor) -> AttentionArgs:
    """Return arguments with which each position attends to itself and the earlier positions of its document.

    `is_start`, (B, S), is true where a document begins. Padding is a separate document at the end of a row. `like` has
    the dtype and device of the computation.
    """
    document = is_start.cumsum(1)
    if has_span_kernel(like, head_size):
        indices = torch.arange(is_start.shape[1], device=is_start.device)
        return AttentionArgs(rotation=rotary_angles(indices, head_size), spans=_spans(document), is_causal=True)
    is_same = document[:, :, None] == document[:, None, :]
    is_visible = is_same & _is_earlier(is_start.shape[1], is_start.device)
    positions = is_visible.sum(2) - 1
    return AttentionArgs(
        rotation=rotary_angles(positions, head_size), mask=_additive_mask(is_visible, like.dtype)[:, None]
    )


def _spans(document: Tensor) -> Spans:
    """Return the spans of documents in the concatenated rows. `document`, (B, S), numbers them within each row."""
    rows, length = document.shape
    before = length * torch.arange(rows, device=document.device)[:, None]
    # Document numbers ascend within a row, so binary search finds the first and last position of each document.
    firsts, lasts = (torch.searchsorted(document, document, right=is_end) + before for is_end in (False, True))
    return Spans.of(firsts.flatten(), lasts.flatten())


def cached_attention(
    positions: Tensor, num_keys: int, *, cache: KeyValueCache | None, head_size: int, dtype: torch.dtype
) -> AttentionArgs:
    """Return arguments with which tokens at `positions`, (B, S), attend to all cached keys up to their position.

    Each row is one document.
    """
    is_visible = torch.arange(num_keys, device=positions.device) <= positions[:, :, None]
    return AttentionArgs(
        rotation=rotary_angles(positions, head_size), mask=_additive_mask(is_visible, dtype)[:, None], memory=cache
    )


def _is_earlier(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _additive_mask(is_visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the attention scores: 0 where visible, minus infinity elsewhere."""
    # With a bool mask, kernels would do this conversion in every layer.
    return torch.zeros(is_visible.shape, dtype=dtype, device=is_visible.device).masked_fill(~is_visible, -torch.inf)


class CausalModel(nn.Module):
    """Base class of language models. Outputs depend only on the current and earlier positions of a document."""

    def __init__(self, arch: ChatArch, *, vocab_size: int, dropout: float) -> None:
        super().__init__()
        self.arch = arch
        self.dropout = nn.Dropout(dropout)
        self.tokens = init_embedding(vocab_size, arch.hidden_size)
        self.head = None if arch.tied else init_linear(arch.hidden_size, vocab_size)

    def forward(self, tokens: Tensor, is_start: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the states of each supervised pass, (B, S, W). The last one is the result.

        If `targets`, (B, S), are given, return the summed cross entropy of each pass instead. The loss is then compiled
        with the model. See `document_attention` for `is_start`.
        """
        x = self._embed(tokens)
        states = self.states(x, document_attention(is_start, head_size=self.head_size, like=x))
        if targets is None:
            return states
        return tuple(summed_cross_entropy(self.logits(one), targets) for one in states)

    def forward_cached(
        self, tokens: Tensor, positions: Tensor, *, cache: KeyValueCache | None, num_keys: int
    ) -> Tensor:
        """Return the final states of new positions, (B, S, W), using cached keys and values of earlier positions."""
        x = self._embed(tokens)
        args = cached_attention(positions, num_keys, cache=cache, head_size=self.head_size, dtype=x.dtype)
        return self.states(x, args)[-1]

    @abstractmethod
    def states(self, x: Tensor, args: AttentionArgs) -> tuple[Tensor, ...]:
        """Return the states of each supervised pass, (B, S, W), for embedded tokens `x`, (B, S, W)."""

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of the next token, (..., V)."""
        return functional.linear(states, self.tokens.weight) if self.head is None else self.head(states)

    @property
    def head_size(self) -> int:
        return self.arch.hidden_size // self.arch.num_heads

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens. Under autocast, cast to its dtype, so that residual sums stay in half precision."""
        # The embedding is initialized with a standard deviation of 1 / sqrt(W). Scale it to 1.
        x = self.dropout(math.sqrt(self.arch.hidden_size) * self.tokens(tokens))
        device = x.device.type
        return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropies of all targets that are not IGNORED_LABEL, in nats."""
    # Compute in float32, because the sum over the vocabulary loses accuracy in half precision.
    return functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def next_token_loss(model: CausalModel, micro: DictBatch) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy, averaged over the supervised passes, and the number of loss tokens."""
    targets = next_tokens(micro)
    nats = model(*model_inputs(micro), targets)
    return torch.stack(nats).mean(0), (targets != IGNORED_LABEL).sum()


def model_inputs(micro: DictBatch) -> tuple[Tensor, Tensor]:
    """Return `tokens` and `is_start` without the last position, which is only a target."""
    return micro.tokens[:, :-1], micro.is_start[:, :-1]


def next_tokens(micro: DictBatch) -> Tensor:
    """Return the next token at each position, or IGNORED_LABEL if the loss does not include it."""
    return micro.tokens[:, 1:].long().masked_fill(~micro.is_loss[:, 1:], IGNORED_LABEL)


class GPT(CausalModel):
    """A plain transformer for comparison, built from the same layers as the recursive model.

    With arch.match=parameters, it has as many blocks as the recursive model. With arch.match=compute, it has as many
    blocks as the recursive model applies, so that the cost per token is equal.
    """

    def __init__(self, arch: ChatArch, *, vocab_size: int, dropout: float) -> None:
        super().__init__(arch, vocab_size=vocab_size, dropout=dropout)
        self.blocks = nn.ModuleList(_PreNormBlock(arch, dropout=dropout) for _ in range(arch.depth))

    def states(self, x: Tensor, args: AttentionArgs) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = block(x, args)
        return (rms_norm(x),)


class _PreNormBlock(nn.Module):
    """A pre-norm block of attention and a feed-forward layer, whose output layers start with smaller weights."""

    def __init__(self, arch: ChatArch, *, dropout: float) -> None:
        super().__init__()
        self.attention = SelfAttention(arch.hidden_size, num_heads=arch.num_heads)
        self.feed_forward = SwiGLU(arch.hidden_size, expansion=arch.expansion)
        self.dropout = nn.Dropout(dropout)
        # Each block adds two outputs to the residual stream. As in GPT-2, this scale makes the variance of their sum
        # independent of depth.
        with torch.no_grad():
            for layer in (self.attention.out, self.feed_forward.down):
                layer.weight.div_(math.sqrt(2 * arch.depth))

    def forward(self, x: Tensor, args: AttentionArgs) -> Tensor:
        x = x + self.dropout(self.attention(rms_norm(x), args))
        return x + self.dropout(self.feed_forward(rms_norm(x)))


class RecursiveModel(CausalModel):
    """A tiny recursive language model: one small network refines two states per position.

    There are `supervision` passes of `H_cycles` cycles, each of which applies the blocks `L_cycles + 1` times. A pass
    continues with the states of the previous one, but gradients do not flow between passes. The states of all positions
    start from the same two vectors. A composition of causal functions is causal, so the number of cycles is arbitrary.
    """

    answer: Tensor
    latent: Tensor

    def __init__(self, arch: ChatArch, *, vocab_size: int, dropout: float) -> None:
        super().__init__(arch, vocab_size=vocab_size, dropout=dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(arch.hidden_size, num_heads=arch.num_heads, expansion=arch.expansion, dropout=dropout)
            for _ in range(arch.L_layers)
        )
        # Use buffers instead of parameters: the initial states are random and fixed, as in the official implementation.
        for name in ("answer", "latent"):
            self.register_buffer(name, truncated_normal_(torch.empty(arch.hidden_size), deviation=1.0))

    def states(self, x: Tensor, args: AttentionArgs) -> tuple[Tensor, ...]:
        def net(state: Tensor, added: Tensor) -> Tensor:
            state = state + added
            for block in self.blocks:
                state = block(state, args)
            return state

        y, z = (start.to(x.dtype).expand_as(x) for start in (self.answer, self.latent))
        states = []
        for _ in range(self.arch.supervision):
            y, z = refine(net, y.detach(), z.detach(), x, outer=self.arch.H_cycles, inner=self.arch.L_cycles)
            states.append(y)
        return tuple(states)


def build_model(arch: ChatArch, *, vocab_size: int, dropout: float = 0.0) -> CausalModel:
    """Create the model. Initial weights are drawn from torch's default generator."""
    kinds: dict[str, type[CausalModel]] = {"trm": RecursiveModel, "gpt": GPT}
    return kinds[arch.kind](arch, vocab_size=vocab_size, dropout=dropout)
