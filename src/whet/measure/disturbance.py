"""What disturbed a benchmark: heat, other programs, short memory?"""

from collections.abc import Iterator

from whet.measure.benching import Table
from whet.measure.series import median_interval

_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_LEAST_VISITS = 4
_BUSY_PERCENT = 20.0


def strain(table: Table) -> Iterator[str]:
    """What disturbed the measurement, in words."""
    levels = [reading.thermal for reading in table.readings if reading.thermal is not None]
    hot = [level for level in levels if level != "nominal"]
    if hot:
        yield f"throttling seen: thermal pressure {max(hot, key=_LEVELS.index)} in {len(hot)} of {len(levels)} readings"
    else:
        yield "no throttling by the sensor" if levels else "no heat sensor can be read here"
    third = len(table.plan_visits) // 3
    if third >= _LEAST_VISITS:
        first, last = (median_interval(part) for part in (table.plan_visits[:third], table.plan_visits[-third:]))
        change = last.middle / first.middle
        moved = last.low > first.high or last.high < first.low
        told = "heat, or other programs" if change > 1 else "other programs ended, or clocks rose"
        yield f"the plan's own steps took {change:.2f}x as long in the last third as in the first" + (
            f": {told}" if moved else ", which is inside the noise"
        )
    used = max(table.cpu_use, default=0.0)
    if used >= _BUSY_PERCENT:
        yield f"other programs were at work: {used:.0f} % of all cores while nothing was measured"
    if any(reading.memory_pressure in ("warn", "critical") for reading in table.readings):
        yield "memory was short"
    if any(reading.low_power_mode for reading in table.readings):
        yield "low-power mode is on, which slows the GPU"
