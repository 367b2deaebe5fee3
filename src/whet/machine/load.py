"""Measure the current load: busy processes, and the usage of this process and its threads."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from whet.machine import linux
from whet.machine.facts import BusyProcess
from whet.machine.programs import clean_name

SAMPLE_SECONDS = 0.2
# CPU times have a resolution of 10 ms, so a process that uses one core shows 90 to 110 % in this short sample.
BUSY_PERCENT = 90.0
MEMORY_SHARE = 0.1
MAX_PROCESSES = 5


class ProcessSample(NamedTuple):
    """The CPU time and memory of one process at one point in time."""

    name: str
    cpu_seconds: float
    memory_bytes: int


def busy_processes(*, memory_bytes: int | None, sample_seconds: float = SAMPLE_SECONDS) -> tuple[BusyProcess, ...]:
    """Return the heaviest processes, except this process, its ancestors and its descendants.

    A process counts if it uses about a whole core (BUSY_PERCENT) or at least a tenth of the memory (MEMORY_SHARE).
    """
    ours = _own_process_tree()
    before, start = _process_samples(ours), time.monotonic()
    time.sleep(sample_seconds)
    after = _process_samples(ours)
    return heaviest_processes(before, after, seconds=time.monotonic() - start, memory_bytes=memory_bytes)


def heaviest_processes(
    before: dict[int, ProcessSample], after: dict[int, ProcessSample], *, seconds: float, memory_bytes: int | None
) -> tuple[BusyProcess, ...]:
    """Compare two samples, taken `seconds` apart. Return the heaviest processes, heaviest first."""
    heavy = []
    for pid, now in after.items():
        then = before.get(pid)
        # A different name means that the pid was reused between the two samples.
        if then is None or then.name != now.name or seconds <= 0:
            continue
        percent = 100 * max(0.0, now.cpu_seconds - then.cpu_seconds) / seconds
        fills_memory = memory_bytes is not None and now.memory_bytes >= MEMORY_SHARE * memory_bytes
        if percent >= BUSY_PERCENT or fills_memory:
            heavy.append(
                BusyProcess(name=now.name, pid=pid, memory_bytes=now.memory_bytes, cpu_percent=round(percent, 1))
            )
    heavy.sort(key=lambda p: (p.cpu_percent or 0, p.memory_bytes or 0), reverse=True)
    return tuple(heavy[:MAX_PROCESSES])


def _process_samples(ours: set[int]) -> dict[int, ProcessSample]:
    samples: dict[int, ProcessSample] = {}
    for process in _processes():
        if process.pid in ours:
            continue
        try:
            with process.oneshot():
                times, memory = process.cpu_times(), process.memory_info().rss
                name = clean_name(process.name()) or "unnamed"
            samples[process.pid] = ProcessSample(name, times.user + times.system, memory)
        except (psutil.Error, OSError):
            continue  # The process has ended, or belongs to another user.
    return samples


def _processes() -> Iterable[psutil.Process]:
    try:
        yield from psutil.process_iter()
    except (psutil.Error, OSError):
        return


def _own_process_tree() -> set[int]:
    try:
        own = psutil.Process()
        family = {own.pid}
        family.update(process.pid for process in own.parents())
        family.update(process.pid for process in own.children(recursive=True))
    except (psutil.Error, OSError):
        return set()
    return family


def cpu_percent(sample_seconds: float = 0.5) -> float | None:
    """Return the CPU usage of all cores in percent. The calling thread sleeps while the sample is taken."""
    try:
        return float(psutil.cpu_percent(interval=sample_seconds))
    except (psutil.Error, OSError):
        return None


class Usage(NamedTuple):
    """CPU and memory usage. Percentages are averages since the last call. None means unknown."""

    cpu_percent: float | None = None
    """CPU usage of all processes, in percent of all cores."""
    process_percent: float | None = None
    """CPU usage of this process, in percent of one core: two busy cores are 200."""
    process_bytes: int | None = None
    """Resident memory of this process, in bytes."""


class ProcessUsage:
    """Reads usage since the last call. Call it from the thread that created it. A call takes 0.1 ms."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # psutil reports usage since the previous call, so this call starts the count.
        self()

    def __call__(self) -> Usage:
        try:
            with self._process.oneshot():
                return Usage(
                    cpu_percent=float(psutil.cpu_percent(interval=None)),
                    process_percent=float(self._process.cpu_percent(interval=None)),
                    process_bytes=int(self._process.memory_info().rss),
                )
        except (psutil.Error, OSError, ValueError):
            return Usage()


class ThreadTimes(NamedTuple):
    """Seconds that a thread has been running or runnable since it started, without the time that it slept."""

    running: float
    waiting: float
    """Seconds in which the thread was runnable, but had no core."""
    slices: int
    """Number of times that the thread was scheduled on a core."""

    @property
    def total(self) -> float:
        return self.running + self.waiting


def thread_times(thread: int, *, root: Path = linux.ROOT) -> ThreadTimes | None:
    """Return the times of a thread of this process, given by its native id, or None if they are not available."""
    # The fields of schedstat: nanoseconds on a core, nanoseconds on a run queue, number of time slices.
    fields = (linux.read_text(root / f"proc/self/task/{thread}/schedstat") or "").split()
    if len(fields) != 3 or not all(field.isdecimal() for field in fields):
        return None
    return ThreadTimes(int(fields[0]) / 1e9, int(fields[1]) / 1e9, int(fields[2]))
