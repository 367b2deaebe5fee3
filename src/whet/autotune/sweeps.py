"""The values of each benchmark sweep, and the plain PyTorch loop as a baseline."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from whet.autotune.candidates import PlanCandidate, apply_candidate, candidates, device_kind, plan_with
from whet.autotune.step_bench import Settings
from whet.base.errors import UsageError
from whet.plan.plan import Plan
from whet.plan.setting import Scalar
from whet.plan.warnings import ROW_LIMIT, has_row_limit

SWEEPS = ("device", "micro_batch", "threads", "workers", "precision")
"""In the order of measuring: what may be very slow, and end its process, comes last."""
_MOST_VALUES = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to make the same steps."""

    value: Scalar
    settings: Settings
    """What differs from the rule-based plan."""
    is_plan: bool = False


def sweep_variants(rule_plan: Plan, own: Settings, setting: str) -> list[Variant]:
    """The plan's own value and the others, in a natural order."""
    plan = plan_with(rule_plan, own)
    now = plan.settings[setting].value
    values = [now, *(value for value in _VALUES[setting](plan) if value != now)]
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


def why_not_swept(plan: Plan, setting: str) -> str | None:
    """Why there is nothing to vary, in words; None where there is."""
    if setting in plan.overrides:
        return f"you said {setting}={plan.overrides[setting]}"
    match setting:
        case "device" if not plan.machine.accelerators:
            return "the CPU is the only device here"
        case "micro_batch" if plan.workload.has_batchnorm:
            return "BatchNorm would compute something else"
        case "micro_batch" if plan.workload.global_batch_size == 1:
            return "a global batch of 1 cannot be cut"
        case "threads" if device_kind(plan) != "cpu":
            return f"steps on {device_kind(plan)} do not depend on it"
        case "threads" if (plan.machine.cpu.logical_cores or 1) < 2:
            return "there is one core"
        case "workers" if plan.data_location != "files":
            return "the data lies in memory, so nothing has to be decoded"
    return None


def select_sweeps(plan: Plan, asked: Sequence[str]) -> list[str]:
    """What is varied: what was asked for, else everything there is something to vary of."""
    for setting in asked:
        reason = why_not_swept(plan, setting)
        if reason is not None:
            raise UsageError(f"{setting} cannot be swept here", got=reason, try_=_other_sweeps(plan))
    return [setting for setting in SWEEPS if (setting in asked if asked else why_not_swept(plan, setting) is None)]


def plain_loop(rule_plan: Plan, own: Settings) -> Variant:
    """A loop as everybody writes it first: fp32, the batch as given, no workers, everything as torch has it."""
    plan = plan_with(rule_plan, own)
    threads = plan.machine.torch.num_threads
    wanted = {
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
    # Your own optimizer is the same in any loop.
    if plan.optimizer_kernels == "your optimizer":
        del wanted["optimizer_kernels"]
    return Variant(value="plain loop", settings=wanted)


def _other_sweeps(plan: Plan) -> str:
    others = [setting for setting in SWEEPS if why_not_swept(plan, setting) is None]
    return " or ".join(f"--sweep {setting}" for setting in others) or "--against naive"


def _found(setting: str, plan: Plan) -> Iterable[Scalar]:
    return (candidate.value for candidate in candidates(plan, setting))


def _micro_batches(plan: Plan) -> Iterable[Scalar]:
    """The whole global batch, its half, its quarter and so on, as even as it gets."""
    whole, most = plan.workload.global_batch_size, plan.workload.global_batch_size
    if has_row_limit(plan.machine, device_kind(plan)):
        most = min(whole, max(1, ROW_LIMIT // plan.workload.max_length))
    cuts = list(dict.fromkeys(-(-whole // -(-whole // (most >> shift))) for shift in range(most.bit_length())))
    now = plan.micro_batch
    assert isinstance(now, int)
    nearest = sorted(cuts, key=lambda cut: max(cut, now) / min(cut, now))
    return nearest[:_MOST_VALUES]


def _threads(plan: Plan) -> Iterable[Scalar]:
    cpu = plan.machine.cpu
    logical = cpu.logical_cores or 1
    doubling = [1 << shift for shift in range(logical.bit_length()) if 1 << shift <= logical]
    known = [count for count in (cpu.fast_cores, cpu.physical_cores, logical) if count]
    return sorted({*doubling[-_MOST_VALUES + 2 :], *known, 1})


_VALUES: Mapping[str, Callable[[Plan], Iterable[Scalar]]] = {
    "device": lambda plan: _found("device", plan),
    "micro_batch": _micro_batches,
    "threads": _threads,
    "workers": lambda plan: _found("workers", plan),
    "precision": lambda plan: _found("precision", plan),
}
