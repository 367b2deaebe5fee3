"""Losses and helpers of the tests of captured steps."""

import torch
from torch import nn
from torch.nn import functional


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def rows(num_samples=40):
    torch.manual_seed(1)
    return torch.randn(num_samples, 6), torch.randint(0, 3, (num_samples,))


def mean_loss(model):
    return lambda micro: functional.cross_entropy(model(micro.x), micro.y)


class Norm(nn.Module):
    """BatchNorm and dropout: what a forward pass writes to and draws."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)


def plain_loss(model, micro):
    return functional.cross_entropy(model(micro.x), micro.y)


def waits(model, micro):
    each = functional.cross_entropy(model(micro.x), micro.y, reduction="none")
    return each.mean() if float(each.detach().max()) > 0 else each.sum()
