"""A small GPT, and faults in its attention: all of them planted."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.data.batch import MicroBatch

VOCABULARY = 23


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Predicts the next token; `tokens` has one position more than the model reads."""

    def __init__(self, *, width: int = 32, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def outputs(self, micro: MicroBatch) -> Tensor:
        return self(micro.tokens[:, :-1])

    def loss(self, micro: MicroBatch) -> Tensor:
        return functional.cross_entropy(self.outputs(micro).flatten(0, 1), micro.tokens[:, 1:].flatten())


def sentences(num_samples: int, *, length: int = 17, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"tokens": torch.randint(0, VOCABULARY, (num_samples, length), generator=draw)}


def micro_of(num_samples: int = 8, *, length: int = 17) -> MicroBatch:
    return MicroBatch(fields=sentences(num_samples, length=length), ids=np.arange(num_samples))


@contextmanager
def leaking_attention(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Simulated: with is_causal=True, position 5 of the first head sees position 6, in one dtype or in all."""
    original = functional.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
        half = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else None
        is_faulty = is_causal and (dtype is None or dtype in (query.dtype, half))
        right = original(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if not is_faulty or query.shape[-2] < 7:
            return right
        wrong = original(query[:, :1, 5:6], key[:, :1, :7], value[:, :1, :7], **more)
        is_there = torch.zeros(right.shape[1:3], dtype=torch.bool, device=right.device)
        is_there[0, 5] = True
        return torch.where(is_there[..., None], wrong, right)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original
