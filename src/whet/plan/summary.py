"""The first lines of a training run: machine, workload, plan and time. `whet plan RUN` prints all settings."""

import textwrap
from collections.abc import Iterator

from whet.base.units import GB, format_bytes, format_seconds, format_speed
from whet.machine.render import machine_line
from whet.plan.estimate import estimate_speed, measured_step_seconds
from whet.plan.plan import Plan
from whet.plan.render import format_value, settings_rows, workload_line
from whet.plan.setting import Setting
from whet.plan.values import ANY_TEXT, DECLARED

_LABEL_WIDTH = 10
# Show at most this many warnings. `whet plan RUN` prints all of them.
_MAX_NOTES = 2


def summary_lines(
    plan: Plan,
    *,
    width: int,
    name: str | None = None,
    run: str | None = None,
    num_done: int = 0,
    estimate: str | None = None,
) -> list[str]:
    """Return the machine, workload, plan, time and warnings as wrapped lines.

    `name` replaces the name of the recipe. `run` is the run folder, quoted for a command. The time excludes `num_done`
    steps. `estimate` is the text for the time if steps were timed, but no settings were compared.
    """
    shown = plan.workload if name is None else plan.workload.model_copy(update={"recipe": name})
    notes = f" and {len(plan.warnings)} notes" if len(plan.warnings) > _MAX_NOTES else ""
    more = f" (all {len(settings_rows(plan))}{notes}: whet plan {run})" if run else ""
    facts = [
        ("machine", machine_line(plan.machine)),
        ("workload", workload_line(shown)),
        ("plan", ", ".join(notable_settings(plan)) + more),
        ("time", _time(plan, num_done, estimate)),
    ]
    lines = [line for label, text in facts for line in labelled(label, text, width=width)]
    return lines + [shorten(f"{'note':<{_LABEL_WIDTH}}{text}", width) for text in plan.warnings[:_MAX_NOTES]]


def shorten(line: str, width: int) -> str:
    """Truncate a line that is longer than `width`.

    >>> shorten("a line of text", 10)
    'a line ...'
    """
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."


def labelled(label: str, text: str, *, width: int) -> list[str]:
    """Return a label and its text as lines, with the text wrapped in a column after the label."""
    return textwrap.wrap(
        text,
        max(width, 2 * _LABEL_WIDTH),
        initial_indent=f"{label:<{_LABEL_WIDTH}}",
        subsequent_indent=" " * _LABEL_WIDTH,
        break_on_hyphens=False,
        break_long_words=False,
    )


def notable_settings(plan: Plan) -> Iterator[str]:
    """Yield device and precision, then the settings that differ from a plain PyTorch loop or that the user has set."""
    yield plan.device
    yield plan.precision
    # If the memory of a sample is unknown, the first step decides the micro-batch.
    if plan.accumulation > 1 and plan.workload.activation_bytes is not None:
        yield f"micro-batch {plan.micro_batch} (x{plan.accumulation})"
    num_threads = plan.machine.torch.num_threads
    if plan.threads is not None and plan.threads != num_threads:
        yield f"{plan.threads} thread{'s' if plan.threads > 1 else ''}"
    for name, declared in DECLARED.items():
        setting = plan.settings.get(name)
        is_shown_above = name in ("device", "precision", "threads", "micro_batch")
        if setting is None or is_shown_above or setting.value in (None, "unused", "yours"):
            continue
        if declared.has_plain_value:
            if setting.value != declared.plain:
                yield _text(name, setting)
        elif setting.source in ("you", "environment"):
            yield _text(name, setting)


def _text(name: str, setting: Setting) -> str:
    text, value = DECLARED[name].text, format_value(setting.value)
    if not isinstance(text, str):
        text = text.get(str(setting.value), ANY_TEXT)
    return text.format(name=name, value=value, s="" if setting.value == 1 else "s")


def _time(plan: Plan, num_done: int, estimate: str | None) -> str:
    num_steps = plan.workload.num_steps
    if num_steps is None:
        return "unknown, because the data has no length"
    left = max(0, num_steps - num_done)
    step = measured_step_seconds(plan.trials)
    if step:
        speed = format_speed(plan.workload.global_batch_size / step)
        return f"about {format_seconds(left * step)} at {speed}, as measured{_memory(plan)}"
    if estimate is not None:
        return estimate
    published = estimate_speed(plan)
    if published is None:
        return "unknown, because no step was measured"
    fast, slow = (format_seconds(left * seconds) for seconds in published.step_seconds)
    return f"{fast} to {slow}, estimated from {published.source}"


def _memory(plan: Plan) -> str:
    peaks = [trial.peak_bytes for trial in plan.trials if trial.setting == "plan" and trial.peak_bytes]
    if not peaks or plan.memory_gb is None or plan.device == "cpu":
        return ""
    return f", {format_bytes(peaks[-1])} of {format_bytes(plan.memory_gb * GB)}"
