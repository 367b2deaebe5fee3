"""What do both language models share? Tables of tokens in and out, and how a batch of rows is read.

Shapes: B rows, S places, W width, V tokens of the vocabulary.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.recipes.chat.arch import Arch
from whet.recipes.chat.model.looking import look_back, look_in_documents
from whet.recipes.layers import AttentionArgs, KeyValueCache, init_embedding, init_linear

IGNORED = -100
"""The target of a place at which nothing is to be predicted."""


class CausalModel(nn.Module):
    """A language model: what comes out at a place depends on that place and earlier ones of its document."""

    def __init__(self, arch: Arch, *, vocab_size: int, dropout: float) -> None:
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
        found = self.states(x, look_in_documents(is_start, head_size=self.head_size, like=x))
        return found if targets is None else tuple(surprise(self.logits(states), targets) for states in found)

    def go_on(self, tokens: Tensor, positions: Tensor, *, memory: KeyValueCache | None, num_keys: int) -> Tensor:
        """The last states of new places, (B, S, W), in rows of one document each; `memory` knows earlier places."""
        x = self._read(tokens)
        look = look_back(positions, num_keys, memory=memory, head_size=self.head_size, dtype=x.dtype)
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


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of -ln p over all targets that count."""
    return functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
