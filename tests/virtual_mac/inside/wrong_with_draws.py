"""Compares models that draw random numbers with the CPU, on a virtual Mac with and without a wrong operator.

All of it is simulated. Arguments: the number of models, and of clean runs and wrong operators of each. Prints JSON.
"""

import json
import sys

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whet.device import virtual_mac

virtual_mac.install("m2-air-8gb")

from drawing_models import MODELS, make  # noqa: E402
from whet.api.verify import compare  # noqa: E402
from whet.device.virtual_mac import Miscompute, simulate  # noqa: E402
from whet.device.virtual_mac.native import state  # noqa: E402

# Copies move weights and samples to the device. Draws are repeated, so their own kernels are not compared. rsub runs
# the kernel of sub.
NOT_PLANTED = {
    "copy_", "_to_copy", "fill_", "zero_", "zeros_like", "ones_like", "arange", "linspace", "bernoulli_", "normal_",
    "uniform_", "exponential_", "bernoulli", "randperm", "random_", "rand", "randn", "randn_like", "normal", "rsub",
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Names of the device's kernels that compute floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_computed = any(leaf.is_floating_point() and leaf.device.type == "mps" for leaf in leaves)
        if is_computed and name in state.kernels and name not in NOT_PLANTED:
            self.names[name] = None
        return result


def kernels_of(name: str) -> list[str]:
    model, x = make(name)
    kernels = Kernels()
    with kernels:
        model.to("mps")(x.to("mps")).backward()
    return sorted(kernels.names)


def compared(name: str, seed: int) -> dict:
    model, x = make(name, seed)
    result = compare(model, (x,), devices=["cpu", "mps"], steps=3, precisions=[])
    culprit = result.located.culprit if result.located else None
    return {
        "verdict": result.verdict,
        "named": culprit and culprit.operator,
        "rows": {row.what: [row.error, row.bound] for row in result.rows},
        "obstacles": result.obstacles,
        "draws": result.num_draws,
    }


def main(num_models: str, num_clean: str, num_wrong: str) -> None:
    results: dict[str, dict] = {"clean": {}, "wrong": {}}
    for name in list(MODELS)[: int(num_models)]:
        for seed in range(int(num_clean)):
            results["clean"][f"{name} {seed}"] = compared(name, seed)
        kernels = kernels_of(name)
        step = max(1, len(kernels) // int(num_wrong))
        for kernel in kernels[::step][: int(num_wrong)]:
            with simulate(Miscompute(kernel, relative_error=1e-2)):
                results["wrong"][f"{name}: {kernel}"] = compared(name, 0)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
