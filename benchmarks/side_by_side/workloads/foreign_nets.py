"""Networks in plain PyTorch, as a user writes them."""

import torch
from torch import Tensor, nn


def mlp(width: int, depth: int, *, classes: int) -> nn.Module:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(*layers, nn.Linear(width, classes))


class ConvBlock(nn.Module):
    """Two convolutions with BatchNorm around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class ConvNet(nn.Sequential):
    def __init__(self, width: int, depth: int, *, classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1),
            *(ConvBlock(width) for _ in range(depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, classes),
        )


class Stage(nn.Module):
    """Two convolutions with GroupNorm; the time of a diffusion step shifts the channels between them."""

    def __init__(self, inputs: int, outputs: int, time_width: int | None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, outputs), nn.GroupNorm(4, outputs)
        self.time = None if time_width is None else nn.Linear(time_width, outputs)

    def forward(self, x: Tensor, time: Tensor | None) -> Tensor:
        x = nn.functional.silu(self.norm1(self.first(x)))
        if self.time is not None and time is not None:
            x = x + self.time(time)[:, :, None, None]
        return nn.functional.silu(self.norm2(self.second(x)))


class UNet(nn.Module):
    def __init__(self, width: int, levels: int, *, outputs: int, has_time: bool = False) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        time_width = width if has_time else None
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width)) if has_time else None
        self.down = nn.ModuleList(
            Stage(inputs, each, time_width) for inputs, each in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(
            Stage(above + each, each, time_width) for each, above in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        code = None if self.time is None or time is None else self.time(time[:, None])
        kept = []
        for level, stage in enumerate(self.down):
            x = stage(x if level == 0 else self.pool(x), code)
            kept.append(x)
        for stage, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            x = stage(torch.cat([self.grow(x), beside], dim=1), code)
        return self.head(x)


class LstmModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


class Recommender(nn.Module):
    """Embeddings of several fields in one table, their products, and an MLP."""

    def __init__(self, rows: int, fields: int, width: int, dense: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.bottom = nn.Sequential(nn.Linear(dense, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        pairs = (fields + 1) * fields // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 1))
        self.register_buffer("pairs", torch.triu_indices(fields + 1, fields + 1, offset=1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        rows = torch.cat([bottom[:, None], self.table(ids).to(bottom.dtype)], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products.to(bottom.dtype)], dim=1)).squeeze(1)
