"""Ranks with different configurations are refused before the first step; the other rank is simulated."""

from typing import Any

import pytest
import torch
from torch import nn

from whet.base.errors import UsageError
from whet.data.adapters import open_source
from whet.data.source import AbstractSource
from whet.device.cpu import CpuDevice
from whet.distributed.group import RankGroup
from whet.distributed.ranks import RankInfo
from whet.step.optimizers import OptimizerChoice
from whet.training.checks import check_ranks_agree
from whet.training.training_config import TrainingConfig

pytestmark = pytest.mark.torch


class Logged(RankGroup):
    """Gathers the facts that an earlier rank has sent."""

    def __init__(self) -> None:
        super().__init__(RankInfo(rank=1, size=2))
        self.first: Any = None

    def all_gather(self, value: Any) -> list[Any]:
        self.first = self.first or value
        return [self.first, value]


def source_of(data: torch.Tensor) -> AbstractSource:
    return open_source({"x": data}, CpuDevice(), global_batch_size=2, seed=0)


SAME: dict[str, Any] = {
    "model": nn.Linear(3, 2),
    "optimizer": OptimizerChoice(lr=0.1),
    "data": torch.arange(12.0).reshape(4, 3),
    "training": TrainingConfig(global_batch_size=2, epochs=3),
}


@pytest.mark.parametrize(
    ("named", "other"),
    [
        ("lr: 0.1 on rank 0, 0.2 on rank 1", {"optimizer": OptimizerChoice(lr=0.2)}),
        ("max_steps: None on rank 0, 5 on rank 1", {"training": SAME["training"].model_copy(update={"max_steps": 5})}),
        ("samples: 4 on rank 0, 5 on rank 1", {"data": torch.arange(15.0).reshape(5, 3)}),
        ("content of the data: ", {"data": torch.arange(1.0, 13.0).reshape(4, 3)}),
        ("model: 8 parameters", {"model": nn.Linear(3, 2).double()}),
        ("optimizer: adamw on rank 0, SGD on rank 1", {"optimizer": torch.optim.SGD(nn.Linear(3, 2).parameters())}),
    ],
)
def test_differences_between_simulated_ranks_are_named(named: str, other: dict[str, Any]) -> None:
    group = Logged()

    def ask(model: nn.Module, optimizer: Any, data: torch.Tensor, training: TrainingConfig) -> None:
        check_ranks_agree(group, model, optimizer, source_of(data), training)

    ask(**SAME)
    ask(**SAME)
    with pytest.raises(UsageError) as refused:
        ask(**{**SAME, **other})
    assert named in str(refused.value)
