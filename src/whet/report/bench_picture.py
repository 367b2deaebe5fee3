"""What does the picture of a benchmark show? Speed and memory for each value, what the plan says, and the limit."""

from whet.base.units import show_bytes
from whet.plan.words import show_value
from whet.report.bench_words import machine_name, title, why_none
from whet.report.picture import Panel, Point, draw_picture
from whet.run.bench_result import BenchResult, Row, Sweep

_PREFERRED = ("micro_batch", "device", "precision", "threads", "workers", "arch", "against")


def bench_picture(result: BenchResult) -> str | None:
    """An SVG of the micro-batch sweep, or of another one without it; None where there is nothing to see."""
    sweep = next(
        (found for name in _PREFERRED if (found := result.sweep(name)) is not None and len(found.rows) > 1), None
    )
    if sweep is None:
        return None
    x_title = {"micro_batch": "micro-batch (samples that go through at once)", "against": ""}.get(
        sweep.setting, sweep.setting
    )
    plan = next((row for row in sweep.rows if row.is_plan), None)
    is_joined = all(isinstance(row.value, int) for row in sweep.rows)
    speed = Panel(
        title="samples per second",
        x_title=x_title,
        points=[_speed(row) for row in sweep.rows],
        show=lambda value: f"{value:,.10g}",
        is_joined=is_joined,
    )
    limit = result.limit_bytes
    memory = Panel(
        title="memory of a step",
        x_title=x_title,
        points=[_memory(row) for row in sweep.rows],
        show=lambda value: show_bytes(value) if value else "0",
        limit=limit,
        limit_words=f"limit: {show_bytes(limit)}" if limit else "",
        is_joined=is_joined,
        is_binary=True,
    )
    has_memory = any(row.peak_bytes for row in sweep.rows)
    chosen = [] if plan is None else [f"ringed: what the plan says ({_named(sweep, plan)})"]
    return draw_picture(
        title(result),
        [speed, memory] if has_memory else [speed],
        subtitle=f"{machine_name(result)}, {result.created}",
        footer=[*chosen, _bars(sweep), *_marks(sweep)],
    )


def _bars(sweep: Sweep) -> str:
    rates = (row.samples_per_second for row in sweep.rows)
    found = [rate for rate in rates if rate and rate.repeats > 1]
    if not found:
        return "no bars: there was no time for a second look at anything"
    sure = min(interval.confidence for interval in found)
    few = min(interval.repeats for interval in found)
    return f"bars: where the median lies, {100 * sure:.0f} % sure or more, from {few} repeats or more"


def _marks(sweep: Sweep) -> list[str]:
    marks = []
    hollow = []
    if any(row.samples_per_second and row.samples_per_second.repeats == 1 for row in sweep.rows):
        hollow.append("from one step only")
    if any(row.needed_bytes for row in sweep.rows):
        hollow.append("memory that is predicted")
    if hollow:
        marks.append(f"hollow: {', or '.join(hollow)}")
    if any(row.samples_per_second is None for row in sweep.rows):
        marks.append("cross: no measurement, see the table")
    return ["; ".join(marks)] if marks else []


def _named(sweep: Sweep, row: Row) -> str:
    return "the plan" if sweep.setting == "against" else f"{sweep.setting.replace('_', '-')} {show_value(row.value)}"


def _speed(row: Row) -> Point:
    found = row.samples_per_second
    if found is None:
        return Point(label=show_value(row.value), is_chosen=row.is_plan, words=why_none(row))
    return Point(
        label=show_value(row.value),
        value=found.middle,
        low=found.low,
        high=found.high,
        is_chosen=row.is_plan,
        is_hollow=found.repeats == 1,
        words=f"{found.middle:,.4g} samples/s ({found.low:,.4g} to {found.high:,.4g})",
    )


def _memory(row: Row) -> Point:
    label = show_value(row.value)
    if row.peak_bytes:
        return Point(label=label, value=row.peak_bytes, is_chosen=row.is_plan, words=show_bytes(row.peak_bytes))
    if row.needed_bytes:
        words = f"{show_bytes(row.needed_bytes)}, predicted"
        return Point(label=label, value=row.needed_bytes, is_chosen=row.is_plan, is_hollow=True, words=words)
    return Point(label=label, is_chosen=row.is_plan, words=why_none(row))
