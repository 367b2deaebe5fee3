"""How does a benchmark read? Tables for a screen and for a page, from the same cells."""

import re
from collections.abc import Iterator

from whet.base.units import show_bytes, show_seconds
from whet.machine.facts import Machine
from whet.machine.words import one_line
from whet.plan.words import show_value, workload_line
from whet.run.bench_result import BenchResult, Interval, Row, Sweep

Cells = list[tuple[str, ...]]
"""A header and rows."""

_HEADS = ("samples/s", "against the plan", "memory", "slow steps", "note")
_PLAN_PARTS = ("device", "precision", "micro_batch", "lengths", "optimizer_kernels", "threads", "data_home", "compile")


def text(result: BenchResult) -> str:
    """The whole benchmark as plain lines."""
    lines = [*_head(result), f"plan      {_plan_line(result)}"]
    for sweep in result.sweeps:
        lines += ["", _sweep_title(result, sweep), *plain_table(cells(sweep))]
        lines += [f"note: {sweep.note}"] if sweep.note else []
    return "\n".join([*lines, "", *_remarks(result)])


def markdown(result: BenchResult, *, command: str, picture: str | None = None) -> str:
    """The benchmark as a page; `picture` is the name of a file beside it."""
    lines = [f"# {escaped(f'{title(result)}, {machine_name(result)}, {result.created}')}", ""]
    lines += [f"As printed by `{_code(command)}`.", ""]
    facts = [line.split(maxsplit=1) for line in _head(result)]
    lines += [f"- {name}: {escaped(line)}" for name, line in (*facts, ("plan", _plan_line(result)))]
    if picture is not None:
        lines += ["", f"![Speed and memory of each value, the plan's choice and the limit]({picture})"]
    for sweep in result.sweeps:
        lines += ["", f"## {escaped(_sweep_title(result, sweep))}", "", *markdown_table(cells(sweep))]
        lines += ["", escaped(sweep.note)] if sweep.note else []
    lines += ["", "## How it was measured", ""]
    return "\n".join([*lines, *(f"- {escaped(line)}" for line in _remarks(result))]) + "\n"


def title(result: BenchResult) -> str:
    """What was measured."""
    simulated = " (SIMULATED)" if result.is_simulated else ""
    return f"Benchmark of {result.workload.recipe}{simulated}"


def machine_name(result: BenchResult) -> str:
    """A short name for the machine."""
    return f"{result.machine.name} (simulated)" if result.is_simulated else _short_name(result.machine)


def file_stem(result: BenchResult) -> str:
    """[workload]_[machine]_[date], as a file may be called everywhere."""
    name = f"{result.machine.name}-simulated" if result.is_simulated else _short_name(result.machine)
    words = (result.workload.recipe, name, result.created)
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-.") or "unnamed" for word in words)


def _short_name(machine: Machine) -> str:
    """A probed machine has no name of its own: its accelerator or chip, or its cores, must do."""
    memory_gb = f"-{machine.memory_bytes / 1024**3:.0f}gb" if machine.memory_bytes else ""
    for accelerator in machine.accelerators:
        if accelerator.kind == "cuda" and accelerator.name:
            return accelerator.name
        if accelerator.kind == "mps" and machine.chip:
            return f"{machine.chip}{memory_gb}"
    system = {"Linux": "linux", "macOS": "mac"}.get((machine.os.name or "").partition(" ")[0], "machine")
    cores = machine.cpu.logical_cores or machine.cpu.physical_cores
    return f"{system}-{cores}core" if cores else system


def why_none(row: Row) -> str:
    """Why a row has no numbers."""
    return f"{row.outcome}: {row.words}" if row.words else row.outcome


def cells(sweep: Sweep) -> Cells:
    """One line for each value; two columns side by side where the plan is compared with one other loop."""
    if sweep.setting == "against":
        return _closing_table(sweep)
    first = sweep.setting
    return [(first, *_HEADS), *(_line(row) for row in sweep.rows)]


def plain_table(table: Cells) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in table]


def markdown_table(table: Cells) -> list[str]:
    """The same as a page has it."""
    lines = ["| " + " | ".join(escaped(cell) for cell in line) + " |" for line in table]
    return [lines[0], "|" + " --- |" * len(table[0]), *lines[1:]]


def rate(found: Interval | None) -> str:
    """Samples per second with their interval."""
    return "" if found is None else f"{_number(found.middle)} ({_number(found.low)} to {_number(found.high)})"


