"""Benchmark results as text and a chart."""

import re
from collections.abc import Iterator

from whet.base.units import format_bytes, format_seconds
from whet.machine.facts import Machine
from whet.machine.render import machine_line
from whet.plan.render import format_value, workload_line
from whet.report.svg import ChartPanel, ChartPoint, draw_chart
from whet.report.table import align_columns
from whet.run.bench_result import BenchInterval, BenchResult, BenchRow, BenchSweep

# The header of a table and its rows.
TableCells = list[tuple[str, ...]]

_SWEEP_HEADER = ("samples/s", "it/s", "vs. plan", "memory", "slow steps", "note")
_PLAN_PARTS = (
    "device",
    "precision",
    "micro_batch",
    "lengths",
    "optimizer_kernels",
    "threads",
    "data_location",
    "compile",
)


def render_bench(result: BenchResult) -> str:
    """Return the results of `whet bench` as plain text."""
    lines = [*_bench_head(result), f"plan      {_plan_line(result)}"]
    for sweep in result.sweeps:
        lines += [
            "",
            _sweep_title(result, sweep),
            *align_columns(sweep_table(sweep, result.workload.global_batch_size)),
        ]
        lines += [f"note: {sweep.note}"] if sweep.note else []
    return "\n".join([*lines, "", *_method_notes(result)])


def bench_title(result: BenchResult) -> str:
    simulated = " (SIMULATED)" if result.is_simulated else ""
    return f"Benchmark of {result.workload.recipe}{simulated}"


def bench_machine_name(result: BenchResult) -> str:
    """Return a short name for the machine."""
    return f"{result.machine.name} (simulated)" if result.is_simulated else _short_name(result.machine)


def bench_file_stem(result: BenchResult) -> str:
    """Return a portable file name without extension: [workload]_[machine]_[date]."""
    name = f"{result.machine.name}-simulated" if result.is_simulated else _short_name(result.machine)
    parts = (result.workload.recipe, name, result.created)
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-.") or "unnamed" for word in parts)


def _short_name(machine: Machine) -> str:
    """Return a short name for a probed machine, derived from its accelerator, chip or cores."""
    memory_gb = f"-{machine.memory_bytes / 1024**3:.0f}gb" if machine.memory_bytes else ""
    for accelerator in machine.accelerators:
        if accelerator.kind == "cuda" and accelerator.name:
            return accelerator.name
        if accelerator.kind == "mps" and machine.chip:
            return f"{machine.chip}{memory_gb}"
    system = {"Linux": "linux", "macOS": "mac"}.get((machine.os.name or "").partition(" ")[0], "machine")
    cores = machine.cpu.logical_cores or machine.cpu.physical_cores
    return f"{system}-{cores}core" if cores else system


def no_result_reason(row: BenchRow) -> str:
    """Return the reason why a row has no measurements."""
    return f"{row.outcome}: {row.note}" if row.note else row.outcome


def sweep_table(sweep: BenchSweep, global_batch_size: int) -> TableCells:
    """Return a table with one row per value, or one column per loop if the plan is compared with a plain loop."""
    if sweep.setting == "against":
        return _plan_vs_plain_table(sweep, global_batch_size)
    if sweep.setting != "global_batch_size":
        return [(sweep.setting, *_SWEEP_HEADER), *(_sweep_line(row, global_batch_size) for row in sweep.rows)]
    # Batch sizes are not timed in pairs, so ratios and slow steps are unknown.
    lines = [(sweep.setting, *_SWEEP_HEADER), *(_sweep_line(row, int(row.value or 1)) for row in sweep.rows)]
    shown = [index for index, name in enumerate(lines[0]) if name not in ("vs. plan", "slow steps")]
    return [tuple(line[index] for index in shown) for line in lines]


def format_rate(rate: BenchInterval | None) -> str:
    """Format samples per second with their interval, or return an empty text for None."""
    if rate is None:
        return ""
    return f"{_format_number(rate.median)} ({_format_number(rate.low)} to {_format_number(rate.high)})"


def _sweep_line(row: BenchRow, global_batch_size: int) -> tuple[str, ...]:
    value = format_value(row.value) + (" *" if row.is_plan else "")
    if row.samples_per_second is None:
        needed = f"{format_bytes(row.needed_bytes)} needed" if row.needed_bytes else format_memory(row)
        return (value, "", "", "", needed, "", no_result_reason(row))
    against = "1 (the plan)" if row.is_plan else _format_speedup(row.speedup)
    outcome = "" if row.outcome == "measured" else f"{row.outcome}: "
    return (
        value,
        format_rate(row.samples_per_second),
        _format_number(row.samples_per_second.median / global_batch_size),
        against,
        format_memory(row),
        _format_slow_steps(row),
        f"{outcome}{row.note}",
    )


