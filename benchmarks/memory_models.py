"""Models of the usual families whose steps take more than 500 MB, written with plain torch.nn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from whet.verify.trainable import Trainable, make_trainable

Made = tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]


@dataclass(frozen=True)
class Case:
    name: str
    size: int
    make: Callable[[int], Made]
    has_blocks: bool = True

    def trainable(self) -> Trainable:
        """Return the model with `size` samples; made of fake tensors under a fake mode."""
        return make_trainable(self.make(self.size), name=self.name)


class Encoder(nn.Module):
    """Like BERT base: 12 layers of 768 with dropout, norms after the blocks, a masked language model's head."""

    def __init__(self, vocabulary: int = 30_522, width: int = 768, layers: int = 12, length: int = 512) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.1, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.norm(self.words(tokens) + self.places(places)))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.into(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Like GPT-2 medium: 24 layers of 1024, words tied to the head."""

    def __init__(self, vocabulary: int = 50_257, width: int = 1024, layers: int = 24, length: int = 1024) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        is_same = stride == 1 and before == after
        self.short = (
            None if is_same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + (x if self.short is None else self.short(x)), inplace=True)


class ResNet(nn.Module):
    """Like ResNet-50."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(64)
        blocks, before = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                blocks.append(Bottleneck(before, width, stride if index == 0 else 1))
                before = 4 * width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.stem(images)), inplace=True), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A language model of three LSTM layers."""

    def __init__(self, vocabulary: int = 20_000, width: int = 1536, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.words(tokens))[0])


class Vision(nn.Module):
    """Like ViT-B/16: patches through 12 blocks with norms before them."""

    def __init__(self, width: int = 768, layers: int = 12, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, 196, width))
        self.blocks = nn.ModuleList(DecoderBlock(width, width // 64) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


class ConvNext(nn.Module):
    """Like ConvNeXt-T: depthwise convolutions, norms over channels last, four stages."""

    def __init__(self, widths: tuple[int, ...] = (96, 192, 384, 768), depths: tuple[int, ...] = (3, 3, 9, 3)) -> None:
        super().__init__()
        blocks: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4)]
        for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if index:
                blocks.append(nn.Conv2d(widths[index - 1], width, 2, 2))
            blocks += [ConvNextBlock(width) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


def perceptron(width: int = 4096, layers: int = 8) -> nn.Module:
    parts = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(width, 1000))


def _each_token(model: nn.Module, tokens: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def _each_sample(model: nn.Module, x: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), wanted)


def _text(model: Callable[[], nn.Module], vocabulary: int, length: int) -> Callable[[int], Made]:
    def make(size: int) -> Made:
        tokens = torch.randint(0, vocabulary, (size, length))
        return model(), (tokens, torch.randint(0, vocabulary, (size, length))), _each_token

    return make


def _classes(model: Callable[[], nn.Module], *shape: int) -> Callable[[int], Made]:
    def make(size: int) -> Made:
        return model(), (torch.randn(size, *shape), torch.randint(0, 1000, (size,))), _each_sample

    return make


CASES = (
    Case("BERT base, 512 tokens", 16, _text(Encoder, 30_522, 512)),
    Case("GPT-2 medium, 512 tokens", 8, _text(Decoder, 50_257, 512)),
    Case("ResNet-50, 224 x 224", 64, _classes(ResNet, 3, 224, 224)),
    Case("LSTM, 3 x 1536, 128 tokens", 32, _text(Recurrent, 20_000, 128), has_blocks=False),
    Case("ViT-B/16, 224 x 224", 64, _classes(Vision, 3, 224, 224)),
    Case("ConvNeXt-T, 224 x 224", 64, _classes(ConvNext, 3, 224, 224)),
    Case("perceptron, 8 x 4096", 4096, _classes(perceptron, 4096)),
)


def small(case: Case) -> Case:
    """Return the same kind of model, small enough for a CPU."""
    kinds: dict[str, Any] = {
        "BERT": _text(lambda: Encoder(500, 64, 2, 32), 500, 32),
        "GPT": _text(lambda: Decoder(500, 64, 2, 32), 500, 32),
        "ResNet": _classes(ResNet, 3, 32, 32),
        "LSTM": _text(lambda: Recurrent(500, 64, 2), 500, 16),
        "ViT": _classes(lambda: Vision(128, 2), 3, 224, 224),
        "ConvNeXt": _classes(lambda: ConvNext((16, 32, 32, 32), (1, 1, 1, 1)), 3, 64, 64),
        "perceptron": _classes(lambda: perceptron(256, 2), 256),
    }
    make = next(make for name, make in kinds.items() if case.name.startswith(name))
    return Case(f"small {case.name.partition(',')[0]}", 4, make, case.has_blocks)
