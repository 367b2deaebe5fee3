"""Describe a model and its data to the planner."""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from whet.data.adapters import count_data, source_columns
from whet.data.batch import MicroBatch, Ragged
from whet.data.columns import rows_to_collate
from whet.device.abstract import AbstractDevice
from whet.device.rng import preserve_rng
from whet.plan.workload import Workload
from whet.step.attention import count_attention_calls
from whet.step.ema import named_tensors
from whet.step.graph_safety import loss_dependencies
from whet.step.loss import MicroLoss
from whet.step.rollback import BufferSnapshot
from whet.step.unpadding import NO_TRANSFORMER, unpadding_obstacle
from whet.training.training_config import TrainingConfig
from whet.verify.isolation import preserve_model
from whet.verify.library_objects import attributes_of

_BATCHNORMS = nn.modules.batchnorm._BatchNorm
_DROPOUTS = nn.modules.dropout._DropoutNd
_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "adaptive max pool": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    "attention": (nn.MultiheadAttention,),
    "conv": (nn.modules.conv._ConvNd,),
    "conv2d": (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d),
    "gelu": (nn.GELU,),
    "group norm": (nn.GroupNorm,),
    "layer norm": (nn.LayerNorm,),
    "linear": (nn.Linear,),
    "lstm": (nn.LSTM,),
    "rms norm": (nn.RMSNorm,),
}
"""Kinds of layers by module type. Functional calls in a forward method are not detected."""


SPLIT_BATCH_OFF = "split_batch=False says that the loss needs the whole batch"


def describe_workload(model: nn.Module, data: Any, training: TrainingConfig, *, recipe: str) -> Workload:
    """Describe a model and its data with all facts that are known before the first step."""
    num_parameters, num_frozen = count_parameters(model)
    data = data if training.collate_fn is None else rows_to_collate(data)
    columns = source_columns(data)
    num_samples, num_batches = count_data(data, global_batch_size=training.global_batch_size)
    max_length, mean_length, sample_bytes = 1, None, None
    if columns is not None:
        num_rows = len(next(iter(columns.values())))
        sample_bytes = max(1, sum(_num_bytes(column) for column in columns.values()) // max(1, num_rows))
        ragged = next((column for column in columns.values() if isinstance(column, Ragged)), None)
        if ragged is not None and num_rows:
            max_length, mean_length = int(ragged.lengths.max()), float(ragged.lengths.double().mean())
    unpad_obstacle = unpadding_obstacle(model)
    return Workload(
        recipe=recipe,
        num_parameters=max(1, num_parameters),
        num_frozen=num_frozen,
        global_batch_size=training.global_batch_size,
        num_samples=num_samples or None,
        num_steps=training.total_steps(num_batches) or None,
        max_length=max_length,
        mean_length=mean_length,
        lengths_vary=mean_length is not None and mean_length < max_length,
        can_unpad=unpad_obstacle is None,
        unpad_obstacle=None if unpad_obstacle == NO_TRANSFORMER else unpad_obstacle,
        sample_bytes=sample_bytes,
        needs_decoding=columns is None,
        has_dropout=any(_has_dropout(module) for module in model.modules()),
        has_batchnorm=any(isinstance(module, _BATCHNORMS) for module in model.modules()),
        split_obstacle=SPLIT_BATCH_OFF if training.split_batch is False else None,
        layers=layer_kinds(model),
    )


def pad_token_id(model: nn.Module) -> int | None:
    """Return the padding token id of a Transformers model; None if it has none."""
    token = getattr(getattr(model, "config", None), "pad_token_id", None)
    return token if isinstance(token, int) else None


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of trainable and of frozen parameters."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trained, sum(parameter.numel() for parameter in model.parameters()) - trained


def layer_kinds(model: nn.Module) -> tuple[str, ...]:
    """Return the kinds of layers in a model that affect the plan."""
    return tuple(name for name, kinds in _LAYERS.items() if any(isinstance(m, kinds) for m in model.modules()))


def _has_dropout(module: nn.Module) -> bool:
    # An RNN applies dropout between its layers, so a single layer has none.
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, _DROPOUTS) and module.p > 0


def measure_activation_bytes(
    model: nn.Module, loss: MicroLoss, small: MicroBatch, large: MicroBatch, *, device: AbstractDevice
) -> int:
    """Return the bytes that each sample keeps for the backward pass, from the difference of two small micro-batches.

    No gradient is computed. Random generators and buffers are restored.
    """
    buffers = BufferSnapshot(model)
    try:
        with preserve_rng(device), device.compute_context():
            at_small, at_large = (_saved_bytes(model, loss, micro) for micro in (small, large))
    finally:
        buffers.restore()
    return max(1, (at_large - at_small) // max(1, len(large) - len(small)))


def count_flops(model: nn.Module, loss: MicroLoss, micro: MicroBatch, *, device: AbstractDevice) -> float:
    """Return the FLOPs per sample of matrix products, convolutions and attention, forward and backward."""
    buffers = BufferSnapshot(model)
    try:
        with preserve_rng(device), device.compute_context(), FlopCounterMode(display=False) as counter:
            loss(micro)
    finally:
        buffers.restore()
    # The backward pass computes two products for each product of the forward pass.
    return 3.0 * counter.get_total_flops() / len(micro)


@contextmanager
def preserve_loss_modules(loss: MicroLoss, model: nn.Module) -> Iterator[None]:
    """Restore modules that a loss refers to besides the model, such as a criterion with running statistics."""
    known = set(model.modules())
    with ExitStack() as stack:
        for module in _used_modules(loss, depth=3):
            if not known.issuperset(module.modules()):
                known.update(module.modules())
                stack.enter_context(preserve_model(module))
        yield


def _used_modules(loss: Any, *, depth: int) -> Iterator[nn.Module]:
    for used in loss_dependencies(loss):
        if isinstance(used, nn.Module):
            yield used
        elif depth and inspect.isfunction(used) and (used.__module__ or "").partition(".")[0] != "torch":
            yield from _used_modules(used, depth=depth - 1)
        elif not isinstance(used, type | ModuleType):
            # The object of a bound method. isinstance would raise for an attribute that is a proxy of a deleted object.
            yield from (part for _, part in attributes_of(used) if issubclass(type(part), nn.Module))


def calls_attention(model: nn.Module, loss: MicroLoss, micro: MicroBatch, *, device: AbstractDevice) -> bool:
    """Run the loss on a few samples and return whether it calls torch's scaled_dot_product_attention."""
    buffers = BufferSnapshot(model)
    try:
        with preserve_rng(device), device.compute_context(), count_attention_calls() as calls:
            loss(micro)
    finally:
        buffers.restore()
    return bool(calls)


def _saved_bytes(model: nn.Module, loss: MicroLoss, micro: MicroBatch) -> int:
    # autograd also saves weights and buffers, whose size does not grow with the number of samples.
    owned = {tensor.untyped_storage().data_ptr() for _, tensor in named_tensors(model)}
    saved: dict[int, Tensor] = {}
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        # Keep the tensor, so that its address is not reused. Detach it, because a graph node that holds its own output
        # forms a reference cycle and is never freed.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = tensor.detach()
        packed.append(tensor)
        return len(packed) - 1

    try:
        # Tensors are unpacked only if the loss itself computes gradients. There is no other backward pass here.
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            returned = loss(micro)
    finally:
        packed.clear()
    del returned
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _num_bytes(column: Tensor | Ragged) -> int:
    values = column.values if isinstance(column, Ragged) else column
    return values.numel() * values.element_size()