def _plan_vs_plain_table(sweep: BenchSweep, global_batch_size: int) -> TableCells:
    """Return a table with speed, memory and stability of a plain loop and of the plan, side by side."""
    plain = next(row for row in sweep.rows if not row.is_plan)
    plan = next(row for row in sweep.rows if row.is_plan)
    speedup = plain.speedup
    change = ""
    if speedup is not None:
        change = f"{1 / speedup.median:.2f}x ({1 / speedup.high:.2f} to {1 / speedup.low:.2f})"
    less = ""
    if plain.peak_bytes and plan.peak_bytes:
        less = f"{100 * (plan.peak_bytes / plain.peak_bytes - 1):+.0f} %"
    both = (plain, plan)
    rates = [row.samples_per_second for row in both]
    return [
        ("figure", "plain loop", "plan", "plan vs. plain"),
        ("speed, samples/s", *(format_rate(row.samples_per_second) or no_result_reason(row) for row in both), change),
        ("it/s", *(_format_number(rate.median / global_batch_size) if rate else "" for rate in rates), ""),
        ("one step", *(format_seconds(row.step_seconds.median) if row.step_seconds else "" for row in both), ""),
        ("memory of a step", *(format_memory(row) for row in both), less),
        ("slow steps (95th percentile / median)", *(_format_slow_steps(row) for row in both), ""),
        ("step time, second half / first half", *(f"{row.drift:.2f}x" if row.drift else "" for row in both), ""),
        *(
            (name.replace("_", " "), *(format_value(row.execution.get(name)) for row in both), "")
            for name in plan.execution
            if plain.execution.get(name) != plan.execution.get(name)
        ),
    ]


def _sweep_title(result: BenchResult, sweep: BenchSweep) -> str:
    if sweep.setting == "against":
        return "the plan against a plain loop, measured in alternation"
    has_limit = result.limit_bytes and sweep.setting in ("micro_batch", "global_batch_size")
    limit = f"; limit {format_bytes(result.limit_bytes or 0)}" if has_limit else ""
    return f"{sweep.setting} (* is the plan{limit})"


def _bench_head(result: BenchResult) -> Iterator[str]:
    simulated = "SIMULATED, not measured on a real machine: " if result.is_simulated else ""
    yield f"machine   {simulated}{machine_line(result.machine)}"
    yield f"workload  {workload_line(result.workload)}"


def _plan_line(result: BenchResult) -> str:
    shown = [
        f"{name.replace('_', ' ')} {format_value(result.plan[name])}" for name in _PLAN_PARTS if name in result.plan
    ]
    return f"{', '.join(shown)} (by {'rules' if result.plan_source == 'rules' else 'measurement'})"


def _method_notes(result: BenchResult) -> Iterator[str]:
    yield f"{format_seconds(result.spent_seconds)} in all, of {format_seconds(result.budget_seconds)} allowed"
    yield from result.disturbances
    is_paired = any(sweep.setting != "global_batch_size" for sweep in result.sweeps)
    if is_paired:
        yield "vs. plan: pairs of steps on the same batches, so that a disturbance slows down both"
        yield "samples/s: the median of the plan; for other values that times the ratio of their pairs"
    yield "it/s: optimizer steps per second, each of the whole global batch"
    if is_paired:
        yield "slow steps: the 95th percentile of the step time over its median, longer batches included"
    if result.plan.get("device") == "cpu":
        yield "memory on the CPU is the growth of the process, including libraries that are loaded meanwhile"


def format_memory(row: BenchRow) -> str:
    """Format the peak memory of a step, or return an empty text if it is unknown."""
    return format_bytes(row.peak_bytes) if row.peak_bytes else ""


def _format_slow_steps(row: BenchRow) -> str:
    return f"{row.slow_steps:.2f}x" if row.slow_steps else ""


def _format_speedup(speedup: BenchInterval | None) -> str:
    return "" if speedup is None else f"{speedup.median:.2f}x ({speedup.low:.2f} to {speedup.high:.2f})"


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_CHART_ORDER = ("micro_batch", "device", "precision", "threads", "workers", "against")


