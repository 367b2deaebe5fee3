"""Sharded training with FSDP2: each rank holds a shard of every parameter, gradient and optimizer state."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from whet.distributed.group import RankGroup
from whet.distributed.strategies import ParallelStrategy, sum_over_ranks


class ShardedStrategy(ParallelStrategy):
    """Shards a model in place. This replaces its parameters, so build the optimizer afterward.

    FSDP gathers the weights of a block before its computation, and frees them afterward. Gradients are summed, not
    averaged. `blocks` are the modules that are gathered separately, and `kind` is the device type.
    """

    is_single_process = False
    has_full_model = False

    def __init__(self, model: nn.Module, group: RankGroup, *, blocks: Sequence[nn.Module], kind: str) -> None:
        self._group = group
        self._root = model
        mesh = _device_mesh(group, kind)
        for block in blocks:
            if any(True for _ in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # torch warns that outputs that are views must not be changed in place. whet does not change outputs.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self._modules:
            # FSDP averages gradients by default. Sum them instead, because losses are weighted by their share of the
            # global batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    @contextlib.contextmanager
    def _synced(self, *, is_last: bool) -> Iterator[None]:
        for module in self._modules:
            module.set_requires_gradient_sync(is_last, recurse=False)
        with self._group.translate_errors():
            yield

    def micro_batch_context(self, *, is_last: bool) -> AbstractContextManager[object]:
        self._group.stall_detector.progress()
        return self._synced(is_last=is_last)

    def totals(self, loss: Tensor, weight: Tensor | float | None) -> tuple[Tensor, Tensor | float | None]:
        return sum_over_ranks(self._group, loss, weight)

    def full(self, tensor: Tensor) -> Tensor:
        return full_tensor(tensor)

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @contextlib.contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Keep all weights gathered in this context, so that ranks may call the model different numbers of times."""
        with torch.no_grad():
            for module in self._modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
        try:
            yield
        finally:
            for module in self._modules:
                # By default, FSDP keeps the root gathered after forward, because backward needs it immediately.
                module.set_reshard_after_forward(module is not self._root, recurse=False)
                module.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks. All ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _device_mesh(group: RankGroup, kind: str) -> DeviceMesh:
    if group.tensor_group is None:
        return init_device_mesh(kind, (group.ranks.size,))
    return DeviceMesh.from_group(group.tensor_group, kind)
