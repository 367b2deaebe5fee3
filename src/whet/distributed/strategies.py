"""Parallel strategies: one process, or replicas with summed gradients."""

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

_NOTHING = contextlib.nullcontext()


class RetryStepError(Exception):
    """All processes must make this step once more; none has changed a weight."""


class ParallelStrategy:
    """What a step asks; the base is for one process and does nothing."""

    is_alone = True
    holds_all = True
    """Whether this process has the whole model."""

    def computing(self, *, is_last: bool) -> AbstractContextManager[object]:  # noqa: ARG002
        """Around forward and backward of one micro-batch; gradients are summed over all processes with the last."""
        return _NOTHING

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        """What the loss function gives for a micro-batch."""
        return loss(micro)

    def seed(self, loss: Tensor) -> Tensor | None:  # noqa: ARG002
        """What the backward pass begins with: how often a loss counts; None for once."""
        return None

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        """Loss and weight of all processes together."""
        return loss, weight

    def whole(self, tensor: Tensor) -> Tensor:
        """A number about all parameters, where each process knows a part of them."""
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that lies here."""
        return tensor

    def evaluating(self) -> AbstractContextManager[object]:
        """While entered, each process may call the model as often as it likes, whatever the others do."""
        return contextlib.nullcontext()


class _LossModule(nn.Module):
    """A loss function as a module: your model stays unwrapped, and is called by the loss as always."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return loss(micro)


