"""A short training call with defaults, for tests of sessions."""

import torch
from torch import nn

import whet


def cross_entropy(model: nn.Module):
    return lambda micro: nn.functional.cross_entropy(model(micro.x), micro.y)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model: nn.Module, data, loss=None, **options):
    """With one thread: two threads on a busy core wait for each other far longer than they compute."""
    defaults = {"optimizer": sgd(model), "global_batch_size": 8, "epochs": 1}
    options = {"on_event": None, **options, "overrides": {"threads": 1, **options.get("overrides", {})}}
    return whet.train(model, data, loss=loss or cross_entropy(model), **{**defaults, **options})


def small_workload():
    """The workload of a small model."""
    from whet.plan.workload import Workload

    return Workload(recipe="test", num_parameters=1, global_batch_size=1)
