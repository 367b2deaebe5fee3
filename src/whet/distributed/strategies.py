"""Parallel strategies: one process, or replicas with summed gradients.

Gradients are summed, not averaged: each rank has weighted its losses by their share of the global batch already, and
ranks may have different numbers of samples. DDP averages, so every loss is multiplied by the number of ranks.

The parameters that a loss reaches may differ between steps and ranks, and DDP waits for every one. Searching for unused
ones costs a walk through the graph in each step. Few models have any, so DDP does not search at first: a rank whose loss
left some unused adds zero gradients for them afterwards, without telling the others. Only if all ranks left some unused
the step is repeated, and from then on DDP searches: a parameter that no rank reaches has no gradient, as in one process.
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
    """All ranks must repeat this step; none has changed a weight."""


class ParallelStrategy:
    """How ranks compute one step together. The base class is for one process and does nothing."""

    is_single_process = True
    has_full_model = True
    """Whether this rank has the whole model."""

    def micro_batch_context(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """The context of forward and backward of one micro-batch; gradients are summed over ranks with the last one."""
        return _NULL_CONTEXT

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        """Call the loss function."""
        return loss(micro)

    def seed(self, loss: Tensor) -> Tensor | None:  # noqa: ARG002
        """The gradient that the backward pass starts with; None for 1."""
        return None

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """Loss and weight, summed over all ranks."""
        return loss, weight

    def full(self, tensor: Tensor) -> Tensor:
        """A reduction over all parameters, where each rank has only its shard of them."""
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient on this rank."""
        return tensor

    def evaluation_context(self) -> AbstractContextManager[object]:
        """While entered, each rank may call the model any number of times."""
        return contextlib.nullcontext()


class _LossModule(nn.Module):
    """A loss function as a module: the user's model stays unwrapped, and the loss calls it as always."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return loss(micro)


class ReplicatedStrategy(ParallelStrategy):
    """Sums gradients over ranks that all have the whole model."""

    is_single_process = False

    def __init__(self, model: nn.Module, group: RankGroup, *, bucket_mb: float) -> None:
        self._model = model
        self._group = group
        self._bucket_mb = bucket_mb
        self._wrapped: DistributedDataParallel | None = None
        # Dense zeros cannot be added to sparse gradients.
        self._finds_unused = any(getattr(module, "sparse", False) for module in model.modules())
        self._has_unused = False
        self._parameters: list[nn.Parameter] = []
        self._earlier: list[tuple[int, int]] = []
        """Address and version of the gradients of earlier micro-batches of this step."""

    @property
    def _ddp(self) -> DistributedDataParallel:
        """Created at the first step, once weights are restored and have their final memory."""
        if self._wrapped is None:
            with warnings.catch_warnings(), self._group.translate_errors():
                # Each rank has its own buffers; the new name of this argument is not in every torch version.
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
            # DDP would warn at the first step in which all parameters are used.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return self._wrapped

    def _settle_buckets(self, ddp: DistributedDataParallel) -> None:
        """Run one backward pass of zeros, after which DDP reorders its buckets.

        Otherwise the first step after a resume would be rounded differently from the same step of an unbroken run.
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
        return torch.full_like(loss, self._group.ranks.size)

    def _complete(self) -> None:
        """After the last backward pass: add the zero gradients that the other ranks wait for."""
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
        # Only ranks with unused parameters read the sum, because reading waits for the device.
        *sums, num_complete = _all_reduce(self._group, loss, weight, float(not self._has_unused))
        if self._has_unused and float(num_complete) == 0.0:
            self._find_unused()
            raise RetryStepError("no rank has gradients for all parameters")
        return sums[0], sums[1] if weight is not None else None

    def _find_unused(self) -> None:
        """Let DDP search for unused parameters from now on."""
        self._finds_unused, self._wrapped, self._has_unused = True, None, False
        # Removes the hooks of the old wrapper from the parameters.
        gc.collect()


def _gradient_version(gradient: Tensor | None) -> tuple[int, int]:
    """Changes when the gradient is written to (DDP copies it into a bucket). Holds no memory."""
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _add_zero_gradients(parameters: list[nn.Parameter]) -> None:
    """Run a backward pass that reaches these parameters with zeros."""
    roots = [parameter.view_as(parameter) for parameter in parameters]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def _all_reduce(group: RankGroup, loss: Tensor, *others: Tensor | float | None) -> list[Tensor]:
    """Sum the values over all ranks in one collective; None is left out."""
    given = [one.to(loss) if isinstance(one, Tensor) else loss.new_full((), one) for one in others if one is not None]
    return [*group.all_reduce_sum(torch.stack([loss, *given])).unbind()]


def sum_over_ranks(
    group: RankGroup, loss: Tensor, weight: Tensor | float | None
) -> tuple[Tensor, Tensor | float | None]:
    """Loss and weight, summed over all ranks in one collective."""
    sums = _all_reduce(group, loss, weight)
    return sums[0], sums[1] if weight is not None else None


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows from `start` to before `stop`, of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """The number of rows. Not __len__: an empty range must not be falsy, because None means no range."""
        return self.stop - self.start


def local_rows(tensor: Tensor) -> RowRange | None:
    """The rows of a tensor on this rank; None if it has all of them.

    FSDP2 shards the first dimension: each rank has equally many rows, the last ones fewer or none. A sharded tensor is
    recognized by its attributes, so that a single process does not load torch.distributed.tensor.
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
    """The rows of one of `size` ranks.

    >>> [rows_of_rank(10, rank=rank, size=4).count for rank in range(4)]
    [3, 3, 3, 1]
    >>> [rows_of_rank(5, rank=rank, size=8).count for rank in range(8)]
    [1, 1, 1, 1, 1, 0, 0, 0]
    """
    each = -(-total // size)
    return RowRange(min(rank * each, total), min((rank + 1) * each, total), total)


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor, sharded or replicated."""
    return hasattr(tensor, "placements")


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank, sharing its memory."""
    dtensor: Any = tensor
    return dtensor.detach().to_local() if is_distributed(tensor) else tensor
