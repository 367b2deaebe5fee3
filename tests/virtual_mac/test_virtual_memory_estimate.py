"""Memory estimates for MPS, against the peak that the virtual Mac's allocator counts while the same steps are made."""

import pytest
from conftest import Start

from virtual_process import INSTALL

pytestmark = [pytest.mark.torch, pytest.mark.virtual_mac]

COMPARE = (
    INSTALL
    + """
import torch
from contextlib import nullcontext
from torch import nn
from torch.nn import functional
from whet.device.open import open_device
from whet.step.optimizers import make_optimizer
from whet.step.model_contexts import recompute_blocks
from whet.step.step import Stepper
from whet.verify.memory.estimate import estimate_memory
from whet.verify.trainable import TrainableSpec, make_trainable

def classify(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

def transformer():
    layer = lambda: nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, activation="gelu")
    model = nn.Sequential(nn.Embedding(1000, 128), *(layer() for _ in range(3)), nn.Linear(128, 1000))
    return model, (torch.randint(0, 1000, (8, 128)), torch.randint(0, 1000, (8, 128))), classify

def convolutions():
    block = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
    blocks = nn.ModuleList([block(3, 64), block(64, 64), block(64, 64)])
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = blocks, nn.Linear(64, 10)
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3)))
    return Net(), (torch.randn(16, 3, 48, 48), torch.randint(0, 10, (16,))), classify

def perceptron():
    layers = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(768, 10)), (torch.randn(512, 768), torch.randint(0, 10, (512,))), classify

def compare(family, is_checkpointed, num_splits):
    spec = TrainableSpec(name=family.__name__, make=lambda: make_trainable(family(), name=family.__name__))
    guess = estimate_memory(spec, device="mps", activation_checkpointing=is_checkpointed)
    torch.manual_seed(0)
    device = open_device("mps").device
    trainable = spec.make()
    device.put_model(trainable.model)
    optimizer = make_optimizer(trainable.optimizer, trainable.model, device)
    stepper = Stepper(trainable.model, optimizer, device, clip=1.0)
    size = trainable.batch_size // num_splits
    micros = [trainable.make_batch(size) for _ in range(num_splits)]
    with recompute_blocks(trainable.model) if is_checkpointed else nullcontext():
        for step in (1, 2, 3):
            if step == 2:
                virtual_mac.reset_stats()
            stepper(trainable.loss, micros, num_samples=trainable.batch_size, step=step)
    peak = virtual_mac.stats().peak
    print(family.__name__, is_checkpointed, num_splits, peak, guess.bytes_at(size, is_split=num_splits > 1) / peak)

for family in (transformer, convolutions, perceptron):
    for is_checkpointed in (False, True):
        compare(family, is_checkpointed, 1)
    compare(family, False, 2)
"""
)


@pytest.mark.slow
def test_estimates_are_within_a_tenth_of_the_simulated_allocators_peak(python: Start) -> None:
    done = python(COMPARE)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 9
    assert all(int(peak) > 10 * 2**20 for _, _, _, peak, _ in rows), done.stdout
    assert all(0.9 <= float(ratio) <= 1.1 for *_, ratio in rows), done.stdout
