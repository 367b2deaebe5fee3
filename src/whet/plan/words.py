"""A plan as lines for a screen."""

import textwrap
from collections.abc import Iterator, Sequence

from whet.base.units import show_count
from whet.machine.words import one_line
from whet.plan.plan import Plan
from whet.plan.setting import Setting
from whet.plan.workload import Workload

Row = tuple[str, str, str, str]
"""A setting for a screen: name, value, why, from."""

_LEAST_WHY = 24
_LONGEST_WHY = 4_100
"""A damaged plan may give a reason of megabytes, which would take a minute to wrap."""


def workload_line(workload: Workload) -> str:
    """What is trained, in one line."""
    batch = f"global batch {workload.global_batch_size}" + (" (measured)" if workload.batch else "")
    trained = f"{show_count(workload.num_parameters)} parameters"
    frozen = f" ({show_count(workload.num_frozen)} more stay as they are)" if workload.num_frozen else ""
    parts = [trained + frozen, batch]
    if workload.lengths_vary:
        mean = f"mean length {workload.mean_length:.0f} of" if workload.mean_length else "lengths up to"
        parts.append(f"{mean} {workload.max_length}")
    parts.append(f"{workload.num_steps:,} steps" if workload.num_steps else "steps unknown until the data is read")
    return f"{workload.recipe}: " + ", ".join(parts)


def settings_rows(plan: Plan) -> list[Row]:
    """One row for each setting: name, value, why, from; what has no meaning on the device is left out."""
    return [
        (name, show_value(setting.value), setting.reason, _source(setting))
        for name, setting in plan.settings.items()
        if setting.value not in (None, "unused") or setting.source == "you"
    ]


def settings_table(rows: Sequence[Row], *, width: int) -> list[str]:
    """The rows below a header, reasons wrapped to the width; stacked where a table would be too narrow to read."""
    if not rows:
        return []
    table = [("setting", "value", "why", "from"), *rows]
    name, value, source = (max(len(row[column]) for row in table) for column in (0, 1, 3))
    why = width - name - value - source - 6
    if why < _LEAST_WHY:
        return [line for row in rows for line in _stacked(row, width=width)]
    why = min(why, max(len(row[2]) for row in table))
    lines: list[str] = []
    for row in table:
        parts = textwrap.wrap(row[2][:_LONGEST_WHY], why) or [""]
        lines.append(f"{row[0]:<{name}}  {row[1]:<{value}}  {parts[0]:<{why}}  {row[3]}".rstrip())
        lines += [" " * (name + value + 4) + part for part in parts[1:]]
    return lines


def show_value(value: object) -> str:
    """A setting's value as text; null is "none"."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _stacked(row: Row, *, width: int) -> Iterator[str]:
    name, value, why, source = row
    yield from textwrap.wrap(f"{name}: {value} ({source})", width, subsequent_indent="  ")
    yield from textwrap.wrap(why[:_LONGEST_WHY], width, initial_indent="  ", subsequent_indent="  ")


def _source(setting: Setting) -> str:
    return f"rule {setting.evidence['rule']}" if setting.source == "rule" else setting.source


def plan_lines(plan: Plan, *, width: int) -> Iterator[str]:
    """The whole plan: for which machine, for what, the settings, and what to beware of."""
    yield f"machine   {one_line(plan.machine)}"
    yield f"workload  {workload_line(plan.workload)}"
    yield from (f"          {line}" for line in (plan.workload.batch.lines if plan.workload.batch else ()))
    yield ""
    yield from settings_table(settings_rows(plan), width=width)
    if plan.cautions:
        yield ""
        yield from (f"note: {line}" for line in plan.cautions)
