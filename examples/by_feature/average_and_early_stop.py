"""EMA of the weights for evaluation, a schedule with warm-up, and early stopping.

python examples/by_feature/average_and_early_stop.py runs/average
"""

import sys

import torch
from torch import nn

import whet

x = torch.randn(1_200, 10, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] * x[:, 1] > 0).long()
train, val = (x[:1_000], y[:1_000]), (x[1_000:], y[1_000:])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))


def accuracy(model, micro_batches):
    is_correct = [(model(micro.x).argmax(1) == micro.y).float() for micro in micro_batches]
    return {"accuracy": torch.cat(is_correct).mean()}


result = whet.train(
    model,
    train,
    loss=lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y),
    optimizer=whet.OptimizerChoice(name="adamw", lr=3e-3),
    evaluate=accuracy,
    val=val,
    goal="accuracy",
    patience=3,
    ema=True,
    schedule="cosine",
    warmup_steps=10,
    global_batch_size=25,
    epochs=20,
    run=sys.argv[1] if len(sys.argv) > 1 else "runs/average",
)
print(result.state, result.metrics)
