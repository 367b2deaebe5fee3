"""Check a residual convnet for a Mac on any computer: there are no findings.

whet check examples/check_convnet.py --machine m2-air-8gb
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

import whet


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.short = nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + self.short(x))


def model():
    net = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Residual(64, 64, 1), Residual(64, 128, 2), Residual(128, 256, 2), Residual(256, 512, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000),
    )  # fmt: skip
    images, labels = torch.randn(32, 3, 224, 224), torch.randint(0, 1000, (32,))
    return net, (images, labels), lambda net, images, labels: functional.cross_entropy(net(images), labels)


if __name__ == "__main__":
    result = whet.check(model, machine="m2-air-8gb")
    print(f"{result.num_parameters:,} parameters, {len(result.findings)} findings")
