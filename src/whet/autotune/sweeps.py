"""The values of each benchmark sweep, and a plain PyTorch loop as the baseline."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from whet.autotune.candidates import PlanCandidate, apply_candidate, candidates, device_kind, plan_with
from whet.autotune.step_bench import Settings
from whet.base.errors import UsageError
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.warnings import ROW_LIMIT, has_row_limit

# Sweeps in the order of measurement. Those with possibly very slow settings, whose process must be killed, come last.
SWEEPS = ("device", "micro_batch", "threads", "workers", "precision")
# Maximum number of values in a sweep.
_MAX_VALUES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One set of settings of a sweep, under which the same steps are timed."""

    value: Scalar
    settings: Settings
    """Settings that differ from the rule-based plan."""
    is_plan: bool = False


def sweep_variants(rule_plan: Plan, own: Settings, setting: str, values: Sequence[Scalar] = ()) -> list[Variant]:
    """Return one variant for the plan's value and one for each alternative, with numeric values in increasing order.

    `own` are the measured settings of the plan that differ from the rules. `values` are the alternatives given by the
    user.
    """
    plan = plan_with(rule_plan, own)
    now = plan.settings[setting].value
    for value in values:
        # Reject a value that no plan accepts before anything is measured.
        plan_with(rule_plan, {**own, setting: value})
    values = [now, *(value for value in values or _VALUES[setting](plan) if value != now)]
    if all(isinstance(value, int) for value in values):
        values.sort(key=lambda value: int(value or 0))
    return [
        Variant(value=value, settings=own, is_plan=True)
        if value == now
        else Variant(
            value=value, settings=apply_candidate(own, PlanCandidate(setting=setting, changes={setting: value}))
        )
        for value in values
    ]


def batch_sizes_to_sweep(plan: Plan, values: Sequence[Scalar]) -> list[int]:
    """Return the global batch sizes of a sweep: those given by the user, or halves and doubles of the current size."""
    base, num_samples = plan.workload.global_batch_size, plan.workload.num_samples
    sizes = [value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0]
    if len(sizes) < len(values):
        raise UsageError(
            "a global batch size is a whole number",
            got=f"global_batch_size={','.join(map(str, values))}",
            try_=f"--sweep global_batch_size={base},{2 * base}",
        )
    sizes = sizes or [size for shift in (-2, -1, 0, 1, 2) if (size := int(base * 2.0**shift)) >= 1]
    fitting = [size for size in dict.fromkeys(sizes) if num_samples is None or size <= num_samples]
    if not fitting or (values and len(fitting) < len(set(sizes))):
        raise UsageError(
            "a global batch is larger than the data",
            got=f"global_batch_size={max(sizes)}, {num_samples:,} samples",
            try_=f"at most {num_samples}",
        )
    return sorted(fitting)


def not_swept_reason(plan: Plan, setting: str) -> str | None:
    """Return why a setting cannot be swept, or None if it can."""
    if setting in plan.overrides:
        return f"you set {setting}={plan.overrides[setting]}"
    if setting in plan.settings and plan.settings[setting].source == "environment":
        return plan.settings[setting].reason
    match setting:
        case "device" if not plan.machine.accelerators:
            return "the CPU is the only device here"
        case "micro_batch" if (reason := plan.workload.whole_batch_reason) is not None:
            return reason
        case "micro_batch" if plan.workload.global_batch_size == 1:
            return "a global batch of 1 cannot be split"
        case "threads" if device_kind(plan) != "cpu":
            return f"steps on {device_kind(plan)} do not depend on it"
        case "threads" if (plan.machine.cpu.logical_cores or 1) < 2:
            return "there is one core"
        case "workers" if plan.data_location != "files":
            return "the data is in memory, so nothing has to be decoded"
    return None


def select_sweeps(plan: Plan, requested: Sequence[str]) -> list[str]:
    """Return the requested sweeps, or all possible sweeps if none is requested.

    Raise UsageError if a requested sweep is not possible.
    """
    for setting in requested:
        reason = not_swept_reason(plan, setting)
        if reason is not None:
            others = [f"--sweep {other}" for other in SWEEPS if not_swept_reason(plan, other) is None]
            raise UsageError(
                f"{setting} cannot be swept here", got=reason, try_=" or ".join(others) or "--against naive"
            )
    return [
        setting
        for setting in SWEEPS
        if (setting in requested if requested else not_swept_reason(plan, setting) is None)
    ]


def plain_loop(rule_plan: Plan, own: Settings) -> Variant:
    """Return the settings of a plain training loop: fp32, the whole batch at once, no workers, PyTorch's defaults."""
    plan = plan_with(rule_plan, own)
    threads = plan.machine.torch.num_threads
    settings: dict[str, Scalar] = {
        "device": plan.device,
        "precision": "fp32",
        "micro_batch": plan.workload.global_batch_size,
        "activation_checkpointing": "off",
        "lengths": "fixed",
        "optimizer_kernels": "foreach" if device_kind(plan) == "cuda" else "loop",
        "workers": 0,
        "compile": "off",
        "data_location": "files" if plan.data_location == "files" else "host",
        **({"threads": threads} if threads else {}),
    }
    # A user's own optimizer is the same in any loop, so its kernels are not part of the comparison.
    if plan.optimizer_kernels == "yours":
        del settings["optimizer_kernels"]
    return Variant(value="plain loop", settings=settings)


def _candidate_values(setting: str, plan: Plan) -> Iterable[Scalar]:
    return (candidate.value for candidate in candidates(plan, setting))


def _micro_batches(plan: Plan) -> Iterable[Scalar]:
    """Return the global batch size, half of it, a quarter of it and so on, rounded to even splits.

    The sizes closest to the plan's micro-batch come first.
    """
    whole, largest = plan.workload.global_batch_size, plan.workload.global_batch_size
    if has_row_limit(plan.machine, device_kind(plan)):
        largest = min(whole, max(1, ROW_LIMIT // plan.workload.max_length))
    sizes = list(dict.fromkeys(-(-whole // -(-whole // (largest >> shift))) for shift in range(largest.bit_length())))
    now = plan.micro_batch
    nearest = sorted(sizes, key=lambda size: max(size, now) / min(size, now))
    return nearest[:_MAX_VALUES]


def _thread_counts(plan: Plan) -> Iterable[Scalar]:
    cpu = plan.machine.cpu
    logical = cpu.logical_cores or 1
    powers = [1 << shift for shift in range(logical.bit_length()) if 1 << shift <= logical]
    known = [count for count in (cpu.fast_cores, cpu.physical_cores, logical) if count]
    return sorted({*powers[-_MAX_VALUES + 2 :], *known, 1})


_VALUES: Mapping[str, Callable[[Plan], Iterable[Scalar]]] = {
    "device": lambda plan: _candidate_values("device", plan),
    "micro_batch": _micro_batches,
    "threads": _thread_counts,
    "workers": lambda plan: _candidate_values("workers", plan),
    "precision": lambda plan: _candidate_values("precision", plan),
}
