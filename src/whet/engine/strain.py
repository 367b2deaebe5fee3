"""What do readings and step times mean: cool, slow or hot, and in which words?

Pure. The time of steps decides; a sensor tells whether it is heat, or raises the alarm first.
"""

from typing import Literal

from whet.base.units import show_bytes
from whet.engine.drift import SlowDown
from whet.machine.facts import Conditions, PressureLevel

Heat = Literal["cool", "slow", "hot"]
"""slow: the steps take longer, and a sensor says that it is not heat."""

_THROTTLING = ("heavy", "trapping", "sleeping")
"""Levels at which clocks are lowered; at "moderate" they need not be."""


def judge_heat(conditions: Conditions, slow_down: SlowDown | None) -> Heat:
    """Without a sensor slow steps count as heat: it is what cannot be excluded.

    >>> slow = SlowDown(factor=1.3, since_step=7)
    >>> [judge_heat(Conditions(thermal=level), slow) for level in ("nominal", "moderate", None)]
    ['slow', 'hot', 'hot']
    >>> [judge_heat(Conditions(thermal=level), None) for level in ("moderate", "heavy", None)]
    ['cool', 'hot', 'cool']
    """
    if conditions.thermal in _THROTTLING:
        return "hot"
    if slow_down is None:
        return "cool"
    return "slow" if conditions.thermal == "nominal" else "hot"


def heat_words(heat: Heat, conditions: Conditions, slow_down: SlowDown | None) -> str:
    """What was seen, and what it may be."""
    if heat == "cool":
        return "no longer slowed down"
    seen: list[str] = []
    if slow_down is not None:
        seen.append(f"steps take {slow_down.factor:.1f}x as long since step {slow_down.since_step:,}")
    if conditions.thermal is None:
        seen.append("heat, or other programs: no heat sensor can be read here")
    elif heat == "hot":
        seen.append(f"the machine is hot (thermal pressure {conditions.thermal})")
    else:
        seen.append("not heat, by the sensor: other programs, longer samples or swapping")
    if conditions.memory_pressure in ("warn", "critical"):
        seen.append("memory is short")
    if conditions.low_power_mode:
        seen.append("low-power mode is on")
    return "; ".join(seen)


def pressure_words(level: PressureLevel, conditions: Conditions) -> str:
    """How short memory is."""
    if level == "normal":
        return "memory is no longer short"
    left, swapped = conditions.memory_available_bytes, conditions.swap_used_bytes
    facts = [] if left is None else [f"{show_bytes(left)} left"]
    facts += [f"{show_bytes(swapped)} swapped out"] if swapped else []
    told = f" ({', '.join(facts)})" if facts else ""
    if level == "warn":
        return f"memory is short{told}: close other programs"
    return f"memory is nearly used up{told}: the system may end programs, this one too"


Power = tuple[bool, bool]
"""Whether the machine runs on its battery, and whether it saves power."""


def judge_power(conditions: Conditions, before: Power) -> Power:
    """What is unknown is as it was."""
    source, saves = conditions.power_source, conditions.low_power_mode
    return before[0] if source is None else source == "battery", before[1] if saves is None else saves


def power_words(power: Power) -> str:
    on_battery, saves = power
    where = "on battery: the run may be slower, and ends with the battery" if on_battery else "on mains"
    return f"{where}; low-power mode is on, which slows the GPU" if saves else where
