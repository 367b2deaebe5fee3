"""Candidate settings for a machine and a workload, in the order in which they are tried."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from whet.autotune.step_bench import Settings
from whet.plan.kernel_support import has_norm_kernels, norm_kernel_reason, supports_unpadded_attention
from whet.plan.memory import predict_memory
from whet.plan.plan import Plan, make_plan
from whet.plan.setting import MeasuredSetting, Scalar
from whet.plan.values import DECLARED
from whet.plan.warnings import ROW_LIMIT, has_row_limit

# Maximum fraction of the memory limit for a dataset that is kept on the device.
_MAX_RESIDENT_SHARE = 0.4
# The first CUDA compute capability whose tensor cores support bf16 and tf32.
_MIN_TF32_CAPABILITY = 8
# Attention kernels in half precision. In float32 the only alternative is "math", which was 5 to 20 times slower (1.2 to
# 4.7 times on CPUs).
ATTENTION = {"cuda": ("torch", "flash", "efficient")}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCandidate:
    """A change to the best settings found so far, to be timed against them."""

    setting: str
    """Name of the setting to test."""
    changes: Settings
    """New value of this setting, and of other settings that must change with it."""

    @property
    def value(self) -> Scalar:
        """The new value of `setting`."""
        return self.changes[self.setting]


def plan_with(plan: Plan, settings: Settings) -> Plan:
    """Return the plan with these settings as measured values.

    Overrides are kept, and the rules decide all other settings again.
    """
    tried = {name: MeasuredSetting(value=value, reason="tried", evidence={}) for name, value in settings.items()}
    return make_plan(
        plan.machine,
        plan.workload,
        overrides=plan.overrides,
        measured={**plan.measured, **tried},
        system_state=plan.system_state,
        trials=plan.trials,
    )


def predicted_bytes(plan: Plan, settings: Settings) -> int | None:
    """Return the predicted memory of a step with these settings in bytes, or None if unknown."""
    chosen = plan_with(plan, settings)
    return predict_memory(
        chosen.workload,
        micro_batch=chosen.micro_batch,
        device=device_kind(chosen),
        precision=chosen.precision,
        is_checkpointed=chosen.activation_checkpointing == "on",
    )


def apply_candidate(settings: Settings, candidate: PlanCandidate) -> Settings:
    """Return the settings with a candidate applied, and without the settings that depend on its changes.

    The rules decide the removed settings again.
    """
    kept = dict(settings)
    # Device memory and activation checkpointing change which micro-batches fit.
    if candidate.setting in ("device", "activation_checkpointing"):
        kept.pop("micro_batch", None)
    # The fastest attention kernel depends on the number of distinct shapes.
    if candidate.setting == "lengths":
        kept.pop("attention", None)
    # The norm kernels support only some precisions and layouts, so decide them again.
    if candidate.setting in ("precision", "layout"):
        kept.pop("norms", None)
    # Values measured on one device do not apply to another.
    if candidate.setting == "device":
        for name in ("threads", "lengths", "precision", "graph", "compile", "layout", "attention", "norms"):
            kept.pop(name, None)
    return MappingProxyType({**kept, **candidate.changes})


def candidates(plan: Plan, about: str) -> Iterator[PlanCandidate]:
    """Yield the candidates of one entry of `search_order`, except for settings fixed by the user or environment."""
    for candidate in ABOUT[about](plan):
        is_valid = all(DECLARED[name].constraint.holds(value) for name, value in candidate.changes.items())
        is_fixed = any(
            name in plan.overrides or plan.settings[name].source == "environment" for name in candidate.changes
        )
        if is_valid and not is_fixed and candidate.value != plan.settings[candidate.setting].value:
            yield candidate


def device_kind(plan: Plan) -> str:
    """Return the device type of a plan, such as "cuda" for "cuda:0"."""
    return plan.device.partition(":")[0]


def _only(setting: str, *values: Scalar) -> Iterator[PlanCandidate]:
    """Yield candidates that change only this setting, one per value."""
    return (PlanCandidate(setting=setting, changes={setting: value}) for value in values)


def _devices(plan: Plan) -> Iterator[PlanCandidate]:
    return _only("device", *dict.fromkeys((*(a.kind for a in plan.machine.accelerators), "cpu")))


def _precisions(plan: Plan) -> Iterator[PlanCandidate]:
    accelerator = plan.machine.accelerator(device_kind(plan))
    if accelerator is None:
        # Omit fp16, which was 50 times slower on every CPU that we measured.
        return _only("precision", "bf16", "fp32")
    if accelerator.kind == "mps":
        return _only("precision", "bf16", "fp16", "fp32")
    generation = (accelerator.capability or "").partition(".")[0]
    has_tf32 = generation.isdecimal() and int(generation) >= _MIN_TF32_CAPABILITY
    return _only("precision", *(("bf16", "tf32", "fp16") if has_tf32 else ("fp16",)), "fp32")


def _micro_batches(plan: Plan) -> Iterator[PlanCandidate]:
    """Yield half and twice the best micro-batch so far. A winner becomes the next starting point.

    Half comes first: its peak memory is a second point for the memory model, which then predicts the larger sizes.
    """
    return _only("micro_batch", *_splits_around(plan, (0.5, 2.0, 0.25, 4.0)))


def _precisions_with_micro_batches(plan: Plan) -> Iterator[PlanCandidate]:
    """Yield changes of precision combined with changes of micro-batch.

    The best micro-batch depends on the precision, so each change may lose alone although the combination wins.
    """
    for candidate in _precisions(plan):
        for micro in _splits_around(plan, (0.5, 2.0, 0.25, 4.0)):
            yield PlanCandidate(setting="precision", changes={**candidate.changes, "micro_batch": micro})


def _splits_around(plan: Plan, factors: tuple[float, ...]) -> list[int]:
    micro, whole = plan.micro_batch, plan.workload.global_batch_size
    if plan.workload.whole_batch_reason is not None:
        return []
    largest = whole
    if has_row_limit(plan.machine, device_kind(plan)):
        largest = min(whole, max(1, ROW_LIMIT // plan.workload.max_length))
    wanted = (max(1, min(largest, int(micro * factor))) for factor in factors)
    # Rounding up in both divisions gives even splits that do not exceed the wanted size.
    splits = (-(-whole // -(-whole // size)) for size in wanted)
    return [split for split in dict.fromkeys(splits) if split != micro]


def _lengths(plan: Plan) -> Iterator[PlanCandidate]:
    device = device_kind(plan)
    if plan.workload.can_unpad and device == "cpu" and plan.activation_checkpointing == "off":
        return _only("lengths", *(("unpadded", "fixed") if plan.compile == "off" else ()))
    # On MPS each new shape permanently takes memory, so keep the few shapes that the rules choose.
    if not plan.workload.lengths_vary or device == "mps":
        return _only("lengths")
    packed: tuple[str, ...] = ("packed",) if plan.workload.can_pack and device == "cpu" else ()
    if _is_unpadded(plan):
        packed = ("packed_bucketed",) if plan.graph == "on" else ("packed", "packed_bucketed")
    return _only("lengths", *packed, "sorted", "bucketed", "fixed")


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
    """Yield activation checkpointing on and off. It pays only if it allows a larger micro-batch."""
    is_split = plan.micro_batch != plan.workload.global_batch_size
    if plan.activation_checkpointing == "off" and not is_split:
        return _only("activation_checkpointing")
    return _only("activation_checkpointing", "off", "on")


def _data_homes(plan: Plan) -> Iterator[PlanCandidate]:
    size, limit = plan.workload.data_bytes, memory_limit(plan)
    is_near = plan.data_location == "host" and size is not None and limit is not None
    if is_near and size is not None and limit is not None and size <= _MAX_RESIDENT_SHARE * limit:
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
    """Yield graph capture on and off.

    A captured graph has a fixed shape. If lengths vary, the candidate therefore also rounds them to a few shapes.
    """
    if device_kind(plan) != "cuda" or plan.activation_checkpointing == "on":
        return
    few = "packed_bucketed" if _is_unpadded(plan) else "bucketed"
    if plan.workload.lengths_vary and plan.lengths != few:
        yield PlanCandidate(setting="graph", changes={"graph": "on", "lengths": few})
    yield from _only("graph", "on", "off")


def _optimizer_kernels(plan: Plan) -> Iterator[PlanCandidate]:
    # The user's optimizer is one object. Candidates are timed alternately, and its state cannot serve two kinds of
    # kernels.
    return _only("optimizer_kernels", *plan.workload.built_kernels)


def _layouts(plan: Plan) -> Iterator[PlanCandidate]:
    is_tried = device_kind(plan) != "mps" and "conv2d" in plan.workload.layers
    return _only("layout", *(("channels_last", "contiguous") if is_tried else ()))


def _norms(plan: Plan) -> Iterator[PlanCandidate]:
    kind, precision, layout = device_kind(plan), plan.precision, plan.layout
    has_kernels = has_norm_kernels(plan.machine, device=kind, precision=precision)
    is_tried = has_kernels and norm_kernel_reason(plan.workload.layers, layout=layout) is not None
    return _only("norms", *(("whet", "torch") if is_tried else ()))


def has_attention_choice(plan: Plan) -> bool:
    """Return whether a device of this machine offers more than one attention kernel."""
    return any(kind in ATTENTION for kind in ("cpu", *(a.kind for a in plan.machine.accelerators)))


def _attention_kernels(plan: Plan) -> Iterator[PlanCandidate]:
    if "sdpa" not in plan.workload.layers or plan.precision not in ("bf16", "fp16"):
        return _only("attention")
    # The default may select cuDNN, which is expensive for each new length (rule K7). Timing a few batches does not show
    # that cost, so omit the default if there are many shapes.
    has_many_shapes = plan.workload.lengths_vary and plan.lengths in ("sorted", "packed")
    kernels = ATTENTION.get(device_kind(plan), ())
    return _only("attention", *(kernel for kernel in kernels if kernel != "torch" or not has_many_shapes))


def _compiles(plan: Plan) -> Iterator[PlanCandidate]:
    # Whether compiling pays off is unknown if the number of steps is.
    if not plan.workload.num_steps:
        return _only("compile")
    # On CUDA, try the whole model first: Triton kernels compile in parallel, and faster than C++ on a CPU.
    return _only("compile", *(("on", "blocks") if device_kind(plan) == "cuda" else ("blocks", "on")))


def memory_limit(plan: Plan) -> int | None:
    """Return the maximum memory of a step in bytes, or None if unknown."""
    limit = plan.memory_gb
    return int(limit * 1024**3) if isinstance(limit, int | float) else None


# Candidate generators by name. Time may run out, so the settings that usually matter most come first, and those that
# take longest to prepare come last.
ABOUT: Mapping[str, Callable[[Plan], Iterator[PlanCandidate]]] = {
    "device": _devices,
    "threads": _threads,
    "precision": _precisions,
    "micro_batch": _micro_batches,
    "lengths": _lengths,
    "optimizer_kernels": _optimizer_kernels,
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
# These settings gained most on an H200: a ResNet-50 became 2.8 times as fast, a GPT-2 2.1 times, an MLP 8 times.
_FIRST_ON_GPUS = ("device", "precision", "layout", "graph", "compile")


def search_order(plan: Plan) -> tuple[str, ...]:
    """Return the entries of `ABOUT` in the order in which they are tried, sorted by expected gain."""
    first = _FIRST_ON_GPUS if device_kind(plan) == "cuda" else ()
    return (*first, *(about for about in ABOUT if about not in first))
