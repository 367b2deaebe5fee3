"""Every supported optimizer makes steps on a sharded model; a group of one process is enough."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from whet.device.cpu import CpuDevice
from whet.step.optimizers import OPTIMIZER_NAMES, OptimizerChoice, build_optimizer

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("kernels", ["fused", "foreach", "loop"])
@pytest.mark.parametrize("name", [name for name in OPTIMIZER_NAMES if name != "adafactor"])
def test_a_sharded_model_trains_like_an_unsharded_one(name: str, kernels: str) -> None:
    """adafactor is refused: it does not support sharded weights."""
    choice, result = OptimizerChoice(name=name, lr=0.1, weight_decay=0.1), []
    for is_in_parts in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        if is_in_parts:
            fully_shard(model)
        optimizer = build_optimizer(choice, model, CpuDevice(), kernels=kernels)
        for _ in range(2):
            model(torch.ones(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        result.append([p.full_tensor() if is_in_parts else p for p in model.parameters()])
    for whole, shared in zip(*result, strict=True):
        torch.testing.assert_close(shared, whole)
