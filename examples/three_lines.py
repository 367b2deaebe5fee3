"""The short call: a model, data and a loss. The second time you run it, the run is already done.

python examples/three_lines.py runs/three-lines
"""

import sys

import torch
from torch import nn

import whet

x = torch.randn(2_000, 10, generator=torch.Generator().manual_seed(0))
y = (x[:, 0] > x[:, 1]).long()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
result = whet.train(
    model,
    (x, y),
    loss=nn.functional.cross_entropy,
    optimizer=optimizer,
    global_batch_size=32,
    epochs=2,
    run=sys.argv[1] if len(sys.argv) > 1 else "runs/three-lines",
)
print(result.state, "after", result.step, "steps")
