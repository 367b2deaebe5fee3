"""Current load: busy processes, the usage of this process and of its threads."""

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
    """One process at one moment."""

    name: str
    cpu_seconds: float
    memory_bytes: int


def busy_processes(*, memory_bytes: int | None, sample_seconds: float = SAMPLE_SECONDS) -> tuple[BusyProcess, ...]:
    """Return processes that use a whole core or a tenth of the memory, except parents and children of this process."""
    ours = _own_process_tree()
    before, start = _process_samples(ours), time.monotonic()
    time.sleep(sample_seconds)
    after = _process_samples(ours)
    return heaviest_processes(before, after, seconds=time.monotonic() - start, memory_bytes=memory_bytes)


def heaviest_processes(
    before: dict[int, ProcessSample], after: dict[int, ProcessSample], *, seconds: float, memory_bytes: int | None
) -> tuple[BusyProcess, ...]:
    """Return the heaviest of the processes in two samples, heaviest first."""
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
    """Return the CPU usage of all cores in percent. This process sleeps meanwhile, so only other processes count."""
    try:
        return float(psutil.cpu_percent(interval=sample_seconds))
    except (psutil.Error, OSError):
        return None


class Usage(NamedTuple):
    """Usage since the last call. None means that the system does not report it."""

    cpu_percent: float | None = None
    """CPU usage of all processes, in percent of all cores."""
    process_percent: float | None = None
    """CPU usage of this process, in percent of one core: two busy cores are 200."""
    process_bytes: int | None = None
    """Resident memory of this process."""


class ProcessUsage:
    """Reads usage since the last call. Call it in the thread that created it; a call takes 0.1 ms."""

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
    """Seconds of a thread since it began, without those in which it slept."""

    running: float
    waiting: float
    """Seconds in which it was ready but had no core."""
    slices: int
    """Number of times that it was scheduled on a core."""

    @property
    def total(self) -> float:
        return self.running + self.waiting


def thread_times(thread: int, *, root: Path = linux.ROOT) -> ThreadTimes | None:
    """Return the times of a thread of this process, given by its native id; None if the system does not count them."""
    # Nanoseconds on a core, nanoseconds in the queue of a core, number of time slices.
    fields = (linux.read_text(root / f"proc/self/task/{thread}/schedstat") or "").split()
    if len(fields) != 3 or not all(field.isdecimal() for field in fields):
        return None
    return ThreadTimes(int(fields[0]) / 1e9, int(fields[1]) / 1e9, int(fields[2]))
