"""Your own training loop: model and optimizer are not wrapped. Ctrl-C saves; the same command resumes.

python examples/own_loop.py runs/example-own-loop
"""

import sys

import torch
from torch import nn

import whet

x = torch.randn(2_000, 10, generator=torch.Generator().manual_seed(0))
y = x[:, :3].sum(1, keepdim=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

run = sys.argv[1] if len(sys.argv) > 1 else "runs/example-own-loop"
with whet.Session(
    model,
    optimizer,
    (x, y),
    global_batch_size=50,
    epochs=3,
    run=run,
) as session:
    for batch in session:
        session.step(lambda micro: nn.functional.mse_loss(model(micro.x), micro.y), batch)
        if session.due("evaluate"):
            with torch.no_grad():
                error = nn.functional.mse_loss(model(x[:200]), y[:200]).item()
            session.log(error=error)
            print(f"step {session.progress.step}: error {error:.4f}")

if not session.is_finished:
    print("stopped and saved; run the same command again to resume")
    sys.exit(session.exit_code)