class ReplicatedStrategy(ParallelStrategy):
    """Sums gradients over processes that all have the whole model."""

    is_alone = False

    def __init__(self, model: nn.Module, group: RankGroup, *, bucket_mb: float) -> None:
        self._model = model
        self._group = group
        self._bucket_mb = bucket_mb
        self._made: DistributedDataParallel | None = None
        # Sparse gradients cannot be completed with zeros that are not.
        self._looks = any(getattr(module, "sparse", False) for module in model.modules())
        self._has_left_out = False
        self._parameters: list[nn.Parameter] = []
        self._before: list[tuple[int, int]] = []
        """Where gradients of earlier micro-batches of this step lie, and how often each was written to."""

    @property
    def _ddp(self) -> DistributedDataParallel:
        """Made with the first step, when weights are restored and lie as they will lie."""
        if self._made is None:
            with warnings.catch_warnings(), self._group.told():
                # Buffers are each process's own; the other name for that is not in every torch.
                warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
                self._made = DistributedDataParallel(
                    _LossModule(self._model),
                    process_group=self._group.tensors,
                    bucket_cap_mb=self._bucket_mb,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=self._looks,
                )
                self._parameters = [p for p in self._model.parameters() if p.requires_grad]
                if not self._looks:
                    self._settle_buckets(self._made)
            # It would say so at the first step in which all are used.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return self._made

    def _settle_buckets(self, ddp: DistributedDataParallel) -> None:
        """DDP orders its buckets anew after the first backward pass: one of zeros, so that all steps add up alike.

        A run that goes on would otherwise round its first step differently.
        """
        ddp(lambda _: None, None)
        _add_zero_gradients(self._parameters)
        for parameter in self._parameters:
            parameter.grad = None

    @contextlib.contextmanager
    def _synced(self) -> Iterator[None]:
        with self._group.told():
            yield
            if not self._looks:
                self._complete()

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        with self._ddp.no_sync():
            yield
            self._before = [_gradient_version(p.grad) for p in self._parameters]

    def computing(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._group.stall_detector.get_on()
        return self._synced() if is_last else self._apart()

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return self._ddp(loss, micro)

    def seed(self, loss: Tensor) -> Tensor:
        return torch.full_like(loss, self._group.ranks.size)

    def _complete(self) -> None:
        """After the last backward pass of a step: the others wait for what this process has left out."""
        if self._before:
            pairs = zip(self._parameters, self._before, strict=True)
            left_out = [p for p, before in pairs if p.grad is None or _gradient_version(p.grad) == before]
            self._before = []
        else:
            left_out = [p for p in self._parameters if p.grad is None]
        self._has_left_out = bool(left_out)
        if left_out:
            _add_zero_gradients(left_out)

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        if self._looks:
            return sum_over_ranks(self._group, loss, weight)
        # Read by those alone who have left something out, since the device is waited for.
        *found, num_complete = _all_reduce(self._group, loss, weight, float(not self._has_left_out))
        if self._has_left_out and float(num_complete) == 0.0:
            self._look()
            raise RetryStepError("no process has gradients for all parameters")
        return found[0], found[1] if weight is not None else None

    def _look(self) -> None:
        """From now on DDP looks for parameters that are left out."""
        self._looks, self._made, self._has_left_out = True, None, False
        # Its hooks on the parameters go with it.
        gc.collect()


def _gradient_version(gradient: Tensor | None) -> tuple[int, int]:
    """Another one after it was written to: DDP puts it into a bucket. Holds no memory."""
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _add_zero_gradients(parameters: list[nn.Parameter]) -> None:
    """A backward pass that reaches these parameters and changes nothing but that they have a gradient."""
    roots = [parameter.view_as(parameter) for parameter in parameters]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def _all_reduce(group: RankGroup, loss: Tensor, *others: Tensor | float | None) -> list[Tensor]:
    """Over all processes, in one go; without those that are None."""
    given = [one.to(loss) if isinstance(one, Tensor) else loss.new_full((), one) for one in others if one is not None]
    return [*group.sum(torch.stack([loss, *given])).unbind()]


def sum_over_ranks(
    group: RankGroup, loss: Tensor, weight: Tensor | float | None
) -> tuple[Tensor, Tensor | float | None]:
    """Loss and weight of all processes together, in one go."""
    found = _all_reduce(group, loss, weight)
    return found[0], found[1] if weight is not None else None


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows from `start` to before `stop`, of `total`."""

    start: int
    stop: int
    total: int

    @property
    def count(self) -> int:
        """How many they are. Not the length: no rows at all would be taken for none asked for."""
        return self.stop - self.start


def local_rows(tensor: Tensor) -> RowRange | None:
    """The rows that lie here; None for a tensor that is here as a whole."""
    placements = getattr(tensor, "placements", None)
    if placements is None or all(placement.is_replicate() for placement in placements):
        return None
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise WhetError(
            "a tensor that is shared in this way cannot be saved",
            got=f"{tuple(placements)} of a tensor of shape {tuple(tensor.shape)}",
            try_="fully_shard over one dimension of processes, which shares the first dimension",
        )
    shared: Any = tensor
    mesh = shared.device_mesh
    rows = rows_of_rank(tensor.shape[0], rank=mesh.get_local_rank(), size=mesh.size())
    if local_tensor(tensor).shape[0] != rows.count:
        got = f"{local_tensor(tensor).shape[0]} rows here; {rows.count} of {rows.total} were expected"
        raise WhetError("a shared tensor has another part here than it should", got=got, try_="sharding=off")
    return rows


def rows_of_rank(total: int, *, rank: int, size: int) -> RowRange:
    """The rows of one of `size` processes.

    >>> [share_of(10, rank=rank, size=4).count for rank in range(4)]
    [3, 3, 3, 1]
    >>> [share_of(5, rank=rank, size=8).count for rank in range(8)]
    [1, 1, 1, 1, 1, 0, 0, 0]
    """
    each = -(-total // size)
    return RowRange(min(rank * each, total), min((rank + 1) * each, total), total)


def is_distributed(tensor: Tensor) -> bool:
    """Whether several processes share it, in parts or as copies."""
    return hasattr(tensor, "placements")


def local_tensor(tensor: Tensor) -> Tensor:
    """What of a tensor lies here, in its own memory."""
    shared: Any = tensor
    return shared.detach().to_local() if is_distributed(tensor) else tensor