def escaped(words: str) -> str:
    """Without anything that a page would take as markup."""
    plain = "".join(char if char.isprintable() else " " for char in words)
    return re.sub(r"([\\`*_<>|\[\]#])", r"\\\1", plain)


def _line(row: Row) -> tuple[str, ...]:
    value = show_value(row.value) + (" *" if row.is_plan else "")
    if row.samples_per_second is None:
        needed = f"{show_bytes(row.needed_bytes)} needed" if row.needed_bytes else memory(row)
        return (value, "", "", needed, "", why_none(row))
    against = "1 (the plan)" if row.is_plan else _times(row.speedup)
    outcome = "" if row.outcome == "measured" else f"{row.outcome}: "
    return (value, rate(row.samples_per_second), against, memory(row), _slow(row), f"{outcome}{row.words}")


def _closing_table(sweep: Sweep) -> Cells:
    """Guides close with it: speed, memory, stability and heat, the plain loop beside the plan."""
    plain = next(row for row in sweep.rows if not row.is_plan)
    plan = next(row for row in sweep.rows if row.is_plan)
    speedup = plain.speedup
    change = ""
    if speedup is not None:
        change = f"{1 / speedup.middle:.2f}x ({1 / speedup.high:.2f} to {1 / speedup.low:.2f})"
    less = ""
    if plain.peak_bytes and plan.peak_bytes:
        less = f"{100 * (plan.peak_bytes / plain.peak_bytes - 1):+.0f} %"
    both = (plain, plan)
    return [
        ("what", "plain loop", "plan", "plan against plain"),
        ("speed, samples/s", *(rate(row.samples_per_second) or why_none(row) for row in both), change),
        ("one step", *(show_seconds(row.step_seconds.middle) if row.step_seconds else "" for row in both), ""),
        ("memory of a step", *(memory(row) for row in both), less),
        ("slow steps (1 in 20), against the median", *(_slow(row) for row in both), ""),
        ("step time, second half against first", *(f"{row.drift:.2f}x" if row.drift else "" for row in both), ""),
        *(
            (name.replace("_", " "), *(show_value(row.execution.get(name)) for row in both), "")
            for name in plan.execution
            if plain.execution.get(name) != plan.execution.get(name)
        ),
    ]


def _sweep_title(result: BenchResult, sweep: Sweep) -> str:
    if sweep.setting == "against":
        return "the plan against a plain loop, measured in turns"
    limit = f"; limit {show_bytes(result.limit_bytes)}" if result.limit_bytes and sweep.setting == "micro_batch" else ""
    return f"{sweep.setting} (* is what the plan says{limit})" if sweep.setting != "arch" else "arch, one after another"


def _head(result: BenchResult) -> Iterator[str]:
    simulated = "SIMULATED, nothing here is about a real one: " if result.is_simulated else ""
    yield f"machine   {simulated}{one_line(result.machine)}"
    yield f"workload  {workload_line(result.workload)}"


def _plan_line(result: BenchResult) -> str:
    shown = [f"{name.replace('_', ' ')} {show_value(result.plan[name])}" for name in _PLAN_PARTS if name in result.plan]
    return f"{', '.join(shown)} (by {'rules' if result.plan_source == 'rules' else 'measurement'})"


def _remarks(result: BenchResult) -> Iterator[str]:
    yield f"{show_seconds(result.spent_seconds)} in all, of {show_seconds(result.budget_seconds)} allowed"
    yield from result.strain
    yield "against the plan: pairs of steps on the same batches, so that what slows the machine slows both"
    yield "samples/s: the plan's median; of other values that times the ratio of their pairs; each with its interval"
    yield "slow steps: the 95th percentile of the step time over its median, longer batches included"
    if result.plan.get("device") == "cpu":
        yield "memory on the CPU is the growth of the process, libraries that load meanwhile included"


def memory(row: Row) -> str:
    """What a step took at most; nothing where nobody knows."""
    return show_bytes(row.peak_bytes) if row.peak_bytes else ""


def _slow(row: Row) -> str:
    return f"{row.slow_steps:.2f}x" if row.slow_steps else ""


def _times(found: Interval | None) -> str:
    return "" if found is None else f"{found.middle:.2f}x ({found.low:.2f} to {found.high:.2f})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _code(command: str) -> str:
    return "".join(char for char in command if char.isprintable()).replace("`", "'")
