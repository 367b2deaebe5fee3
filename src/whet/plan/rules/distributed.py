"""Rules for sharing one model and its gradients between processes."""

from whet.base.units import GB, format_bytes
from whet.machine.device_figures import DEVICE_FIGURES
from whet.plan.rule import Decision, RuleContext, rule

# Share of the memory that weights, gradients and optimizer state may take. The rest is for activations.
_STATIC_SHARE = 0.8
# 25 MB is the default of DistributedDataParallel. Communication overlaps with the backward pass only if there are
# several buckets.
_BUCKET_MB = 25
_MIN_BUCKETS = 4


@rule("S1", "sharding")
def choose_sharding(context: RuleContext) -> Decision:
    """Whether each process keeps the whole model (DDP), or a shard of weights, gradients and optimizer state (FSDP2).

    Why: replicas need one all-reduce per step, which overlaps with the backward pass. Shards need three times the calls
    and 1.5 times the bytes, and each block is gathered before it computes. So sharding is for models whose weights,
    gradients and optimizer state leave no memory for activations on one device.
    When wrong: a model that fits, but only with a micro-batch so small that the device idles. The memory that sharding
    frees may then be worth its communication.
    Override: sharding=full or sharding=off.
    Sources: Rajbhandari et al. 2020, "ZeRO"; torch.distributed.fsdp.fully_shard (2.13).
    """
    workload, limit = context.workload, context.memory_gb
    if workload.world_size == 1:
        return Decision(value="unused", reason="there is only one process", evidence={"processes": 1})
    # Ignore activations: a smaller micro-batch reduces them, but not the state.
    needed = workload.static_bytes + DEVICE_FIGURES[context.device_type].context_bytes
    available = int(limit * GB * _STATIC_SHARE) if limit is not None else None
    evidence = {"processes": workload.world_size, "static_bytes": needed, "available_bytes": available}
    if available is None:
        return Decision(value="off", reason="the memory of the device is unknown", evidence=evidence)
    if needed <= available:
        reason = f"weights, gradients and state take {format_bytes(needed)}: they fit"
        return Decision(value="off", reason=reason, evidence=evidence)
    each = needed // workload.world_size
    reason = f"weights, gradients and state take {format_bytes(needed)}, sharded {format_bytes(each)} each"
    return Decision(value="full", reason=reason, evidence=evidence)


@rule("S2", "bucket_mb")
def choose_bucket(context: RuleContext) -> Decision:
    """Size in MB of the buckets in which gradients are all-reduced.

    Why: a bucket is sent when all its gradients are ready, while the backward pass computes the next one. Large buckets
    use the network well, but there must be several for any overlap. So a bucket has 25 MB, or a quarter of the
    gradients if they are smaller than four such buckets.
    When wrong: a network with high latency may need larger buckets. Measure it there.
    Override: bucket_mb=N.
    Sources: Li et al. 2020, "PyTorch Distributed"; torch.nn.parallel.DistributedDataParallel (2.13) uses 25 too.
    """
    workload = context.workload
    if workload.world_size == 1 or context.sharding == "full":
        why = "a single process has nothing to reduce" if workload.world_size == 1 else "each block is a bucket"
        return Decision(value=None, reason=why, evidence={"processes": workload.world_size})
    size = workload.num_parameters * 4 / 2**20
    value = max(1, min(_BUCKET_MB, round(size / _MIN_BUCKETS)))
    reason = f"{size:.0f} MB of gradients, sent during the backward pass"
    return Decision(value=value, reason=reason, evidence={"gradient_mb": round(size, 1)})
