"""The two small models that the checks train: a causal transformer and a convnet."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from whet.doctor.checks.compare import draw, draw_integers

VOCABULARY = 256


class SmallTransformer(nn.Module):
    """A causal language model with embeddings, pre-norm blocks and a linear head."""

    def __init__(self, *, width: int = 64, layers: int = 2, length: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_TransformerBlock(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _TransformerBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.attention_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(seen))
        return x + self.dropout(self.narrow(f.gelu(self.widen(self.feed_norm(x)))))


def convnet() -> nn.Module:
    """Return a classifier of 3 x 16 x 16 images into ten classes, made of convolutions, norms and pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(12, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@dataclass(frozen=True)
class ModelTask:
    """A model with one batch of inputs and targets."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, model: nn.Module) -> Tensor:
        """Return the mean loss of a copy of the model, on the device of that copy."""
        where = next(model.parameters()).device
        return f.cross_entropy(model(self.x.to(where)).flatten(0, -2), self.y.to(where).flatten())


def transformer_task() -> ModelTask:
    torch.manual_seed(0)
    tokens = draw_integers(8, 33, below=VOCABULARY, seed=1)
    return ModelTask(SmallTransformer(), tokens[:, :-1], tokens[:, 1:])


def convnet_task() -> ModelTask:
    torch.manual_seed(0)
    return ModelTask(convnet(), draw(16, 3, 16, 16, seed=1), draw_integers(16, below=10, seed=2))
