"""A model and its optimizer, borrowed for a while: whatever is done to them, they are as they were afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from whet.step.optimizer import OptimizerChoice
from whet.verify.untouched import as_before


@contextmanager
def borrowed(model: nn.Module, optimizer: Optimizer | OptimizerChoice) -> Iterator[None]:
    """Whatever happens to them inside, model and optimizer are afterwards as they were."""
    kept = _optimizer_state(optimizer) if isinstance(optimizer, Optimizer) else None
    with as_before(model):
        try:
            yield
        finally:
            if kept is not None and isinstance(optimizer, Optimizer):
                _put_back_optimizer(optimizer, kept)


def _optimizer_state(optimizer: Optimizer) -> tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]]:
    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    state = {parameter: {k: copied(v) for k, v in own.items()} for parameter, own in optimizer.state.items()}
    return state, [{k: copied(v) if k != "params" else v for k, v in g.items()} for g in optimizer.param_groups]


def _put_back_optimizer(optimizer: Optimizer, kept: tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]]) -> None:
    state, groups = kept
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: value for name, value in saved.items() if name != "params"})


@contextmanager
def threads_kept() -> Iterator[None]:
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
