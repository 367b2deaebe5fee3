"""Render plans as text: the table of settings, and the explanation of one setting."""

import textwrap
from collections.abc import Iterator, Sequence

from whet.base.errors import UsageError, closest_match, nearest_names
from whet.base.units import format_bytes, format_count, format_plural, format_speed
from whet.machine.render import machine_line
from whet.plan.memory import predict_memory_parts
from whet.plan.plan import Plan
from whet.plan.rules import ALL_RULES
from whet.plan.setting import Setting
from whet.plan.values import DECLARED
from whet.plan.workload import Workload

SettingRow = tuple[str, str, str, str]
"""One line of the settings table: name, value, reason, source."""

_MIN_REASON_WIDTH = 24
# Wrapping a reason of several megabytes, as a corrupt plan may contain, would take a minute.
_MAX_REASON = 4_100


def plan_lines(plan: Plan, *, width: int) -> Iterator[str]:
    """Yield the lines of a whole plan: machine, workload, settings and warnings."""
    yield f"machine   {machine_line(plan.machine)}"
    yield f"workload  {workload_line(plan.workload)}"
    yield from (f"          {line}" for line in (plan.workload.batch.lines if plan.workload.batch else ()))
    yield ""
    yield from settings_table(settings_rows(plan), width=width)
    if plan.warnings:
        yield ""
        yield from (f"note: {line}" for line in plan.warnings)


def workload_line(workload: Workload) -> str:
    """Return a one-line description of a workload."""
    batch = f"global batch {workload.global_batch_size}" + (" (measured)" if workload.batch else "")
    trained = f"{format_count(workload.num_parameters)} parameters"
    frozen = f" ({format_count(workload.num_frozen)} more are frozen)" if workload.num_frozen else ""
    parts = [trained + frozen, batch]
    if workload.lengths_vary:
        mean = f"mean length {workload.mean_length:.0f} of" if workload.mean_length else "lengths up to"
        parts.append(f"{mean} {workload.max_length}")
    parts.append(
        format_plural(workload.num_steps, "step") if workload.num_steps else "steps unknown until the data is read"
    )
    return f"{workload.recipe}: " + ", ".join(parts)


def settings_rows(plan: Plan) -> list[SettingRow]:
    """Return one row per setting. Settings that do not apply to the device are omitted."""
    return [
        (name, format_value(setting.value), setting.reason, _source_text(setting))
        for name, setting in plan.settings.items()
        # Always show an override, even if it has no effect on this device.
        if setting.value not in (None, "unused") or setting.source == "you" or "no_effect" in setting.evidence
    ]


def settings_table(rows: Sequence[SettingRow], *, width: int) -> list[str]:
    """Format the rows as a table with wrapped reasons, or stack the columns if `width` is too narrow for a table."""
    if not rows:
        return []
    table = [("setting", "value", "why", "from"), *rows]
    name, value, source = (max(len(row[column]) for row in table) for column in (0, 1, 3))
    why = width - name - value - source - 6
    if why < _MIN_REASON_WIDTH:
        return [line for row in rows for line in _stacked_row(row, width=width)]
    # Make this column no wider than the longest reason, so that the last column is close to it.
    why = min(why, max(len(row[2]) for row in table))
    lines: list[str] = []
    for row in table:
        parts = textwrap.wrap(row[2][:_MAX_REASON], why) or [""]
        lines.append(f"{row[0]:<{name}}  {row[1]:<{value}}  {parts[0]:<{why}}  {row[3]}".rstrip())
        lines += [" " * (name + value + 4) + part for part in parts[1:]]
    return lines


def format_value(value: object) -> str:
    """Format the value of a setting. None becomes "none"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _stacked_row(row: SettingRow, *, width: int) -> Iterator[str]:
    name, value, why, source = row
    yield from textwrap.wrap(f"{name}: {value} ({source})", width, subsequent_indent="  ")
    yield from textwrap.wrap(why[:_MAX_REASON], width, initial_indent="  ", subsequent_indent="  ")


def _source_text(setting: Setting) -> str:
    return f"rule {setting.evidence['rule']}" if setting.source == "rule" else setting.source


def explain_setting(plan: Plan, name: str, *, width: int = 120) -> str:
    """Explain one setting of a plan with its value, its evidence and the documentation of its rule."""
    if name == "global_batch_size":
        return _explain_auto_batch(plan)
    rule = next((rule for rule in ALL_RULES if rule.setting == name), None)
    if rule is None or name not in plan.settings:
        meant = closest_match(name, plan.settings)
        near = ", ".join(nearest_names(name, plan.settings))
        hint = f"did you mean {meant!r}?" if meant else f"the nearest settings are {near}; whet plan shows all"
        raise UsageError("a plan has no such setting", got=name, try_=hint)
    setting = plan.settings[name]
    evidence = [f"  {key} = {_format_evidence(value)}" for key, value in setting.evidence.items() if key != "rule"]
    return "\n".join(
        [
            f"{name} = {_format_evidence(setting.value)}   (from: {setting.source})",
            f"  {setting.reason}",
            "",
            "evidence",
            *(evidence or ["  none"]),
            "",
            *(_memory_lines(plan) if DECLARED[name].is_memory else ()),
            *_wrapped(f"rule {rule.id}: {rule.what}", width),
            *(line for section, text in rule.sections.items() for line in _wrapped(f"{section}: {text}", width)),
        ]
    )


def _wrapped(text: str, width: int) -> list[str]:
    # Paths and links stay on one line, so that they can be copied.
    return textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _memory_lines(plan: Plan) -> list[str]:
    """Return the predicted memory of a step as lines, one for each part."""
    workload, micro = plan.workload, plan.micro_batch
    parts = predict_memory_parts(
        workload,
        micro_batch=micro,
        device=plan.device,
        precision=plan.precision,
        is_checkpointed=plan.activation_checkpointing == "on",
    )
    if parts is None:
        return ["memory of a step: activations are measured before the first step", ""]
    trained, frozen = workload.num_parameters, workload.num_frozen
    description = {
        "weights": f"{trained + frozen:,} numbers of 4 bytes",
        "gradients": "one for each weight" if not frozen else f"only for the {trained:,} trainable weights",
        "optimizer": f"{format_plural(workload.optimizer_bytes, 'byte')} for each trainable weight",
        "activations": f"kept for the backward pass of {micro} samples of the maximum length, about",
        "device": "kernels and workspaces before the first tensor, about",
    }
    rows = [f"  {name:<12} {format_bytes(size):>8}  {description[name]}" for name, size in parts.items() if size]
    total = f"  {'total':<12} {format_bytes(sum(parts.values())):>8}"
    measured = "  actual memory of a run: whet report RUN; on this machine: whet plan RECIPE --measure"
    return [f"memory of a step with micro batch {micro}, predicted", *rows, total, measured, ""]


def _explain_auto_batch(plan: Plan) -> str:
    chosen = plan.workload.batch
    if chosen is None:
        return f"global_batch_size = {plan.workload.global_batch_size}   (from: you)\n  a plan never changes it"
    rows = [
        f"  {point.batch:>7,}: {format_speed(point.samples_per_second)} in {point.steps} steps"
        if point.samples_per_second
        else f"  {point.batch:>7,}: {point.note}"
        for point in chosen.points
    ]
    return "\n".join(
        [
            f"global_batch_size = {chosen.batch}   (from: measured, for global_batch_size=auto)",
            *(f"  {line}" for line in chosen.lines),
            "",
            "evidence",
            *rows,
        ]
    )


def _format_evidence(value: object) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
