"""Causal language models, recursive (trm) and plain (gpt), with their loss."""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import MicroBatch
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
    """For rows that hold several documents; `is_start` is (B, S), true where one begins. Positions begin anew there.

    What fills a row up is a document of its own at the end, so that nobody looks at it. `like`: what is computed with.
    """
    document = is_start.cumsum(1)
    if has_span_kernel(like, head_size):
        places = torch.arange(is_start.shape[1], device=is_start.device)
        return AttentionArgs(rotation=rotary_angles(places, head_size), spans=_spans(document), is_causal=True)
    is_same = document[:, :, None] == document[:, None, :]
    may_look = is_same & _is_earlier(is_start.shape[1], is_start.device)
    positions = may_look.sum(2) - 1
    return AttentionArgs(
        rotation=rotary_angles(positions, head_size), mask=_additive_mask(may_look, like.dtype)[:, None]
    )


def _spans(document: Tensor) -> Spans:
    """Of all rows, one behind the other; documents are counted in each, (B, S)."""
    rows, length = document.shape
    before = length * torch.arange(rows, device=document.device)[:, None]
    firsts, lasts = (torch.searchsorted(document, document, right=is_end) + before for is_end in (False, True))
    return Spans.of(firsts.flatten(), lasts.flatten())


def cached_attention(
    positions: Tensor, num_keys: int, *, memory: KeyValueCache | None, head_size: int, dtype: torch.dtype
) -> AttentionArgs:
    """For rows of one document each: (B, S) places of new tokens, which look at all keys at or before them."""
    may_look = torch.arange(num_keys, device=positions.device) <= positions[:, :, None]
    return AttentionArgs(
        rotation=rotary_angles(positions, head_size), mask=_additive_mask(may_look, dtype)[:, None], memory=memory
    )


def _is_earlier(length: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def _additive_mask(may_look: Tensor, dtype: torch.dtype) -> Tensor:
    """As numbers that are added to the scores; made once, since kernels would make it anew in every layer."""
    return torch.zeros(may_look.shape, dtype=dtype, device=may_look.device).masked_fill(~may_look, -torch.inf)


IGNORED = -100
"""The target of a place at which nothing is to be predicted."""


class CausalModel(nn.Module):
    """A language model: what comes out at a place depends on that place and earlier ones of its document."""

    def __init__(self, arch: ChatArch, *, vocab_size: int, dropout: float) -> None:
        super().__init__()
        self.arch = arch
        self.dropout = nn.Dropout(dropout)
        self.tokens = init_embedding(vocab_size, arch.hidden_size)
        self.head = None if arch.tied else init_linear(arch.hidden_size, vocab_size)

    def forward(self, tokens: Tensor, is_start: Tensor, targets: Tensor | None = None) -> tuple[Tensor, ...]:
        """The states of each supervised pass, (B, S, W); the last one is the answer. `is_start`: see looking.py.

        With targets, (B, S), the surprise at them after each pass instead: so it is compiled along with the model.
        """
        x = self._read(tokens)
        found = self.states(x, document_attention(is_start, head_size=self.head_size, like=x))
        return (
            found if targets is None else tuple(summed_cross_entropy(self.logits(states), targets) for states in found)
        )

    def go_on(self, tokens: Tensor, positions: Tensor, *, memory: KeyValueCache | None, num_keys: int) -> Tensor:
        """The last states of new places, (B, S, W), in rows of one document each; `memory` knows earlier places."""
        x = self._read(tokens)
        look = cached_attention(positions, num_keys, memory=memory, head_size=self.head_size, dtype=x.dtype)
        return self.states(x, look)[-1]

    @abstractmethod
    def states(self, x: Tensor, look: AttentionArgs) -> tuple[Tensor, ...]:
        """From embedded tokens to the states of each supervised pass."""

    def logits(self, states: Tensor) -> Tensor:
        """Scores of all tokens that may come next, (..., V)."""
        return functional.linear(states, self.tokens.weight) if self.head is None else self.head(states)

    @property
    def head_size(self) -> int:
        return self.arch.hidden_size // self.arch.num_heads

    def _read(self, tokens: Tensor) -> Tensor:
        """Embedded tokens; in half precision where products are computed in it, so that sums are not widened again."""
        x = self.dropout(math.sqrt(self.arch.hidden_size) * self.tokens(tokens))
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of -ln p over all targets that count."""
    return functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def next_token_loss(model: CausalModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Nats in all, averaged over supervised passes, and the number of tokens: so micro-batches weigh by tokens."""
    targets = next_tokens(micro)
    nats = model(*model_inputs(micro), targets)
    return torch.stack(nats).mean(0), (targets != IGNORED).sum()


def model_inputs(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Tokens and where documents begin, without the last place: nothing comes after it."""
    return micro.tokens[:, :-1], micro.is_start[:, :-1]


def next_tokens(micro: MicroBatch) -> Tensor:
    """The token that comes next at each place, and a number that is ignored where it does not count."""
    return micro.tokens[:, 1:].long().masked_fill(~micro.is_loss[:, 1:], IGNORED)


class GPT(CausalModel):
    """Embedding, blocks that add to what comes in, a norm, and the head."""

    def __init__(self, arch: ChatArch, *, vocab_size: int, dropout: float) -> None:
        super().__init__(arch, vocab_size=vocab_size, dropout=dropout)
        self.blocks = nn.ModuleList(_PreNormBlock(arch, dropout=dropout) for _ in range(arch.depth))

    def states(self, x: Tensor, look: AttentionArgs) -> tuple[Tensor, ...]:
        for block in self.blocks:
            x = block(x, look)
        return (rms_norm(x),)


class _PreNormBlock(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in; what is added begins small."""

    def __init__(self, arch: ChatArch, *, dropout: float) -> None:
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


class RecursiveModel(CausalModel):
    """N passes of T outer cycles of n + 1 applications of L blocks; the states go on, gradients do not."""

    answer: Tensor
    latent: Tensor

    def __init__(self, arch: ChatArch, *, vocab_size: int, dropout: float) -> None:
        super().__init__(arch, vocab_size=vocab_size, dropout=dropout)
        self.blocks = nn.ModuleList(
            PostNormBlock(arch.hidden_size, num_heads=arch.num_heads, expansion=arch.expansion, dropout=dropout)
            for _ in range(arch.L_layers)
        )
        for name in ("answer", "latent"):
            self.register_buffer(name, truncated_normal_(torch.empty(arch.hidden_size), deviation=1.0))

    def states(self, x: Tensor, look: AttentionArgs) -> tuple[Tensor, ...]:
        def net(state: Tensor, added: Tensor) -> Tensor:
            state = state + added
            for block in self.blocks:
                state = block(state, look)
            return state

        y, z = (start.to(x.dtype).expand_as(x) for start in (self.answer, self.latent))
        found = []
        for _ in range(self.arch.supervision):
            y, z = refine(net, y.detach(), z.detach(), x, outer=self.arch.H_cycles, inner=self.arch.L_cycles)
            found.append(y)
        return tuple(found)


def build_model(arch: ChatArch, *, vocab_size: int, dropout: float = 0.0) -> CausalModel:
    """With its first weights, drawn from torch's generator."""
    kinds: dict[str, type[CausalModel]] = {"trm": RecursiveModel, "gpt": GPT}
    return kinds[arch.kind](arch, vocab_size=vocab_size, dropout=dropout)
