"""The CPU device, with heap settings and the number of threads."""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

import psutil
import torch
from torch import Tensor

from whet.base import env
from whet.device.abstract import AbstractDevice, DeviceMemory, MemoryUsage


@final
class CpuDevice(AbstractDevice):
    """The CPU of this machine. It has no queue, so every call is complete when it returns."""

    kind = "cpu"
    attention_kernels = ("flash", "math")

    def __init__(self) -> None:
        super().__init__()
        self.memory = CpuMemory()

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def put(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cpu" else tensor.cpu()


@final
class CpuMemory(DeviceMemory):
    """Memory counters of this process, and the heap of the C library."""

    def usage(self) -> MemoryUsage:
        process = psutil.Process().memory_info()
        return MemoryUsage(allocated=process.rss, peak=_process_peak_bytes(), limit=psutil.virtual_memory().total)

    def keep_freed(self) -> AbstractContextManager[object]:
        return keep_freed_memory()

    def empty_cache(self) -> None:
        trim_heap()

    def reset_peak(self) -> None:
        # Trim first. Otherwise the peak would include memory that was freed but is still held by the C library.
        trim_heap()
        # Writing 5 resets the peak of the process (VmHWM) on Linux. Other systems have no such counter.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _process_peak_bytes() -> int | None:
    """Return the peak memory of this process since the last reset, or None if the system does not count it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024


# --- threads ---------------------------------------------------------------------------------------------------------


def set_num_threads(number: int) -> None:
    """Set torch's number of CPU threads if it differs."""
    # Setting the same number again is not free: it made attention on the CPU a third slower (docs/lab.md).
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextlib.contextmanager
def preserve_num_threads() -> Iterator[None]:
    """Restore torch's number of threads on exit."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        set_num_threads(number)


class IdleThreads:
    """OpenMP threads beyond the number of cores, asleep. While they exist, threads that wait in torch hardly spin.

    libgomp reads GOMP_SPINCOUNT when torch is loaded. Later only this changes how long threads spin: 300,000 turns, or
    100 if there are more OpenMP threads than cores (the manual of libgomp on GOMP_SPINCOUNT).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._is_over = threading.Event()
        # The pool of a thread ends with the thread. Its size counts the thread itself, and torch has a pool already.
        size = max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)
        self._thread = threading.Thread(target=self._hold, args=(library, size), name="whet-idle-threads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _hold(self, library: ctypes.CDLL, size: int) -> None:
        # Any C function that needs no GIL and no memory serves as the body of the parallel region.
        nothing = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        self._is_over.wait()


def start_idle_threads() -> IdleThreads | None:
    """Start idle threads, or None if torch does not use libgomp."""
    path = _libgomp_path()
    return None if path is None else IdleThreads(ctypes.CDLL(path))


def _libgomp_path() -> str | None:
    """Return the path of the libgomp that torch has loaded, or None on other systems and with other libraries."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    # Other packages may bring a libgomp of their own.
    own = [path for path in paths if Path(path).parent == Path(torch.__file__).parent / "lib"]
    return next(iter(own or sorted(paths)), None)


# --- heap ------------------------------------------------------------------------------------------------------------
# A step frees its activations, and the next step allocates the same amount. If the C library returns the memory to the
# system, every page is faulted in and zeroed again. That costs 3 % of a text step, and a fifth of a step of a small
# convolutional network (docs/lab.md).

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: free bytes to keep at the end of the heap, and minimum size of separately mapped blocks."""
_DISABLED = -1
_MMAP_FROM_BYTES = 256 << 20
"""Larger blocks are mapped separately, because blocks of varying sizes fragment the heap.

With tensors of up to 200 MB, a threshold of 1 GB doubled the peak.
"""
_GLIBC_MMAP_MAX_BYTES = 32 << 20
"""Maximum to which glibc raises its mmap threshold by default. It trims the heap at twice that size."""

_holders: list[object] = []
"""Active `keep_freed_memory` contexts. The process has one heap, so the last context to exit restores it."""


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process, and return it to the system on exit.

    Has an effect only with glibc, and only if the user has not configured malloc by environment variables.
    """
    set_limit = _mallopt()
    if set_limit is None or env.malloc_variable() is not None:
        yield
        return
    holder = object()
    _holders.append(holder)
    # Some glibc versions reject a threshold above their maximum.
    if not set_limit(_MMAP_THRESHOLD, _MMAP_FROM_BYTES):
        set_limit(_MMAP_THRESHOLD, _GLIBC_MMAP_MAX_BYTES)
    set_limit(_TRIM_THRESHOLD, _DISABLED)
    try:
        yield
    finally:
        # In a forked process, `_reset_in_child` has already removed the holder.
        with contextlib.suppress(ValueError):
            _holders.remove(holder)
        if not _holders:
            _restore_limits(set_limit)
            trim_heap()


def trim_heap() -> None:
    """Return free heap memory to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)


def _restore_limits(set_limit: Callable[[int, int], int]) -> None:
    set_limit(_MMAP_THRESHOLD, _GLIBC_MMAP_MAX_BYTES)
    set_limit(_TRIM_THRESHOLD, 2 * _GLIBC_MMAP_MAX_BYTES)


def _reset_in_child() -> None:
    """Restore the defaults in forked data workers, which do not reuse the memory they free."""
    set_limit = _mallopt()
    if _holders and set_limit is not None:
        _holders.clear()
        _restore_limits(set_limit)


os.register_at_fork(after_in_child=_reset_in_child)
