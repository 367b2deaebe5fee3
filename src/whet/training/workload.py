"""Describe a model and its data for the planner."""

from typing import Any

import torch
from torch import Tensor, nn

from whet.data.batch import MicroBatch, Ragged
from whet.data.columns import as_columns
from whet.device.abstract import AbstractDevice
from whet.device.rng import preserve_rng
from whet.plan.workload import Workload
from whet.step.ema import named_tensors
from whet.step.loss import LossFunction
from whet.step.rollback import BufferSnapshot
from whet.training.training_config import TrainingConfig
from whet.verify.start.causality import count_attention_calls

_BATCHNORMS = nn.modules.batchnorm._BatchNorm
_DROPOUTS = nn.modules.dropout._DropoutNd
_LAYERS: dict[str, tuple[type[nn.Module], ...]] = {
    "adaptive max pool": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    "attention": (nn.MultiheadAttention,),
    "conv": (nn.modules.conv._ConvNd,),
    "conv2d": (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d),
    "gelu": (nn.GELU,),
    "layer norm": (nn.LayerNorm,),
    "linear": (nn.Linear,),
    "lstm": (nn.LSTM,),
    "rms norm": (nn.RMSNorm,),
}
"""Recognized by module type; functions that a model calls are not seen."""


def describe_workload(model: nn.Module, data: Any, training: TrainingConfig, *, recipe: str) -> Workload:
    """Describe a model and its data, as far as it is known before the first step."""
    num_parameters, num_frozen = count_parameters(model)
    columns = as_columns(data)
    num_samples = len(data) if columns is None and callable(getattr(data, "__len__", None)) else None
    max_length, mean_length, sample_bytes = 1, None, None
    if columns is not None:
        num_samples = len(next(iter(columns.values())))
        sample_bytes = max(1, sum(_num_bytes(column) for column in columns.values()) // max(1, num_samples))
        ragged = next((column for column in columns.values() if isinstance(column, Ragged)), None)
        if ragged is not None and num_samples:
            max_length, mean_length = int(ragged.lengths.max()), float(ragged.lengths.double().mean())
    return Workload(
        recipe=recipe,
        num_parameters=max(1, num_parameters),
        num_frozen=num_frozen,
        global_batch_size=training.global_batch_size,
        num_samples=num_samples or None,
        num_steps=training.total_steps(num_samples) or None,
        max_length=max_length,
        mean_length=mean_length,
        lengths_vary=mean_length is not None and mean_length < max_length,
        sample_bytes=sample_bytes,
        needs_decoding=columns is None,
        has_dropout=any(_has_dropout(module) for module in model.modules()),
        has_batchnorm=any(isinstance(module, _BATCHNORMS) for module in model.modules()),
        layers=layer_kinds(model),
    )


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count the trained and the frozen parameters."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return trained, sum(parameter.numel() for parameter in model.parameters()) - trained


def layer_kinds(model: nn.Module) -> tuple[str, ...]:
    """The kinds of layers in a model."""
    return tuple(name for name, kinds in _LAYERS.items() if any(isinstance(m, kinds) for m in model.modules()))


def _has_dropout(module: nn.Module) -> bool:
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, _DROPOUTS) and module.p > 0


def measure_activation_bytes(
    model: nn.Module, loss: LossFunction, small: MicroBatch, large: MicroBatch, *, device: AbstractDevice
) -> int:
    """Bytes that one sample keeps for the backward pass: the slope between two small micro-batches.

    Generators and buffers are restored, and no gradient is computed.
    """
    buffers = BufferSnapshot(model)
    try:
        with preserve_rng(device), device.compute_context():
            at_small, at_large = (_saved_bytes(model, loss, micro) for micro in (small, large))
    finally:
        buffers.restore()
    return max(1, (at_large - at_small) // max(1, len(large) - len(small)))


def calls_attention(model: nn.Module, loss: LossFunction, micro: MicroBatch, *, device: AbstractDevice) -> bool:
    """Whether the loss calls torch's scaled_dot_product_attention, in one pass over a few samples."""
    buffers = BufferSnapshot(model)
    try:
        with preserve_rng(device), device.compute_context(), count_attention_calls() as calls:
            loss(micro)
    finally:
        buffers.restore()
    return bool(calls)


def _saved_bytes(model: nn.Module, loss: LossFunction, micro: MicroBatch) -> int:
    owned = {tensor.untyped_storage().data_ptr() for _, tensor in named_tensors(model)}
    saved: dict[int, Tensor] = {}
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        # Kept, so that no address is used twice, and detached: a node that holds its own output is never freed.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            saved[storage.data_ptr()] = tensor.detach()
        packed.append(tensor)
        return len(packed) - 1

    try:
        # Unpacked only by a loss that computes gradients itself; there is no other backward pass.
        with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
            returned = loss(micro)
    finally:
        packed.clear()
    del returned
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def _num_bytes(column: Tensor | Ragged) -> int:
    values = column.values if isinstance(column, Ragged) else column
    return values.numel() * values.element_size()
