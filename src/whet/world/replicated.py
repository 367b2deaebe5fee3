"""Every process has the whole model: torch's DistributedDataParallel sums gradients while the backward pass goes on.

They are summed, not averaged: each process has weighed its losses by their share of the global batch already, and
processes may have different numbers of samples.
"""

import contextlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from whet.world.group import Group
from whet.world.joining import Joining


class _LossOf(nn.Module):
    """A loss function as a module: your model stays unwrapped, and is called by the loss as always."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return loss(micro)


class Replicated(Joining):
    """Sums gradients over processes that all have the whole model."""

    is_alone = False

    def __init__(self, model: nn.Module, group: Group, *, bucket_mb: float) -> None:
        self._model = model
        self._group = group
        self._bucket_mb = bucket_mb
        self._made: DistributedDataParallel | None = None

    @property
    def _ddp(self) -> DistributedDataParallel:
        """Made with the first step, when weights are restored and lie as they will lie."""
        if self._made is None:
            with warnings.catch_warnings(), self._group.told():
                # Buffers are each process's own; the other name for that is not in every torch.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
                self._made = DistributedDataParallel(
                    _LossOf(self._model),
                    process_group=self._group.tensors,
                    bucket_cap_mb=self._bucket_mb,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    # Which parameters a loss reaches may differ from step to step and between processes.
                    find_unused_parameters=True,
                )
            self._made.register_comm_hook(self._group.tensors, summed)
            # It would say so at the first step in which all are used.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return self._made

    @contextlib.contextmanager
    def _synced(self, *, is_last: bool) -> Any:
        with self._group.told(), contextlib.nullcontext() if is_last else self._ddp.no_sync():
            yield

    def computing(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._group.headway.get_on()
        return self._synced(is_last=is_last)

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return self._ddp(loss, micro)

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        return summed_totals(self._group, loss, weight)


def summed(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """What is done with a bucket of gradients: the sum over all processes."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def summed_totals(group: Group, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
    """Loss and weight of all processes together, in one go."""
    if weight is None:
        return group.sum(loss.clone()), None
    both = group.sum(torch.stack([loss, torch.as_tensor(weight, dtype=loss.dtype, device=loss.device)]))
    return both[0], both[1]
