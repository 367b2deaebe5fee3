"""Parallel strategies for one process, and for replicas with summed gradients.

Gradients are summed, not averaged, because ranks may have different numbers of samples. Each rank weights its losses by
their share of the global batch. DDP averages gradients, so the backward pass starts with the number of ranks instead
of 1.

A loss may leave parameters unused, and these may differ between steps and ranks. DDP waits for the gradient of every
parameter unless it searches for unused parameters, which traverses the autograd graph in each step. Few models need
that, so the search is disabled at first. Instead, a rank with unused parameters adds zero gradients for them after its
backward pass. If all ranks have unused parameters in the same step, that step is repeated with the search enabled, and
the search stays enabled. Then a parameter that no rank uses has no gradient, as in a single process.
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
    """Raised on all ranks if they must repeat the step. No weights have changed."""


class ParallelStrategy:
    """The interface of parallel strategies, and the strategy for a single process."""

    is_single_process = True
    has_full_model = True
    """Whether each rank holds the whole model."""

    def micro_batch_context(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return the context for forward and backward of a micro-batch.

        Gradients are summed over ranks in the context of the last micro-batch of a step.
        """
        return _NULL_CONTEXT

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        """Return the result of the loss function for a micro-batch."""
        return loss(micro)

    def seed(self, loss: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the gradient with which the backward pass of the loss starts, or None for 1."""
        return None

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """Return the loss and the weight of a step, summed over all ranks."""
        return loss, weight

    def full(self, tensor: Tensor) -> Tensor:
        """Return the full value of a reduction over parameters that may be sharded, such as a gradient norm."""
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or gradient on this rank."""
        return tensor

    def evaluation_context(self) -> AbstractContextManager[object]:
        """Return a context for evaluation, in which ranks may call the model different numbers of times."""
        return contextlib.nullcontext()


class _LossModule(nn.Module):
    """A module for DDP whose forward calls the loss. The loss calls the user's model, which stays unwrapped."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return loss(micro)


class ReplicatedStrategy(ParallelStrategy):
    """Data parallelism with DDP: each rank has the whole model, and gradients are summed over ranks."""

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
        """The DDP wrapper. It is created at the first step, because weights may be restored or moved before it."""
        if self._wrapped is None:
            with warnings.catch_warnings(), self._group.translate_errors():
                # Hide the warning that torch renames this argument, because older versions lack the new name.
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
                    self._rebuild_buckets(self._wrapped)
            # At a step without unused parameters, DDP warns that the search is unnecessary. Later steps may need it.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return self._wrapped

    def _rebuild_buckets(self, ddp: DistributedDataParallel) -> None:
        """Run a backward pass with zero gradients, because DDP rebuilds its buckets after the first one.

        Otherwise, the first step after a resume would round differently from the same step of an uninterrupted run.
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
        # DDP divides gradients by the number of ranks. This factor turns the average into a sum.
        return torch.full_like(loss, self._group.ranks.size)

    def _complete(self) -> None:
        """Add zero gradients for parameters unused in the last backward pass, because the other ranks wait for them."""
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
        # Reading a sum waits for the device, so only ranks with unused parameters read it.
        *sums, num_complete = _all_reduce(self._group, loss, weight, float(not self._has_unused))
        if self._has_unused and float(num_complete) == 0.0:
            self._find_unused()
            raise RetryStepError("no rank has gradients for all parameters")
        return sums[0], sums[1] if weight is not None else None

    def _find_unused(self) -> None:
        """Replace the DDP wrapper by one that searches for unused parameters."""
        self._finds_unused, self._wrapped, self._has_unused = True, None, False
        # The hooks of the old wrapper are removed from the parameters when it is garbage-collected.
        gc.collect()


def _gradient_version(gradient: Tensor | None) -> tuple[int, int]:
    """Return a value that changes when the gradient is written or replaced. It holds no reference to the tensor."""
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _add_zero_gradients(parameters: list[nn.Parameter]) -> None:
    """Run a backward pass that adds zero to the gradients of these parameters and triggers DDP's hooks."""
    roots = [parameter.view_as(parameter) for parameter in parameters]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def _all_reduce(group: RankGroup, loss: Tensor, *others: Tensor | float | None) -> list[Tensor]:
    """Return the sums of the values over all ranks, computed in one collective. None values are skipped."""
    given = [one.to(loss) if isinstance(one, Tensor) else loss.new_full((), one) for one in others if one is not None]
    return [*group.all_reduce_sum(torch.stack([loss, *given])).unbind()]


def sum_over_ranks(
    group: RankGroup, loss: Tensor, weight: Tensor | float | None
) -> tuple[Tensor, Tensor | float | None]:
    """Return the loss and the weight, summed over all ranks in one collective. A weight of None stays None."""
    sums = _all_reduce(group, loss, weight)
    return sums[0], sums[1] if weight is not None else None


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows from `start` to `stop` (exclusive) of a tensor with `total` rows."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """The number of rows in the range. There is no __len__, because an empty range would be falsy, like None."""
        return self.stop - self.start


def local_rows(tensor: Tensor) -> RowRange | None:
    """Return the rows of a tensor that this rank holds, or None if it holds all of them.

    FSDP2 shards the first dimension into chunks of equal size, but the last ranks may have fewer rows or none. Sharded
    tensors are recognized by their attributes, so that a single process need not import torch.distributed.tensor.
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
    """Return the rows of a rank if `total` rows are sharded over `size` ranks.

    >>> [rows_of_rank(10, rank=rank, size=4).count for rank in range(4)]
    [3, 3, 3, 1]
    >>> [rows_of_rank(5, rank=rank, size=8).count for rank in range(8)]
    [1, 1, 1, 1, 1, 0, 0, 0]
    """
    # Round up, as torch.chunk does.
    each = -(-total // size)
    return RowRange(min(rank * each, total), min((rank + 1) * each, total), total)


def is_distributed(tensor: Tensor) -> bool:
    """Return whether the tensor is a DTensor, sharded or replicated."""
    return hasattr(tensor, "placements")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds. It shares the tensor's memory."""
    dtensor: Any = tensor
    return dtensor.detach().to_local() if is_distributed(tensor) else tensor
