"""Candidate settings for a machine and a workload, in the order in which they are tried."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whet.autotune.step_bench import Settings
from whet.plan.kernel_support import has_norm_kernels, norm_kernel_reason, supports_unpadded_attention
from whet.plan.memory import predict_memory
from whet.plan.plan import Plan, make_plan
from whet.plan.rules import ALL_RULES
from whet.plan.setting import MeasuredSetting, Scalar
from whet.plan.warnings import ROW_LIMIT, has_row_limit

_MOST_RESIDENT = 0.4
"""Of the memory limit: what the data may take where a measurement decides."""
_FIRST_WITH_TF32 = 8
"""CUDA's compute capability whose tensor cores take bf16 and tf32."""
ATTENTION = {"cuda": ("torch", "flash", "efficient")}
"""In half precision. In float32 there are two, and math was 5 to 20 times slower; on a CPU it was 1.2 to 4.7 times."""
_CONSTRAINTS = {rule.setting: rule.constraint for rule in ALL_RULES}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCandidate:
    """Other settings than the best ones so far."""

    setting: str
    """What it is about."""
    changes: Settings
    """That setting's value, and what must change along with it."""

    @property
    def value(self) -> Scalar:
        """What is tried."""
        return self.changes[self.setting]


def plan_with(plan: Plan, settings: Settings) -> Plan:
    """The plan in which these settings are taken as measured: your wishes stay, the rules decide all else anew."""
    tried = {name: MeasuredSetting(value=value, reason="tried", evidence={}) for name, value in settings.items()}
    return make_plan(
        plan.machine,
        plan.workload,
        overrides=plan.overrides,
        measured={**plan.measured, **tried},
        conditions=plan.conditions,
        trials=plan.trials,
    )


def predicted_bytes(plan: Plan, settings: Settings) -> int | None:
    """What a step will need with these settings, as the plan's own rules predict it."""
    chosen = plan_with(plan, settings)
    micro_batch = chosen.micro_batch
    assert isinstance(micro_batch, int)
    return predict_memory(
        chosen.workload,
        micro_batch=micro_batch,
        device=device_kind(chosen),
        precision=chosen.precision,
        is_checkpointed=chosen.activation_checkpointing == "on",
    )


def apply_candidate(settings: Settings, candidate: PlanCandidate) -> Settings:
    """The settings with a candidate's changes; what another device would do otherwise is left to the rules again."""
    kept = dict(settings)
    if candidate.setting in ("device", "activation_checkpointing"):
        kept.pop("micro_batch", None)
    if candidate.setting == "lengths":
        kept.pop("attention", None)
    if candidate.setting in ("precision", "layout"):
        kept.pop("norms", None)
    if candidate.setting == "device":
        for name in ("threads", "lengths", "precision", "graph", "compile", "layout", "attention", "norms"):
            kept.pop(name, None)
    return MappingProxyType({**kept, **candidate.changes})


def candidates(plan: Plan, about: str) -> Iterator[PlanCandidate]:
    """Alternatives to what the plan says about one of `ORDER`; wishes are never put in question."""
    for candidate in _ABOUT[about](plan):
        is_lawful = all(_CONSTRAINTS[name].holds(value) for name, value in candidate.changes.items())
        is_wished = any(name in plan.overrides for name in candidate.changes)
        if is_lawful and not is_wished and candidate.value != plan.settings[candidate.setting].value:
            yield candidate


def device_kind(plan: Plan) -> str:
    """The plan's device, without an index."""
    return plan.device.partition(":")[0]


def _only(setting: str, *values: Scalar) -> Iterator[PlanCandidate]:
    return (PlanCandidate(setting=setting, changes={setting: value}) for value in values)


def _devices(plan: Plan) -> Iterator[PlanCandidate]:
    return _only("device", *dict.fromkeys((*(a.kind for a in plan.machine.accelerators), "cpu")))


def _precisions(plan: Plan) -> Iterator[PlanCandidate]:
    accelerator = plan.machine.accelerator(device_kind(plan))
    if accelerator is None:
        # fp16 on CPUs was 50 times slower wherever it was measured.
        return _only("precision", "bf16", "fp32")
    if accelerator.kind == "mps":
        return _only("precision", "bf16", "fp16", "fp32")
    generation = (accelerator.capability or "").partition(".")[0]
    has_tf32 = generation.isdecimal() and int(generation) >= _FIRST_WITH_TF32
    return _only("precision", *(("bf16", "fp16", "tf32") if has_tf32 else ("fp16",)), "fp32")


def _micro_batches(plan: Plan) -> Iterator[PlanCandidate]:
    """Halves and doubles of what is best so far, and on from there when one of them wins.

    The half comes first: two points make a line, and the line says where memory ends.
    """
    return _only("micro_batch", *_cuts_around(plan, (0.5, 2.0, 0.25, 4.0)))


def _precisions_with_micro_batches(plan: Plan) -> Iterator[PlanCandidate]:
    """Each precision has a micro-batch that suits it: changed one by one, both may seem to lose."""
    for candidate in _precisions(plan):
        for micro in _cuts_around(plan, (0.5, 2.0, 0.25, 4.0)):
            yield PlanCandidate(setting="precision", changes={**candidate.changes, "micro_batch": micro})


