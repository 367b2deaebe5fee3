"""What slows a run down at this moment? Free memory, swap, power, other heavy processes, a slow disk."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from whet.machine.disk import read_speed
from whet.machine.facts import BusyProcess, Conditions
from whet.machine.programs import clean_name

SAMPLE_SECONDS = 0.2
WHOLE_CORE_PERCENT = 90.0
"""A process that fills one core shows 90 to 110 % in so short a sample: times are counted in steps of 10 ms."""
MEMORY_SHARE = 0.1
MOST_NAMED = 5


class Sample(NamedTuple):
    """One process at one moment."""

    name: str
    cpu_seconds: float
    memory_bytes: int


def complete(known: Conditions, *, folder: Path) -> Conditions:
    """`known`, which the system's own programs or files told, with what can be measured anywhere added."""
    memory = _memory()
    return known.model_copy(
        update={
            "memory_available_bytes": _first(known.memory_available_bytes, memory.available if memory else None),
            "swap_used_bytes": _first(known.swap_used_bytes, _swap_used()),
            "power_source": known.power_source or _power_source(),
            "busy": busy_processes(memory_bytes=memory.total if memory else None),
            "disk_bytes_per_second": read_speed(folder),
        }
    )


def busy_processes(*, memory_bytes: int | None, sample_seconds: float = SAMPLE_SECONDS) -> tuple[BusyProcess, ...]:
    """Other processes that use a whole core or a tenth of the memory; not us, our parents and our children."""
    ours = _own_family()
    before, start = _samples(ours), time.monotonic()
    time.sleep(sample_seconds)
    after = _samples(ours)
    return heavy(before, after, seconds=time.monotonic() - start, memory_bytes=memory_bytes)


def heavy(
    before: dict[int, Sample], after: dict[int, Sample], *, seconds: float, memory_bytes: int | None
) -> tuple[BusyProcess, ...]:
    """The heavy ones among processes seen twice, heaviest first."""
    found = []
    for pid, now in after.items():
        then = before.get(pid)
        if then is None or then.name != now.name or seconds <= 0:
            continue
        percent = 100 * max(0.0, now.cpu_seconds - then.cpu_seconds) / seconds
        fills_memory = memory_bytes is not None and now.memory_bytes >= MEMORY_SHARE * memory_bytes
        if percent >= WHOLE_CORE_PERCENT or fills_memory:
            found.append(
                BusyProcess(name=now.name, pid=pid, memory_bytes=now.memory_bytes, cpu_percent=round(percent, 1))
            )
    found.sort(key=lambda p: (p.cpu_percent or 0, p.memory_bytes or 0), reverse=True)
    return tuple(found[:MOST_NAMED])


def _samples(ours: set[int]) -> dict[int, Sample]:
    found: dict[int, Sample] = {}
    for process in _processes():
        if process.pid in ours:
            continue
        try:
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info().rss
                name = clean_name(process.name()) or "unnamed"
            found[process.pid] = Sample(name, times.user + times.system, memory)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's: it stays unknown
    return found


def _processes() -> Iterable[psutil.Process]:
    try:
        yield from psutil.process_iter()
    except (psutil.Error, OSError):
        return


def _own_family() -> set[int]:
    try:
        own = psutil.Process()
        family = {own.pid}
        family.update(process.pid for process in own.parents())
        family.update(process.pid for process in own.children(recursive=True))
    except (psutil.Error, OSError):
        return set()
    return family


def cpu_use(sample_seconds: float = 0.5) -> float | None:
    """Per cent of all cores that are at work; asked while we wait, it is what others take."""
    try:
        return float(psutil.cpu_percent(interval=sample_seconds))
    except (psutil.Error, OSError):
        return None


class _Memory(NamedTuple):
    total: int
    available: int


def _memory() -> _Memory | None:
    try:
        found = psutil.virtual_memory()
        return _Memory(int(found.total), int(found.available))
    except (psutil.Error, OSError, ValueError):
        return None


def _swap_used() -> int | None:
    try:
        return int(psutil.swap_memory().used)
    except (psutil.Error, OSError, ValueError, RuntimeError):
        return None


def _power_source() -> str | None:
    try:
        battery = psutil.sensors_battery()
    except (psutil.Error, OSError, ValueError, AttributeError):
        return None
    if battery is None or battery.power_plugged is None:
        return None
    return "mains" if battery.power_plugged else "battery"


def _first(known: int | None, other: int | None) -> int | None:
    return other if known is None else known
