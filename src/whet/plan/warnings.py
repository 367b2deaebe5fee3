"""Warnings of a plan, and the known PyTorch bugs that apply to a machine and a workload."""

from collections.abc import Iterator

from whet.base.units import GB, format_bytes
from whet.machine.facts import Machine
from whet.plan.hazard_table import HAZARDS, Hazard, Release
from whet.plan.memory import predict_memory
from whet.plan.rule import RuleContext

_HAZARDS_PAGE = "docs/hazards.md"
ROW_LIMIT = 32_768
"""Rows over which one product may sum on M1 and M2 (pytorch/pytorch#177116)."""

_MAX_HAZARD_LINES = 2
_HUGE_BATCH = 65_536
_HALF_PRECISIONS = ("bf16", "fp16")


def known_hazards(machine: Machine, device: str) -> tuple[Hazard, ...]:
    """The known wrong results of this torch, this macOS and this chip; what is unknown counts as affected."""
    if device.partition(":")[0] != "mps":
        return ()
    return tuple(hazard for hazard in HAZARDS if _applies(hazard, machine))


def relevant_hazards(found: tuple[Hazard, ...], facts: RuleContext) -> tuple[Hazard, ...]:
    """Those among them that the workload is known to meet under the decided settings."""
    traits = _traits(facts)
    return tuple(hazard for hazard in found if hazard.needs and hazard.needs <= traits)


def hazard_lines(facts: RuleContext) -> Iterator[str]:
    """What a plan says about them: what this workload meets, in short, and where the rest is told."""
    found = known_hazards(facts.machine, facts.device)
    if not found:
        return
    # A micro-batch with too many rows was not planned but asked for, or may not be cut.
    met = [hazard for hazard in relevant_hazards(found, facts) if not hazard.is_avoided or "rows" in hazard.needs]
    for hazard in met[:_MAX_HAZARD_LINES]:
        answer = _row_limit_advice(facts) if "rows" in hazard.needs else hazard.answer
        yield f"{hazard.what} (pytorch{hazard.issue}); {answer}"
    avoided = sum(hazard.is_avoided for hazard in found)
    version = facts.machine.torch.version or "of unknown version"
    yield (
        f"{len(found)} known wrong results apply to torch {version} on this Mac, {avoided} of them are avoided: {_HAZARDS_PAGE}"
    )


def _row_limit_advice(facts: RuleContext) -> str:
    micro, length = facts.micro_batch, facts.workload.max_length
    assert isinstance(micro, int)
    return f"micro batch {micro} has {micro * length:,}; micro_batch={max(1, ROW_LIMIT // length)} has not"


def has_row_limit(machine: Machine, device: str) -> bool:
    """Whether a product over too many rows gives wrong gradients here."""
    return any(hazard.id == "linear-rows" for hazard in known_hazards(machine, device))


def _applies(hazard: Hazard, machine: Machine) -> bool:
    if hazard.fixed_in is not None and machine.torch.is_before(*hazard.fixed_in) is False:
        return False
    gpu = machine.accelerator("mps")
    family = gpu.capability if gpu else None
    if hazard.families and family is not None and family not in hazard.families:
        return False
    macos = _parse_release(machine.os.version)
    if macos is None:
        return True
    is_old_enough = hazard.macos_until is None or macos < hazard.macos_until
    return is_old_enough and (hazard.macos_from is None or macos >= hazard.macos_from)


def _traits(facts: RuleContext) -> frozenset[str]:
    """What of the hazards' needs this workload has; a layer that nobody named is not known to be there."""
    workload, precision, micro = facts.workload, facts.precision, facts.micro_batch
    assert isinstance(micro, int)
    has = {
        "dropout": workload.has_dropout,
        "half": precision in _HALF_PRECISIONS,
        "fp16": precision == "fp16",
        "rows": micro * workload.max_length > ROW_LIMIT,
        "huge batch": max(micro, workload.max_length) > _HUGE_BATCH,
    }
    return frozenset({*workload.layers, *(name for name, is_there in has.items() if is_there)})


def _parse_release(version: str | None) -> Release | None:
    parts = (version or "").split(".")
    if not parts[0].isdecimal():
        return None
    return int(parts[0]), int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else 0


_LONG_SEQUENCE = 1024
"""From here on one head's matrix of one sample takes 4 MB and more in float32."""


def plan_warnings(facts: RuleContext) -> Iterator[str]:
    """One line for each risk in the decided settings."""
    precision, micro = facts.precision, facts.micro_batch
    workload, limit = facts.workload, facts.memory_gb
    assert isinstance(micro, int)

    needed = predict_memory(
        workload,
        micro_batch=micro,
        device=facts.device,
        precision=precision,
        is_checkpointed=facts.activation_checkpointing == "on",
        num_parts=facts.num_parts,
    )
    if needed is not None and isinstance(limit, int | float) and needed > limit * GB:
        yield f"micro batch {micro} needs about {format_bytes(needed)}, more than the {limit:g} GB planned for"
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
    if facts.mps_fallback == "on" and facts.device == "mps":
        yield "mps_fallback hides slow trips to the CPU"
    if facts.device == "mps" and workload.max_length >= _LONG_SEQUENCE:
        yield (
            f"MPS has no attention for training that avoids the whole matrix: its memory grows with the square of "
            f"max_length={workload.max_length}; activation_checkpointing=on keeps one block's at a time"
        )
    if facts.device == "mps" and facts.layout != "contiguous":
        yield "a training refuses channels_last on MPS: it gives crashes and wrong results up to torch 2.13"
    if facts.graph == "on" and facts.device != "cuda":
        yield f"{facts.device} cannot capture a step: every step runs as it is"
    yield from hazard_lines(facts)
    if facts.machine.origin == "composed":
        yield f"{facts.machine.name} is composed from public sources; nothing was run on it"
