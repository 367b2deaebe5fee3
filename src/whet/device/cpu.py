"""The CPU device, its number of threads, and the settings of the C heap."""

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
    """The CPU of this machine. Every operation is complete when its call returns."""

    kind = "cpu"
    is_cpu = True
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
    """Memory counters of this process, and the heap of the C library as its cache."""

    def usage(self) -> MemoryUsage:
        process = psutil.Process().memory_info()
        return MemoryUsage(allocated=process.rss, peak=_process_peak_bytes(), limit=psutil.virtual_memory().total)

    def keep_freed(self) -> AbstractContextManager[object]:
        return keep_freed_memory()

    def empty_cache(self) -> None:
        trim_heap()

    def reset_peak(self) -> None:
        # Trim first. Otherwise the peak would include freed memory that the C library has not returned.
        trim_heap()
        # Writing 5 resets the peak resident memory (VmHWM) on Linux. Other systems have no such counter.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _process_peak_bytes() -> int | None:
    """Return the peak resident memory of this process in bytes since the last reset, or None if it is not counted."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    line = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024


# --- threads ---------------------------------------------------------------------------------------------------------


def set_num_threads(number: int) -> None:
    """Set torch's number of CPU threads, unless it is already set to this number."""
    # Setting the same number again made attention on the CPU a third slower (docs/lab.md).
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextlib.contextmanager
def preserve_num_threads() -> Iterator[None]:
    """Restore torch's number of CPU threads on exit."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        set_num_threads(number)


class IdleThreads:
    """Sleeping OpenMP threads that exceed the number of cores, so that torch's waiting threads spin only briefly.

    libgomp reads GOMP_SPINCOUNT only once, when it is loaded. But if there are more OpenMP threads than cores, waiting
    threads spin for 100 iterations instead of 300,000, the default (libgomp manual, GOMP_SPINCOUNT).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._is_over = threading.Event()
        # libgomp keeps a thread pool per calling thread, for as long as that thread lives. The size includes the
        # calling thread. torch's own pool counts toward the number of cores.
        size = max(2, len(os.sched_getaffinity(0)) - torch.get_num_threads() + 2)
        self._thread = threading.Thread(target=self._hold, args=(library, size), name="whet-idle-threads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _hold(self, library: ctypes.CDLL, size: int) -> None:
        # The body of the parallel region can be any C function that needs neither the GIL nor memory.
        nothing = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
        library.GOMP_parallel(nothing, None, ctypes.c_uint(size), ctypes.c_uint(0))
        self._is_over.wait()


def start_idle_threads() -> IdleThreads | None:
    """Start idle threads and return them, or return None if torch does not use libgomp."""
    path = _libgomp_path()
    return None if path is None else IdleThreads(ctypes.CDLL(path))


def _libgomp_path() -> str | None:
    """Return the path of the libgomp that torch has loaded, or None if there is none or the system is not Linux."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libgomp" in line}
    # Other packages may bring their own libgomp, so prefer the one in torch's folder.
    own = [path for path in paths if Path(path).parent == Path(torch.__file__).parent / "lib"]
    return next(iter(own or sorted(paths)), None)


# --- heap ------------------------------------------------------------------------------------------------------------
# A step frees its activations, and the next step allocates the same amount. If the C library returns the memory to the
# system, every page must be faulted in and zeroed again. That takes 3 % of a text step, and a fifth of a step of a
# small convolutional network (docs/lab.md).

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt: the free bytes to keep at the top of the heap, and the minimum size of blocks from mmap."""
_DISABLED = -1
_MMAP_FROM_BYTES = 256 << 20
"""Blocks from this size on are allocated with mmap, because large blocks of varying sizes fragment the heap.

With tensors of up to 200 MB, a threshold of 1 GB doubled the peak memory.
"""
_GLIBC_MMAP_MAX_BYTES = 32 << 20
"""Maximum of glibc's dynamic mmap threshold. By default, glibc sets the trim threshold to twice the mmap threshold."""

_holders: list[object] = []
"""Active `keep_freed_memory` contexts. The heap is shared, so the last context to exit restores its settings."""


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Keep freed memory in this process, and return it to the system on exit.

    This has an effect only with glibc, and only if the user has not configured malloc with environment variables.
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
    """Restore the defaults in a forked process, because data workers do not reuse the memory they free."""
    set_limit = _mallopt()
    if _holders and set_limit is not None:
        _holders.clear()
        _restore_limits(set_limit)


os.register_at_fork(after_in_child=_reset_in_child)
