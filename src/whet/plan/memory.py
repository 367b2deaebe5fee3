"""Predict the memory of a training step from the workload."""

from whet.machine.device_figures import DEVICE_FIGURES
from whet.plan.workload import GRADIENT_BYTES, Workload

# Activations relative to float32. Autocast does not halve all of them: norms, softmax and losses stay in float32.
_ACTIVATION_SHARE = {"fp32": 1.0, "tf32": 1.0, "bf16": 0.6, "fp16": 0.6}

# Activations relative to those without checkpointing. It keeps only the inputs of blocks, plus the activations of one
# block during the backward pass.
_CHECKPOINTING_SHARE = 0.3


def predict_memory_parts(
    workload: Workload,
    *,
    micro_batch: int,
    device: str,
    precision: str,
    is_checkpointed: bool = False,
    num_shards: int = 1,
) -> dict[str, int] | None:
    """Predict the peak memory of a training step by part, or return None if the size of activations is unknown.

    `num_shards` is the number of processes that weights, gradients and optimizer state are sharded over.
    """
    if workload.activation_bytes is None:
        return None
    # activation_bytes is measured in float32 for one sample of the maximum length, so this is an upper bound.
    activations = workload.activation_bytes * micro_batch * _ACTIVATION_SHARE.get(precision, 1.0)
    if is_checkpointed:
        activations *= _CHECKPOINTING_SHARE
    return {
        "weights": workload.weight_bytes // num_shards,
        "gradients": workload.num_parameters * GRADIENT_BYTES // num_shards,
        "optimizer": workload.num_parameters * workload.optimizer_bytes // num_shards,
        "activations": int(activations),
        "device": DEVICE_FIGURES[device].context_bytes,
    }


def predict_memory(
    workload: Workload,
    *,
    micro_batch: int,
    device: str,
    precision: str,
    is_checkpointed: bool = False,
    num_shards: int = 1,
) -> int | None:
    """Predict the peak bytes of a training step, or return None if the size of activations is unknown."""
    parts = predict_memory_parts(
        workload,
        micro_batch=micro_batch,
        device=device,
        precision=precision,
        is_checkpointed=is_checkpointed,
        num_shards=num_shards,
    )
    return None if parts is None else sum(parts.values())
