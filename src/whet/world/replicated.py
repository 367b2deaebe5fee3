"""Every process has the whole model: torch's DistributedDataParallel sums gradients while the backward pass goes on.

They are summed, not averaged: each process has weighed its losses by their share of the global batch already, and
processes may have different numbers of samples. DDP averages, so every loss counts as often as there are processes.

Which parameters a loss reaches may differ from step to step and between processes, and DDP waits for every one. To
look for those that are left out costs it a walk through the graph in each step. Few models leave any out, so nobody
looks at first: a process whose loss has left some out adds zeros for them afterwards, and the others need not know.
Only where all have left some out the step is made again, and from then on DDP looks: what no process reaches has no
gradient, as in one process.
"""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from whet.world.group import Group
from whet.world.joining import Joining, StepAgainError


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
                    _LossOf(self._model),
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
        _add_zeros(self._parameters)
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
            self._before = [_trace(p.grad) for p in self._parameters]

    def computing(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._group.headway.get_on()
        return self._synced() if is_last else self._apart()

    def call(self, loss: Callable[[Any], Any], micro: Any) -> Any:
        return self._ddp(loss, micro)

    def seed(self, loss: Tensor) -> Tensor:
        return torch.full_like(loss, self._group.world.size)

    def _complete(self) -> None:
        """After the last backward pass of a step: the others wait for what this process has left out."""
        if self._before:
            pairs = zip(self._parameters, self._before, strict=True)
            left_out = [p for p, before in pairs if p.grad is None or _trace(p.grad) == before]
            self._before = []
        else:
            left_out = [p for p in self._parameters if p.grad is None]
        self._has_left_out = bool(left_out)
        if left_out:
            _add_zeros(left_out)

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        if self._looks:
            return summed_totals(self._group, loss, weight)
        # Read by those alone who have left something out, since the device is waited for.
        *found, num_complete = _sums(self._group, loss, weight, float(not self._has_left_out))
        if self._has_left_out and float(num_complete) == 0.0:
            self._look()
            raise StepAgainError("no process has gradients for all parameters")
        return found[0], found[1] if weight is not None else None

    def _look(self) -> None:
        """From now on DDP looks for parameters that are left out."""
        self._looks, self._made, self._has_left_out = True, None, False
        # Its hooks on the parameters go with it.
        gc.collect()


def _trace(gradient: Tensor | None) -> tuple[int, int]:
    """Another one after it was written to: DDP puts it into a bucket. Holds no memory."""
    return (0, 0) if gradient is None else (gradient.data_ptr(), gradient._version)


def _add_zeros(parameters: list[nn.Parameter]) -> None:
    """A backward pass that reaches these parameters and changes nothing but that they have a gradient."""
    roots = [parameter.view_as(parameter) for parameter in parameters]
    torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])


def _sums(group: Group, loss: Tensor, *others: Tensor | float | None) -> list[Tensor]:
    """Over all processes, in one go; without those that are None."""
    given = [one.to(loss) if isinstance(one, Tensor) else loss.new_full((), one) for one in others if one is not None]
    return [*group.sum(torch.stack([loss, *given])).unbind()]


def summed_totals(group: Group, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
    """Loss and weight of all processes together, in one go."""
    found = _sums(group, loss, weight)
    return found[0], found[1] if weight is not None else None
