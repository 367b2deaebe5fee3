"""The matmul ceiling: the speed of large matrix products in the precision of the run, an upper bound for all loops."""

import torch

from side_by_side.spec import Spec
from side_by_side.step_gate import StepGate

SIDES = {"full": 8192, "cpu": 1536, "tiny": 256}


def run(gate: StepGate, spec: Spec) -> None:
    """Run products of square matrices as steps."""
    side = SIDES[spec.scale]
    dtype = torch.bfloat16 if spec.is_half else torch.float32
    one, two = (torch.randn(side, side, device=spec.device).to(dtype) for _ in range(2))
    out = torch.empty_like(one)
    gate.made = {"batch": 1, "flops": 2 * side**3, "epoch": 10}
    gate.begin()
    while True:
        torch.mm(one, two, out=out)
        gate.step()