def _cuts_around(plan: Plan, factors: tuple[float, ...]) -> list[int]:
    micro, whole = plan.micro_batch, plan.workload.global_batch_size
    assert isinstance(micro, int)
    if plan.workload.has_batchnorm:
        return []
    most = whole
    if has_row_limit(plan.machine, device_kind(plan)):
        most = min(whole, max(1, ROW_LIMIT // plan.workload.max_length))
    wanted = (max(1, min(most, int(micro * factor))) for factor in factors)
    # As even as it gets: no cut is larger than what was asked for.
    cuts = (-(-whole // -(-whole // size)) for size in wanted)
    return [cut for cut in dict.fromkeys(cuts) if cut != micro]


def _lengths(plan: Plan) -> Iterator[PlanCandidate]:
    device = device_kind(plan)
    # On MPS every new shape costs memory for good, so few shapes stay.
    if not plan.workload.lengths_vary or device == "mps":
        return _only("lengths")
    packed: tuple[str, ...] = ("packed",) if plan.workload.can_pack and device == "cpu" else ()
    if _is_unpadded(plan):
        packed = ("packed few",) if plan.graph == "on" else ("packed", "packed few")
    return _only("lengths", *packed, "sorted", "few shapes", "fixed")


def _is_unpadded(plan: Plan) -> bool:
    return supports_unpadded_attention(plan.machine, plan.workload, device=device_kind(plan), precision=plan.precision)


def _threads(plan: Plan) -> Iterator[PlanCandidate]:
    cpu, now = plan.machine.cpu, plan.threads
    if device_kind(plan) != "cpu" or not isinstance(now, int):
        return _only("threads")
    cores = cpu.physical_cores or now
    counts = (max(1, cores // 2), cores, cpu.logical_cores, 1)
    return _only("threads", *dict.fromkeys(count for count in counts if count))


def _activation_checkpointing(plan: Plan) -> Iterator[PlanCandidate]:
    """It pays only where it lets a larger part of the global batch through at once."""
    is_cut = plan.micro_batch != plan.workload.global_batch_size
    if plan.activation_checkpointing == "off" and not is_cut:
        return _only("activation_checkpointing")
    return _only("activation_checkpointing", "off", "on")


def _data_homes(plan: Plan) -> Iterator[PlanCandidate]:
    size, limit = plan.workload.data_bytes, memory_limit(plan)
    is_near = plan.data_location == "host" and size is not None and limit is not None
    if is_near and size is not None and limit is not None and size <= _MOST_RESIDENT * limit:
        return _only("data_location", "device")
    return _only("data_location")


def _workers(plan: Plan) -> Iterator[PlanCandidate]:
    if plan.data_location != "files":
        return _only("workers")
    cores = plan.machine.cpu.logical_cores or 1
    return _only("workers", *(count for count in (0, 1, 2, 4, 8) if count < max(2, cores)))


def _prefetches(plan: Plan) -> Iterator[PlanCandidate]:
    return _only("prefetch", *((1, 4) if plan.workers else ()))


def _graphs(plan: Plan) -> Iterator[PlanCandidate]:
    """A captured step holds for one shape: where lengths vary, they are rounded up to few along with it."""
    if device_kind(plan) != "cuda" or plan.activation_checkpointing == "on":
        return
    few = "packed few" if _is_unpadded(plan) else "few shapes"
    if plan.workload.lengths_vary and plan.lengths != few:
        yield PlanCandidate(setting="graph", changes={"graph": "on", "lengths": few})
    yield from _only("graph", "on", "off")


def _layouts(plan: Plan) -> Iterator[PlanCandidate]:
    is_tried = device_kind(plan) != "mps" and "conv2d" in plan.workload.layers
    return _only("layout", *(("channels_last", "contiguous") if is_tried else ()))


def _norms(plan: Plan) -> Iterator[PlanCandidate]:
    kind, precision, layout = device_kind(plan), plan.precision, plan.layout
    has_kernels = has_norm_kernels(plan.machine, device=kind, precision=precision)
    is_tried = has_kernels and norm_kernel_reason(plan.workload.layers, layout=layout) is not None
    return _only("norms", *(("own", "torch") if is_tried else ()))


def has_attention_choice(plan: Plan) -> bool:
    """Whether some device here has attention kernels worth comparing."""
    return any(kind in ATTENTION for kind in ("cpu", *(a.kind for a in plan.machine.accelerators)))


def _attention_kernels(plan: Plan) -> Iterator[PlanCandidate]:
    if "sdpa" not in plan.workload.layers or plan.precision not in ("bf16", "fp16"):
        return _only("attention")
    # What cuDNN pays for each new length does not show in steps on a few batches (rule K7).
    has_many_shapes = plan.workload.lengths_vary and plan.lengths in ("sorted", "packed")
    kernels = ATTENTION.get(device_kind(plan), ())
    return _only("attention", *(kernel for kernel in kernels if kernel != "torch" or not has_many_shapes))


def _compiles(plan: Plan) -> Iterator[PlanCandidate]:
    # Without a number of steps nobody knows whether it would pay.
    return _only("compile", *(("blocks", "on") if plan.workload.num_steps else ()))


def memory_limit(plan: Plan) -> int | None:
    """The bytes a step may need; None where nobody knows."""
    limit = plan.memory_gb
    return int(limit * 1024**3) if isinstance(limit, int | float) else None


_ABOUT: Mapping[str, Callable[[Plan], Iterator[PlanCandidate]]] = {
    "device": _devices,
    "threads": _threads,
    "precision": _precisions,
    "micro_batch": _micro_batches,
    "lengths": _lengths,
    "optimizer_kernels": lambda _: _only("optimizer_kernels", "fused", "foreach", "loop"),
    "activation_checkpointing": _activation_checkpointing,
    "data_location": _data_homes,
    "workers": _workers,
    "prefetch": _prefetches,
    "precision with micro_batch": _precisions_with_micro_batches,
    "layout": _layouts,
    "attention": _attention_kernels,
    "norms": _norms,
    "graph": _graphs,
    "compile": _compiles,
}
ORDER = tuple(_ABOUT)
"""What usually matters most comes first, since time may run out; what costs most to prepare comes last."""
