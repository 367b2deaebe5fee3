"""All rules, in the order in which they decide. A rule sees the settings that earlier rules have decided.

To add a rule, declare the setting in `plan/values.py`, write a documented function with `@rule` in the file of its
family, and list it here. `make docs` writes its page.
"""

from whet.plan.rule import Rule
from whet.plan.rules import checkpoints, device, distributed, kernels, loading, memory, precision, verification

ALL_RULES: tuple[Rule, ...] = (
    device.choose_device,
    device.choose_on_device_failure,
    device.choose_mps_fallback,
    device.choose_keep_awake,
    precision.choose_precision,
    precision.choose_loss_scaling,
    kernels.choose_optimizer_kernels,
    kernels.choose_compile,
    kernels.choose_graph,
    kernels.choose_layout,
    kernels.choose_threads,
    kernels.choose_deterministic,
    memory.choose_memory,
    distributed.choose_sharding,
    distributed.choose_bucket,
    memory.choose_activation_checkpointing,
    memory.choose_micro_batch,
    memory.choose_eval_batch,
    memory.choose_lengths,
    memory.choose_high_watermark,
    memory.choose_low_watermark,
    memory.choose_empty_cache,
    memory.choose_freed_memory,
    kernels.choose_attention,
    kernels.choose_norms,
    loading.choose_data_location,
    loading.choose_workers,
    loading.choose_copies,
    loading.choose_worker_start_method,
    loading.choose_prefetch,
    checkpoints.choose_checkpoint_minutes,
    checkpoints.choose_checkpoint_steps,
    checkpoints.choose_checkpoint_epochs,
    checkpoints.choose_keep_checkpoints,
    device.choose_on_heat,
    verification.choose_verify,
    verification.choose_causal_mask,
)
