"""Settings that the environment fixes before the plan is made, and overrides that have no effect on a device.

Priority: default < rule < measured < environment < the user's override. An override is rejected if it contradicts a
variable that torch has already read, because the setting can no longer be changed.
"""

from dataclasses import dataclass

from whet.machine.environment import DISABLE_COMPILE, MPS_FALLBACK, MPS_HIGH_WATERMARK, MPS_LOW_WATERMARK
from whet.plan.rule import RuleContext
from whet.plan.setting import Scalar

WHET_WATERMARKS = (1.0, 0.9)
"""The high and low MPS watermarks that whet sets, unless the user has set one of them."""
TORCH_WATERMARKS = (1.7, 1.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedValue:
    """A value that the environment gives to a setting before the plan is made."""

    value: Scalar
    origin: str
    """The source of the value, such as "OMP_NUM_THREADS=4"."""
    is_final: bool = False
    """Whether the value can no longer be changed in this process, so that a conflicting override is rejected.

    Only for settings that are declared so in plan/values.py.
    """


def forced_value(setting: str, context: RuleContext) -> ForcedValue | None:
    """Return the value that the environment gives to a setting, or None if there is none."""
    facts, device = context.system_state.environment, context.settings and context.device_type
    if setting == "mps_fallback" and device == "mps" and facts.mps_fallback is not None:
        # torch reads the variable when it is imported.
        value, text = ("on", "1") if facts.mps_fallback else ("off", "0")
        return ForcedValue(value=value, origin=f"{MPS_FALLBACK}={text}", is_final=True)
    if setting in ("high_watermark", "low_watermark") and device == "mps":
        return _watermark(setting, context)
    if setting == "threads" and facts.threads is not None:
        # torchrun sets OMP_NUM_THREADS to 1 if it is unset, so with several processes 1 is not the user's choice.
        is_torchrun = facts.threads == 1 and context.workload.local_size > 1
        origin = f"{facts.threads_variable}={facts.threads}"
        return None if is_torchrun else ForcedValue(value=facts.threads, origin=origin)
    if setting == "deterministic" and facts.is_deterministic:
        return ForcedValue(value="on", origin="torch.use_deterministic_algorithms(True)")
    if setting == "compile" and facts.compile_disabled_by is not None:
        # With torch's variables, torch.compile returns the function unchanged.
        is_final = facts.compile_disabled_by != DISABLE_COMPILE
        return ForcedValue(value="off", origin=f"{facts.compile_disabled_by}=1", is_final=is_final)
    if setting == "freed_memory" and facts.malloc_variable is not None and device == "cpu":
        # Calling mallopt would replace the user's own tuning.
        return ForcedValue(value="returned", origin=facts.malloc_variable, is_final=True)
    return None


def no_effect_reason(setting: str, value: Scalar, context: RuleContext) -> str | None:
    """Return why an override has no effect on this device, or None if it has one.

    Such an override is not an error, because the same command or config may be used on several machines, and a run may
    move from one to another.
    """
    device, system = context.settings and context.device_type, context.machine.os.name
    is_single = context.workload.world_size == 1
    match setting, value:
        case "mps_fallback", "on" if device != "mps":
            return "only MPS has it"
        case (("high_watermark" | "low_watermark"), _) if device != "mps":
            return "only MPS has it"
        case "keep_awake", "on" if system != "macOS":
            return "only macOS has caffeinate"
        case "precision", "tf32" if device != "cuda":
            return f"tf32 exists on CUDA only; {device} computes in fp32"
        case "copies", "overlapped" if device != "cuda":
            return "only CUDA has asynchronous copies that are safe"
        case "freed_memory", "kept" if device != "cpu" or system == "macOS":
            return "only glibc on a CPU can be configured"
        case "sharding", "full" if is_single:
            return "there is one process"
        case "bucket_mb", _ if is_single:
            return "there is one process"
    return None


def _watermark(setting: str, context: RuleContext) -> ForcedValue | None:
    facts = context.system_state.environment
    given = facts.mps_high_watermark, facts.mps_low_watermark
    # whet sets its own pair in the environment before torch reads it, so this pair is not the user's choice.
    if given in ((None, None), WHET_WATERMARKS):
        return None
    index = 0 if setting == "high_watermark" else 1
    variable = (MPS_HIGH_WATERMARK, MPS_LOW_WATERMARK)[index]
    value = given[index]
    if value is not None:
        return ForcedValue(value=value, origin=f"{variable}={value:g}", is_final=True)
    default = TORCH_WATERMARKS[index]
    return ForcedValue(value=default, origin=f"torch's default without {variable}", is_final=True)
