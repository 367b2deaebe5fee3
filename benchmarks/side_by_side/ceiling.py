"""How fast does this device multiply matrices in the precision of the run? The limit that no way can pass."""

import torch

from side_by_side.pace import Pace
from side_by_side.spec import Spec

SIDES = {"full": 8192, "cpu": 1536, "tiny": 256}


def run(pace: Pace, spec: Spec) -> None:
    """A step is one product of square matrices."""
    side = SIDES[spec.scale]
    dtype = torch.bfloat16 if spec.is_half else torch.float32
    one, two = (torch.randn(side, side, device=spec.device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    pace.made = {"batch": 1, "flops": 2 * side**3, "epoch": 10}
    pace.begin()
    while True:
        torch.mm(one, two, out=out)
        pace.step()