def bench_chart(result: BenchResult) -> str | None:
    """Return an SVG of the sweep of global batch sizes, and of the first other sweep in _CHART_ORDER.

    Return None if no sweep has several rows.
    """
    drawable = {sweep.setting: sweep for sweep in result.sweeps if len(sweep.rows) > 1}
    first = next((drawable[name] for name in _CHART_ORDER if name in drawable), None)
    sweeps = [sweep for sweep in (drawable.get("global_batch_size"), first) if sweep is not None]
    if not sweeps:
        return None
    panels = [panel for sweep in sweeps for panel in _sweep_panels(result, sweep)]
    plans = [(sweep, row) for sweep in sweeps for row in sweep.rows if row.is_plan]
    chosen = [f"ring: the plan ({', '.join(_row_name(sweep, row) for sweep, row in plans)})"] if plans else []
    notes = dict.fromkeys(note for sweep in sweeps for note in (_error_bar_note(sweep), *_marker_note(sweep)))
    return draw_chart(
        bench_title(result),
        panels,
        subtitle=f"{bench_machine_name(result)}, {result.created}",
        footer=[*chosen, *notes],
    )


def _sweep_panels(result: BenchResult, sweep: BenchSweep) -> list[ChartPanel]:
    """Return the panels of a sweep: speed, and memory if it is known."""
    x_title = "" if sweep.setting == "against" else _chart_name(sweep)
    is_joined = all(isinstance(row.value, int) for row in sweep.rows)
    speed = ChartPanel(
        title="samples per second",
        x_title=x_title,
        points=[_speed_point(row) for row in sweep.rows],
        format_y=lambda value: f"{value:,.10g}",
        is_joined=is_joined,
    )
    limit = result.limit_bytes
    memory = ChartPanel(
        title="memory of a step",
        x_title=x_title,
        points=[_memory_point(row) for row in sweep.rows],
        format_y=lambda value: format_bytes(value) if value else "0",
        limit=limit,
        limit_label=f"limit: {format_bytes(limit)}" if limit else "",
        is_joined=is_joined,
        is_binary=True,
    )
    return [speed, memory] if any(row.peak_bytes for row in sweep.rows) else [speed]


def _error_bar_note(sweep: BenchSweep) -> str:
    rates = (row.samples_per_second for row in sweep.rows)
    repeated = [rate for rate in rates if rate and rate.repeats > 1]
    if not repeated:
        return "no error bars: nothing was measured more than once"
    sure = min(interval.confidence for interval in repeated)
    few = min(interval.repeats for interval in repeated)
    return f"bars: interval of the median, confidence {100 * sure:.0f} % or more, from {few} repeats or more"


def _marker_note(sweep: BenchSweep) -> list[str]:
    marks = []
    hollow = []
    if any(row.samples_per_second and row.samples_per_second.repeats == 1 for row in sweep.rows):
        hollow.append("from one step only")
    if any(row.needed_bytes for row in sweep.rows):
        hollow.append("predicted memory")
    if hollow:
        marks.append(f"hollow: {', or '.join(hollow)}")
    if any(row.samples_per_second is None for row in sweep.rows):
        marks.append("cross: no measurement, see the table")
    return ["; ".join(marks)] if marks else []


def _row_name(sweep: BenchSweep, row: BenchRow) -> str:
    return "the plan" if sweep.setting == "against" else f"{_chart_name(sweep)} {format_value(row.value)}"


def _chart_name(sweep: BenchSweep) -> str:
    return {"micro_batch": "micro-batch", "global_batch_size": "global batch size"}.get(sweep.setting, sweep.setting)


def _speed_point(row: BenchRow) -> ChartPoint:
    rate = row.samples_per_second
    if rate is None:
        return ChartPoint(label=format_value(row.value), is_chosen=row.is_plan, tooltip=no_result_reason(row))
    return ChartPoint(
        label=format_value(row.value),
        value=rate.median,
        low=rate.low,
        high=rate.high,
        is_chosen=row.is_plan,
        is_hollow=rate.repeats == 1,
        tooltip=f"{rate.median:,.4g} samples/s ({rate.low:,.4g} to {rate.high:,.4g})",
    )


def _memory_point(row: BenchRow) -> ChartPoint:
    label = format_value(row.value)
    if row.peak_bytes:
        return ChartPoint(
            label=label, value=row.peak_bytes, is_chosen=row.is_plan, tooltip=format_bytes(row.peak_bytes)
        )
    if row.needed_bytes:
        tooltip = f"{format_bytes(row.needed_bytes)}, predicted"
        return ChartPoint(label=label, value=row.needed_bytes, is_chosen=row.is_plan, is_hollow=True, tooltip=tooltip)
    return ChartPoint(label=label, is_chosen=row.is_plan, tooltip=no_result_reason(row))
