"""The warnings of a plan, and the known PyTorch bugs that apply to a machine and a workload."""

from collections.abc import Iterator

from whet.base.units import GB, format_bytes
from whet.machine.facts import Machine, parse_release
from whet.plan.hazard_table import HAZARDS, Hazard
from whet.plan.memory import predict_memory
from whet.plan.rule import RuleContext
from whet.plan.values import HALF_PRECISIONS, SettingValues

# Maximum rows that a matrix product can sum over without wrong results on M1 and M2 (pytorch/pytorch#177116).
ROW_LIMIT = 32_768

# At this length, the attention matrix of one head for one sample takes 4 MB in float32.
_LONG_SEQUENCE = 1024
_HAZARDS_PAGE = "docs/hazards.md"
# A plan shows only a few hazards in full, so that they do not hide other warnings.
_MAX_HAZARD_LINES = 2
# On MPS, a linear layer with bias corrupts rows if a batch dimension is larger than this (pytorch/pytorch#189495).
_HUGE_BATCH = 65_536


def plan_warnings(context: RuleContext) -> Iterator[str]:
    """Yield one warning for each risky setting, no matter whether a rule or the user has decided it."""
    device, workload, micro, limit = context.device_type, context.workload, context.micro_batch, context.memory_gb
    precision = context.precision
    needed = predict_memory(
        workload,
        micro_batch=micro,
        device=device,
        precision=precision,
        is_checkpointed=context.activation_checkpointing == "on",
        num_shards=context.num_shards,
    )
    if needed is not None and limit is not None and needed > limit * GB:
        yield f"micro batch {micro} needs about {format_bytes(needed)}, more than the {limit:g} GB planned for"
    if precision == "bf16" and device == "cpu" and context.machine.cpu.has_bf16 is not True:
        yield "bf16 on a CPU without native bf16 was measured 60 to 100 times slower than fp32"
    if precision == "fp16" and device == "cpu":
        yield "fp16 on CPUs was measured 50 times slower than fp32, even where bf16 is native"
    yield from override_notes(context)
    if workload.has_dropout and workload.world_size > 1:
        yield "dropout masks depend on the number of processes: another number gives other draws"
    if workload.has_batchnorm and micro < workload.global_batch_size:
        yield "BatchNorm's statistics are computed per micro-batch, so splitting the batch changes what is trained"
    if workload.has_dropout and micro < workload.global_batch_size:
        yield "dropout masks depend on the micro-batch: another split gives other draws"
    if context.mps_fallback == "on" and device == "mps":
        yield "mps_fallback hides slow round trips to the CPU"
    if device == "mps" and workload.max_length >= _LONG_SEQUENCE:
        yield (
            "MPS has no attention for training that avoids the full attention matrix: its memory grows with the square "
            f"of max_length={workload.max_length}; activation_checkpointing=on keeps only one block's at a time"
        )
    if device == "mps" and context.layout != "contiguous":
        yield "training rejects channels_last on MPS: BatchNorm's gradients are wrong with it (pytorch#175189)"
    if context.graph == "on" and device != "cuda":
        yield f"{device} cannot capture steps: every step runs eagerly"
    yield from hazard_lines(context)
    if context.machine.origin == "composed":
        yield f"{context.machine.name} is composed from public sources; nothing was run on it"


def override_notes(plan: SettingValues) -> Iterator[str]:
    """Yield a note for each override with no effect on this device, and one if the GPU memory limit is disabled."""
    for name, setting in plan.settings.items():
        if "no_effect" in setting.evidence:
            yield f"{name}: {setting.reason}"
    if plan.high_watermark == 0:
        yield "a high watermark of 0 removes the limit of GPU memory: the Mac may swap or freeze, and the GPU fail"


def known_hazards(machine: Machine, device: str) -> tuple[Hazard, ...]:
    """Return the known bugs of MPS with this torch, macOS and chip. An unknown version counts as affected."""
    if device.partition(":")[0] != "mps":
        return ()
    return tuple(hazard for hazard in HAZARDS if _applies(hazard, machine))


def relevant_hazards(hazards: tuple[Hazard, ...], context: RuleContext) -> tuple[Hazard, ...]:
    """Return the hazards that this workload is known to trigger with the decided settings."""
    traits = _traits(context)
    return tuple(hazard for hazard in hazards if hazard.needs and hazard.needs <= traits)


def hazard_lines(context: RuleContext) -> Iterator[str]:
    """Yield the hazards that this workload triggers, then a line that points to the full list."""
    hazards = known_hazards(context.machine, context.device_type)
    if not hazards:
        return
    # The hazard of too many rows counts as avoided, because rules never plan so many. Warn if it applies anyway,
    # because the user has set the micro-batch or the batch cannot be split.
    met = [hazard for hazard in relevant_hazards(hazards, context) if not hazard.is_avoided or "rows" in hazard.needs]
    for hazard in met[:_MAX_HAZARD_LINES]:
        answer = _row_limit_advice(context) if "rows" in hazard.needs else hazard.answer
        yield f"{hazard.what} (pytorch{hazard.issue}); {answer}"
    num_avoided = sum(hazard.is_avoided for hazard in hazards)
    version = context.machine.torch.version or "of unknown version"
    avoided = f"{num_avoided} of them {'is' if num_avoided == 1 else 'are'} avoided"
    yield (f"{len(hazards)} known wrong results apply to torch {version} on this Mac, {avoided}: {_HAZARDS_PAGE}")


def has_row_limit(machine: Machine, device: str) -> bool:
    """Return whether a product over too many rows gives wrong gradients on this machine."""
    return any(hazard.id == "linear-rows" for hazard in known_hazards(machine, device))


def _row_limit_advice(context: RuleContext) -> str:
    micro, length = context.micro_batch, context.workload.max_length
    return f"micro batch {micro} has {micro * length:,}; micro_batch={max(1, ROW_LIMIT // length)} stays below"


def _applies(hazard: Hazard, machine: Machine) -> bool:
    # `is False`: an unknown version (None) counts as affected.
    if hazard.fixed_in is not None and machine.torch.is_before(*hazard.fixed_in) is False:
        return False
    if hazard.since is not None and machine.torch.is_before(*hazard.since) is True:
        return False
    gpu = machine.accelerator("mps")
    family = gpu.capability if gpu else None
    if hazard.families and family is not None and family not in hazard.families:
        return False
    macos = parse_release(machine.os.version)
    if macos is None:
        return True
    # Both bounds are optional: some bugs appeared with a macOS release, some were fixed by one.
    is_old_enough = hazard.macos_until is None or macos < hazard.macos_until
    return is_old_enough and (hazard.macos_from is None or macos >= hazard.macos_from)


def _traits(context: RuleContext) -> frozenset[str]:
    """Return the traits of the workload, by the names in `Hazard.needs`. Only detected layers are included."""
    workload, precision, micro = context.workload, context.precision, context.micro_batch
    has = {
        "dropout": workload.has_dropout,
        "half": precision in HALF_PRECISIONS,
        "fp16": precision == "fp16",
        "rows": micro * workload.max_length > ROW_LIMIT,
        "huge batch": max(micro, workload.max_length) > _HUGE_BATCH,
    }
    return frozenset({*workload.layers, *(name for name, is_present in has.items() if is_present)})
