"""Parallel strategies: one process, or replicas with summed gradients.

Gradients are summed, not averaged: each rank weights its losses by their share of the global batch, and ranks may have
different numbers of samples. DDP averages, so every loss is multiplied by the number of ranks.

A loss may leave parameters unused, and they may differ between steps and ranks. DDP waits for the gradient of every
parameter unless it searches for unused ones, which walks the autograd graph in each step. Few models need that, so the
search is off at first: a rank with unused parameters adds zero gradients for them after its backward pass. If all ranks
have unused parameters in the same step, the step is repeated with the search on, and it stays on. A parameter that no
rank uses then has no gradient, as in a single process.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from whet.base.errors import WhetError
from whet.distributed.group import RankGroup

_NULL_CONTEXT = contextlib.nullcontext()


class RetryStepError(Exception):
    """Raised on all ranks if they must repeat the step. No weight has changed."""


class ParallelStrategy:
    """The way ranks compute one step together. The base class is for a single process and does nothing."""

    is_single_process = True
    has_full_model = True
    """Whether this rank has the whole model."""

    def micro_batch_context(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context for forward and backward of a micro-batch. The last one sums gradients over ranks."""
        return _NULL_CONTEXT

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return loss(micro)

    def seed(self, loss: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the gradient that the backward pass starts with, or None for 1."""
        return None

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss and the weight, summed over all ranks."""
        return loss, weight

    def full(self, tensor: Tensor) -> Tensor:
        """Return the full value of a reduction over parameters of which each rank holds a shard."""
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or gradient on this rank."""
        return tensor

    def evaluation_context(self) -> AbstractContextManager[object]:
        """Return a context in which each rank may call the model any number of times."""
        return contextlib.nullcontext()


class _LossModule(nn.Module):
    """Wraps a loss function as a module for DDP. The loss calls the user's model, which stays unwrapped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return loss(micro)


class ReplicatedStrategy(ParallelStrategy):
    """Sums gradients over ranks that each have the whole model (DDP)."""

    is_single_process = False

    def __init__(self, model: nn.Module, group: RankGroup, *, bucket_mb: float) -> None:
        self._model = model
        self._group = group
        self._bucket_mb = bucket_mb
        self._wrapped: DistributedDataParallel | None = None
        # Dense zeros cannot be added to sparse gradients, so DDP must search for unused parameters.
        self._finds_unused = any(getattr(module, "sparse", False) for module in model.modules())
        self._has_unused = False
        self._parameters: list[nn.Parameter] = []
        self._earlier: list[tuple[int, int]] = []
        """Address and version of each gradient after the earlier micro-batches of this step."""

    @property
    def _ddp(self) -> DistributedDataParallel:
        """The DDP wrapper. It is created at the first step, when the weights are restored and no longer move."""
        if self._wrapped is None:
            with warnings.catch_warnings(), self._group.translate_errors():
                # Buffers are not broadcast. torch is renaming this argument, but older versions lack the new name.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
                self._wrapped = DistributedDataParallel(
                    _LossModule(self._model),
                    process_group=self._group.tensor_group,
                    bucket_cap_mb=self._bucket_mb,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=self._finds_unused,
                )
                self._parameters = [p for p in self._model.parameters() if p.requires_grad]
                if not self._finds_unused:
                    self._settle_buckets(self._wrapped)
            # DDP warns at a step without unused parameters that the search is unnecessary. Later steps may need it.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return self._wrapped

    def _settle_buckets(self, ddp: DistributedDataParallel) -> None:
        """Run a backward pass with zero gradients, after which DDP reorders its buckets.

        Otherwise the first step after a resume would round differently from the same step of an uninterrupted run.
        """
        ddp(lambda _: None, None)
        _add_zero_gradients(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def _synced(self) -> Iterator[None]:
        with self._group.translate_errors():
            yield
            if not self._finds_unused:
                self._complete()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield
            self._earlier = [_gradient_version(p.grad) for p in self._parameters]

    def micro_batch_context(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._group.stall_detector.progress()
        return self._synced() if is_last else self._apart()

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return self._ddp(loss, micro)

    def seed(self, loss: Tensor) -> Tensor:
        # DDP divides gradients by the number of ranks. This factor turns its average into a sum.
        return torch.full_like(loss, self._group.ranks.size)

    def _complete(self) -> None:
        """Add zero gradients for unused parameters after the last backward pass: the other ranks wait for them."""
        if self._earlier:
            pairs = zip(self._parameters, self._earlier, strict=True)
            unused = [p for p, before in pairs if p.grad is None or _gradient_version(p.grad) == before]
            self._earlier = []
        else:
            unused = [p for p in self._parameters if p.grad is None]
        self._has_unused = bool(unused)
        if unused:
            _add_zero_gradients(unused)

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        if self._finds_unused:
            return sum_over_ranks(self._group, loss, weight)
        # Reading the sum waits for the device, so only ranks with unused parameters do it.
        *sums, num_complete = _all_reduce(self._group, loss, weight, float(not self._has_unused))
        if self._has_unused and float(num_complete) == 0.0:
            self._find_unused()
            raise RetryStepError("no rank has gradients for all parameters")
        return sums[0], sums[1] if weight is not None else None

    def _find_unused(self) -> None:
        """Make DDP search for unused parameters from now on."""
        self._finds_unused, self._wrapped, self._has_unused = True, None, False
        # Collecting the old wrapper removes its hooks from the parameters.
        gc.collect()


def _gradient_version(gradient: Tensor | None) -> tuple[int, int]:
    """Return a value that changes when the gradient is written to. It holds no reference to the tensor."""
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _add_zero_gradients(parameters: list[nn.Parameter]) -> None:
    """Run a backward pass that adds zero gradients to these parameters."""
    roots = [parameter.view_as(parameter) for parameter in parameters]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def _all_reduce(group: RankGroup, loss: Tensor, *others: Tensor | float | None) -> list[Tensor]:
    """Sum the values over all ranks in one collective. None values are left out."""
    given = [one.to(loss) if isinstance(one, Tensor) else loss.new_full((), one) for one in others if one is not None]
    return [*group.all_reduce_sum(torch.stack([loss, *given])).unbind()]


def sum_over_ranks(
    group: RankGroup, loss: Tensor, weight: Tensor | float | None
) -> tuple[Tensor, Tensor | float | None]:
    """Sum the loss and the weight over all ranks in one collective."""
    sums = _all_reduce(group, loss, weight)
    return sums[0], sums[1] if weight is not None else None


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows from `start` up to but not including `stop`, of `total` rows."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """The number of rows. This is not __len__, because an empty range must not be falsy like None."""
        return self.stop - self.start


def local_rows(tensor: Tensor) -> RowRange | None:
    """Return the rows of a tensor on this rank, or None if this rank has all of them.

    FSDP2 shards the first dimension: each rank has the same number of rows, and the last ranks have fewer or none. A
    sharded tensor is recognized by its attributes, so that a single process need not import torch.distributed.tensor.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None or all(placement.is_replicate() for placement in placements):
        return None
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise WhetError(
            "a tensor that is sharded in this way cannot be saved",
            got=f"{tuple(placements)} of a tensor of shape {tuple(tensor.shape)}",
            try_="fully_shard over a one-dimensional mesh, which shards the first dimension",
        )
    dtensor: Any = tensor
    mesh = dtensor.device_mesh
    rows = rows_of_rank(tensor.shape[0], rank=mesh.get_local_rank(), size=mesh.size())
    if local_tensor(tensor).shape[0] != rows.count:
        got = f"{local_tensor(tensor).shape[0]} rows on this rank; {rows.count} of {rows.total} were expected"
        raise WhetError("a sharded tensor has the wrong rows on this rank", got=got, try_="sharding=off")
    return rows


def rows_of_rank(total: int, *, rank: int, size: int) -> RowRange:
    """Return the rows of a rank, out of `size` ranks.

    >>> [rows_of_rank(10, rank=rank, size=4).count for rank in range(4)]
    [3, 3, 3, 1]
    >>> [rows_of_rank(5, rank=rank, size=8).count for rank in range(8)]
    [1, 1, 1, 1, 1, 0, 0, 0]
    """
    # Rounded up, as torch.chunk does.
    each = -(-total // size)
    return RowRange(min(rank * each, total), min((rank + 1) * each, total), total)


def is_distributed(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, sharded or replicated."""
    return hasattr(tensor, "placements")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this rank. It shares the memory of the tensor."""
    dtensor: Any = tensor
    return dtensor.detach().to_local() if is_distributed(tensor) else tensor
