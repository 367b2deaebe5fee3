"""Current load: free memory, busy processes, disk speed and the usage of this process."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from whet.machine import linux
from whet.machine.facts import BusyProcess, SystemState
from whet.machine.programs import clean_name

# The sizes and times bound the measurement to about 0.3 s, even on a slow network disk.
READ_BYTES = 32 * 1024**2
READ_SECONDS = 0.2
WRITE_BYTES = 8 * 1024**2
WRITE_SECONDS = 0.1
_CHUNK_BYTES = 1024**2
_MIN_FILE_BYTES = 4 * 1024**2
# Look at only this many folder entries for a file to read, because a data folder may have millions.
_MAX_ENTRIES = 200
# No disk reaches this many bytes per second. Anything faster was read from a cache.
_CACHE_SPEED = 20e9


def disk_read_speed(folder: Path) -> float | None:
    """Measure the uncached read speed of a folder's disk in bytes per second, in 0.3 s. Return None if it fails."""
    try:
        # Prefer an existing file to a temporary one, because reading it writes nothing.
        existing = _largest_file(folder)
        if existing is not None:
            with existing.open("rb", buffering=0) as file:
                return _timed_read(file.fileno())
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            _write_random(file.fileno())
            return _timed_read(file.fileno())
    except (OSError, ValueError):
        return None


def _largest_file(folder: Path) -> Path | None:
    best, best_size = None, _MIN_FILE_BYTES
    with os.scandir(folder) as entries:
        for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False):
            if entry.is_file(follow_symlinks=False) and os.access(entry.path, os.R_OK):
                size = entry.stat(follow_symlinks=False).st_size
                if size >= best_size:
                    best, best_size = Path(entry.path), size
    return best


def _write_random(file: int) -> None:
    deadline = time.monotonic() + WRITE_SECONDS
    # Write random bytes: a file system with compression or sparse files would not read zeros from the disk.
    chunk = os.urandom(_CHUNK_BYTES)
    for _ in range(WRITE_BYTES // _CHUNK_BYTES):
        os.write(file, chunk)
        if time.monotonic() > deadline:
            break
    os.fsync(file)
    os.lseek(file, 0, os.SEEK_SET)


def _timed_read(file: int) -> float | None:
    # Drop the file from the page cache. Otherwise the speed of memory would be measured.
    _drop_page_cache(file)
    start = time.monotonic()
    done = 0
    while done < READ_BYTES and time.monotonic() - start < READ_SECONDS:
        got = len(os.read(file, _CHUNK_BYTES))
        if got == 0:
            break
        done += got
    seconds = time.monotonic() - start
    if done < _CHUNK_BYTES or seconds <= 0 or done / seconds > _CACHE_SPEED:
        return None
    return done / seconds


def _drop_page_cache(file: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    elif hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


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


def complete_system_state(known: SystemState, *, folder: Path) -> SystemState:
    """Add the values that can be measured on any system to the state that the system reported."""
    memory = _system_memory()
    return known.model_copy(
        update={
            "memory_available_bytes": _first_known(known.memory_available_bytes, memory.available if memory else None),
            "swap_used_bytes": _first_known(known.swap_used_bytes, _swap_used()),
            "power_source": known.power_source or _power_source(),
            "busy": busy_processes(memory_bytes=memory.total if memory else None),
            "disk_bytes_per_second": disk_read_speed(folder),
        }
    )


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


class _SystemMemory(NamedTuple):
    total: int
    available: int


def _system_memory() -> _SystemMemory | None:
    try:
        memory = psutil.virtual_memory()
        return _SystemMemory(int(memory.total), int(memory.available))
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


def _first_known(known: int | None, other: int | None) -> int | None:
    return other if known is None else known


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
    """How often it was given a core."""

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
