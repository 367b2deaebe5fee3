"""When will a run be finished, as far as measured steps tell?"""

from whet.base.units import show_bytes, show_seconds
from whet.measure.found import Found
from whet.measure.objective import finish_seconds
from whet.plan.plan import Plan


def finish_line(plan: Plan, found: Found) -> str:
    """One line: how long all steps take under the plan, its speed, its memory."""
    step, steps = found.step_seconds, plan.workload.num_steps
    if step is None or step <= 0:
        return "no estimate of the time: no step could be measured"
    rate = plan.workload.global_batch_size / step
    speed = f"{rate:,.0f} samples/s" if round(rate) >= 1000 else f"{rate:.3g} samples/s"
    if not any(trial.repeats for trial in found.trials):
        speed += ", by the last of its first steps alone: a rough guess, not a measurement"
    peak = max((trial.peak_bytes or 0 for trial in found.trials if trial.settings == found.settings), default=0)
    memory = f", {show_bytes(peak)}" if peak else ""
    if steps is None:
        return f"{speed}{memory}; how many steps this run has is unknown"
    total = finish_seconds(preparation=found.preparation_seconds or 0.0, step=step, num_steps=steps)
    return f"{steps:,} steps take about {show_seconds(total)} at {speed}{memory}, without evaluations and saving"
