"""A GAN: two networks, two optimizers. The discriminator steps on every batch, the generator on every second one.

python examples/gan.py runs/gan      # Ctrl-C saves both networks and both optimizers; the same command resumes
"""

import math
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import whet

NOISE = 8


def make_net(inputs, outputs):
    inner = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*inner, nn.Linear(64, outputs))


# Points on a ring of radius 1.
draw = torch.Generator().manual_seed(0)
angles = 2 * math.pi * torch.rand(4_096, generator=draw)
ring = torch.stack([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(4_096, 2, generator=draw)

torch.manual_seed(0)
nets = nn.ModuleDict({"d": make_net(2, 1), "g": make_net(NOISE, 2)})
optimizers = {
    "d": torch.optim.Adam(nets["d"].parameters(), lr=1e-3, betas=(0.5, 0.99)),
    "g": torch.optim.Adam(nets["g"].parameters(), lr=1e-3, betas=(0.5, 0.99)),
}


def score(points, *, is_real):
    """Return the loss of a discriminator that should call all of these points real, or none of them."""
    logits = nets["d"](points)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def fakes(real):
    return nets["g"](torch.randn(len(real), NOISE, device=real.device))


def loss_d(batch):
    (real,) = batch
    return score(real, is_real=True) + score(fakes(real), is_real=False)


def loss_g(batch):
    (real,) = batch
    return score(fakes(real), is_real=True)


loader = DataLoader(TensorDataset(ring), batch_size=128, shuffle=True)
run = sys.argv[1] if len(sys.argv) > 1 else "runs/gan"
with whet.Session(nets, optimizers, loader, epochs=25, run=run) as session:
    for batch in session:
        # Only the parameters of the named optimizer get gradients and change: no detach() is needed in loss_d.
        session.step(loss_d, batch, optimizer="d")
        session.step(loss_g, batch, optimizer="g", every=2)
        if session.due("evaluate"):
            with torch.no_grad():
                radius = fakes(ring[:1_000].to(next(nets.parameters()).device)).norm(dim=1)
            session.log(radius=radius.mean())

if not session.is_finished:
    sys.exit(session.exit_code)
report = whet.summarize(run)
print(f"{session.end_reason}: the points made have a mean radius of {report.metrics['radius']:.2f}")
