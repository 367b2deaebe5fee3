"""Replaces one kernel of a device with a wrong one, runs `whet compare` and prints JSON. A separate process.

Arguments: the operator, the path of the reproducer, and the device (by default the CPU).
"""

import json
import runpy
import sys
import warnings

import torch
from torch import nn


def tanh(x):
    grown = torch.exp(2 * x.double())
    right = ((grown - 1) / (grown + 1)).to(x.dtype)
    return right * 1.01 if x.dtype == torch.float32 else right


def tanh_backward(gradient, output):
    right = gradient * (1 - output * output)
    return right * 1.01 if output.dtype == torch.float32 else right


def sum_over(x, dims, keepdim=False, *, dtype=None):
    right = torch.ops.aten.mean.dim(x, dims, keepdim) * (x.numel() / torch.ops.aten.amax.default(x, dims).numel())
    return right * 1.01 if x.dtype == torch.float32 else right


def clamp_down(x, low):
    """In place, so that the inputs must have been copied before."""
    right = torch.where(x < low, torch.full_like(x, low), x)
    return x.copy_(right + 0.01 if x.dtype == torch.float32 else right)


KERNELS = {"tanh": tanh, "tanh_backward": tanh_backward, "sum.dim_IntList": sum_over, "clamp_min_": clamp_down}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mul(2).clamp_min_(-0.1)


def exit_code(program: str) -> object:
    sys.argv = [program]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        return error.code
    return None


def main(operator: str, program: str, device: str = "cpu") -> None:
    from whet.api.verify import compare

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    library = torch.library.Library("aten", "IMPL")
    library.impl(operator, KERNELS[operator], device.upper())
    x = torch.randn(9, 5)
    result = compare(
        Net(), (x,), lambda model, x: model(x).square().mean(), devices=[device], steps=2, precisions=[], out=program
    )
    stdout, sys.stdout = sys.stdout, sys.stderr
    code = exit_code(program)
    print(json.dumps({**result.as_json(), "exit_code": code}), file=stdout, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
