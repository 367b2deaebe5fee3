"""What a plan should warn of, whoever made the choice."""

from collections.abc import Iterator

from whet.base.units import GB, show_bytes
from whet.plan.hazards import hazard_lines
from whet.plan.prediction import predict_bytes
from whet.plan.rule import Facts

_LONG_FOR_ATTENTION = 1024
"""From here on one head's matrix of one sample takes 4 MB and more in float32."""


def cautions(facts: Facts) -> Iterator[str]:
    """One line for each risk in the decided settings."""
    precision, micro = str(facts.value("precision")), facts.value("micro_batch")
    workload, limit = facts.workload, facts.value("memory_gb")
    assert isinstance(micro, int)

    needed = predict_bytes(
        workload,
        micro_batch=micro,
        device=facts.device,
        precision=precision,
        is_checkpointed=facts.value("activation_checkpointing") == "on",
        num_parts=facts.num_parts,
    )
    if needed is not None and isinstance(limit, int | float) and needed > limit * GB:
        yield f"micro batch {micro} needs about {show_bytes(needed)}, more than the {limit:g} GB planned for"
    if precision == "bf16" and facts.device == "cpu" and facts.machine.cpu.has_bf16 is not True:
        yield "bf16 on a CPU without native bf16 was measured 60 to 100 times slower than fp32"
    if precision == "fp16" and facts.device == "cpu":
        yield "fp16 on CPUs was measured 50 times slower than fp32, also where bf16 is native"
    if precision == "tf32" and facts.device != "cuda":
        yield f"tf32 exists on CUDA only; {facts.device} computes in fp32"
    if workload.has_dropout and workload.world_size > 1:
        yield "dropout draws depend on the process: another number of them is another draw of the same training"
    if workload.has_batchnorm and micro < workload.global_batch_size:
        yield "BatchNorm's statistics are taken over a micro-batch, so the cut changes what is trained"
    if workload.has_dropout and micro < workload.global_batch_size:
        yield "dropout draws depend on the micro-batch: another cut is another draw of the same training"
    if facts.value("mps_fallback") == "on" and facts.device == "mps":
        yield "mps_fallback hides slow trips to the CPU"
    if facts.device == "mps" and workload.max_length >= _LONG_FOR_ATTENTION:
        yield (
            f"MPS has no attention for training that avoids the whole matrix: its memory grows with the square of "
            f"max_length={workload.max_length}; activation_checkpointing=on keeps one block's at a time"
        )
    if facts.device == "mps" and facts.value("layout") != "contiguous":
        yield "a training refuses channels_last on MPS: it gives crashes and wrong results up to torch 2.13"
    if facts.value("graph") == "on" and facts.device != "cuda":
        yield f"{facts.device} cannot capture a step: every step runs as it is"
    yield from hazard_lines(facts)
    if facts.machine.origin == "composed":
        yield f"{facts.machine.name} is composed from public sources; nothing was run on it"
