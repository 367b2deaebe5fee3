"""A plan as lines for a screen."""

from whet.base.units import show_count
from whet.plan.plan import Plan
from whet.plan.setting import Setting
from whet.plan.workload import Workload


def workload_line(workload: Workload) -> str:
    """What is trained, in one line."""
    parts = [f"{show_count(workload.num_parameters)} parameters", f"global batch {workload.global_batch_size}"]
    if workload.lengths_vary:
        mean = f"mean length {workload.mean_length:.0f} of" if workload.mean_length else "lengths up to"
        parts.append(f"{mean} {workload.max_length}")
    parts.append(f"{workload.num_steps:,} steps" if workload.num_steps else "steps unknown until the data is read")
    return f"{workload.recipe}: " + ", ".join(parts)


def settings_rows(plan: Plan) -> list[tuple[str, str, str, str]]:
    """One row for each setting: name, value, why, from; what has no meaning on the device is left out."""
    return [
        (name, show_value(setting.value), setting.reason, _source(setting))
        for name, setting in plan.settings.items()
        if setting.value not in (None, "unused") or setting.source == "you"
    ]


def show_value(value: object) -> str:
    """A setting's value as text; null is "none"."""
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _source(setting: Setting) -> str:
    return f"rule {setting.evidence['rule']}" if setting.source == "rule" else setting.source
