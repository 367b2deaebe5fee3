"""Small models, each with one planted problem. A comment marks the line that must be reported."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Made = tuple[Any, ...]


class Net(nn.Module):
    """A linear layer with a custom forward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)


def ctc() -> Made:
    model = nn.Linear(8, 6)

    def loss(model: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
        scores = model(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((4,), 20), torch.full((4,), 5)
        return functional.ctc_loss(scores, targets, *lengths)  # missing-operator

    return model, (torch.randn(4, 20, 8), torch.randint(1, 6, (4, 5))), loss


def svd() -> Made:
    class Orthogonal(Net):
        def forward(self, x: Tensor) -> Tensor:
            u, _, v = torch.linalg.svd(self.inner.weight)  # cpu-fall-back
            return x @ (u @ v)

    return Orthogonal(), (torch.randn(4, 8),)


def float64_buffer() -> Made:
    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.from_numpy(np.linspace(0, 1, 8)))  # float64

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale.float()

    return Scaled(), (torch.randn(4, 8),)


def item_in_the_loop() -> Made:
    class Looping(Net):
        def forward(self, x: Tensor) -> Tensor:
            total = 0.0
            for row in x:
                total += row.abs().max().item()  # wait-for-device
            return self.inner(x) * total

    return Looping(), (torch.randn(4, 8),)


def seventeen_dimensions() -> Made:
    class Deep(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            cube = y.view(*[2] * 17)  # too-many-dimensions
            return cube.sum(-1)

    return Deep(), (torch.randn(2**14, 8),)


def strided_conv_weight() -> Made:
    model = nn.Conv2d(3, 8, (3, 5))
    model.weight.data = model.weight.data.transpose(2, 3)  # strided-weight
    return model, (torch.randn(4, 3, 16, 16),)


def transposed_conv_in_forward() -> Made:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, 3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return functional.conv2d(x, self.weight.transpose(2, 3))  # known-fault/conv-weights

    return Turned(), (torch.randn(4, 3, 16, 16),)


def dynamic_shapes() -> Made:
    class Picking(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return y[x > 0].mean()  # dynamic-shape

    return Picking(), (torch.randn(4, 8),)


def mixed_dtypes() -> Made:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[2].to(torch.bfloat16)  # mixed-dtypes

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model[2](model[:2](x).bfloat16()).float().square().mean()  # type: ignore[index, operator]

    return model, (torch.randn(4, 8),), loss


def changing_dtype() -> Made:
    """The optimizer state keeps the old dtype: visible only in the second step, and on no line of the model."""

    class Narrowing(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x.to(self.inner.weight.dtype))
            if self.inner.weight.grad is None and hasattr(self, "was_here"):
                self.inner.to(torch.bfloat16)
                y = self.inner(x.bfloat16())
            self.was_here = True
            return y.float()

    return Narrowing(), (torch.randn(4, 8),)


def mlp_mixer() -> Made:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.across, self.along = nn.Linear(16, 16), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:  # not-causal
            return self.along(self.across(x.transpose(1, 2)).transpose(1, 2))

    return Mixer(), (torch.randn(4, 16, 8),)


def five_gigabytes() -> Made:
    class Table(Net):
        def forward(self, x: Tensor) -> Tensor:
            pairs = x[:, :, None] * x[:, None, :]  # buffer-too-large
            return self.inner(pairs[:, 0, :8])

    return Table(), (torch.randn(1, 35_400),)


def uneven_pool() -> Made:
    model = nn.Conv2d(3, 8, 3)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return functional.adaptive_avg_pool2d(model(x), 5).mean()  # adaptive-pool

    return model, (torch.randn(4, 3, 16, 16),), loss


def many_rows() -> Made:
    class Wide(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # known-fault/linear-rows

    return Wide(), (torch.randn(40, 1024, 8),)


def decides_by_value() -> Made:
    """Fake tensors fail with both values of the condition; a few real samples work."""

    class Deciding(Net):
        def forward(self, x: Tensor) -> Tensor:
            if bool((x > 1e9).any()) or not bool((x < 1e9).any()):  # wait-for-device
                raise ValueError("no such input")
            return torch.linalg.eigvalsh(self.inner.weight @ self.inner.weight.T) + x

    return Deciding(), (torch.randn(4, 8),)


def host_only() -> Made:
    """Data copied to the host may have any dtype there; only the copy is reported."""

    class Watching(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            self.seen = y.detach().cpu()  # wait-for-device
            self.mean = self.seen.double().mean().item()
            return y

    return Watching(), (torch.randn(4, 8),)


def custom_operator() -> Made:
    class Custom(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.flawed.twice(self.inner(x))  # unknown-operator

    return Custom(), (torch.randn(4, 8),)


if not hasattr(torch.ops.flawed, "twice"):
    _LIBRARY = torch.library.Library("flawed", "DEF")
    _LIBRARY.define("twice(Tensor x) -> Tensor")
    _LIBRARY.impl("twice", lambda x: x * 2, "CPU")
    _LIBRARY.impl("twice", lambda x: x * 2, "Meta")
    torch.library.register_autograd("flawed::twice", lambda _, gradient: gradient * 2)
