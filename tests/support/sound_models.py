"""Models without a problem: nothing may be reported for them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[Any, ...]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention_in(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        mixed = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, *, words: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gpt() -> Made:
    model = Gpt(words=1_000, width=128, layers=3, heads=4, length=128)
    return model, (torch.randint(0, 1_000, (8, 128)),), _next_token


def gpt_350m() -> Made:
    """As large as GPT-2 medium, with a vocabulary of 32,000."""
    model = Gpt(words=32_000, width=1024, layers=24, heads=16, length=1024)
    return model, (torch.randint(0, 32_000, (8, 1024)),), _next_token


def causal_gpt() -> Made:
    return gpt()[:2]


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.short = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.short(x))


def convnet() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 7, 2, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(32, 64, 1), Residual(64, 128, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(images), labels, label_smoothing=0.1)

    return model, (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))), loss


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True), nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])


def lstm() -> Made:
    return Tagger(), (torch.randn(4, 12, 16),)
