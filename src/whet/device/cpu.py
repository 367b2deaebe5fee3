"""The CPU device, its heap settings and its number of threads."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import final

import psutil
import torch
from torch import Tensor

from whet.base import env
from whet.device.abstract import AbstractDevice, MemoryUsage

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt: how much may lie free at the end of the heap, and from which size on memory is asked for apart."""
_DISABLED = -1
_MMAP_FROM_BYTES = 256 << 20
"""Larger blocks of ever other sizes leave holes: with tensors up to 200 MB a limit of 1 GB doubled the peak."""
_GLIBC_MMAP_MAX_BYTES = 32 << 20
"""The C library raises its own limit for memory apart up to here as it learns, and trims at twice that."""
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

_holders: list[object] = []
"""The process has one heap: it is kept until the last of those who asked for it is done."""


@contextlib.contextmanager
def keep_freed_memory() -> Iterator[None]:
    """While entered, freed memory stays with this process; afterwards it is given back. Only glibc can; else nothing.

    Whoever has told the C library otherwise by its variables is left alone.
    """
    set_limit = _mallopt()
    if set_limit is None or _has_user_settings():
        yield
        return
    keeper = object()
    _holders.append(keeper)
    # Not every glibc takes a limit above its own most.
    if not set_limit(_MMAP_THRESHOLD, _MMAP_FROM_BYTES):
        set_limit(_MMAP_THRESHOLD, _GLIBC_MMAP_MAX_BYTES)
    set_limit(_TRIM_THRESHOLD, _DISABLED)
    try:
        yield
    finally:
        # In a process that was forked meanwhile it is gone already.
        with contextlib.suppress(ValueError):
            _holders.remove(keeper)
        if not _holders:
            _restore_limits(set_limit)
            trim_heap()


def trim_heap() -> None:
    """What is free and kept goes back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)


def _has_user_settings() -> bool:
    return any(env.read(name) for name in _USER_VARIABLES) or "glibc.malloc." in (env.read("GLIBC_TUNABLES") or "")


def _restore_limits(set_limit: Callable[[int, int], int]) -> None:
    set_limit(_MMAP_THRESHOLD, _GLIBC_MMAP_MAX_BYTES)
    set_limit(_TRIM_THRESHOLD, 2 * _GLIBC_MMAP_MAX_BYTES)


def _reset_in_child() -> None:
    """Workers that load data make no steps: what they free is not asked for again."""
    set_limit = _mallopt()
    if _holders and set_limit is not None:
        _holders.clear()
        _restore_limits(set_limit)


os.register_at_fork(after_in_child=_reset_in_child)


@final
class CpuDevice(AbstractDevice):
    kind = "cpu"
    attention_kernels = ("flash", "math")

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    def put(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == "cpu" else tensor.cpu()

    def memory(self) -> MemoryUsage:
        process = psutil.Process().memory_info()
        return MemoryUsage(allocated=process.rss, peak=_process_peak_bytes(), limit=psutil.virtual_memory().total)

    def freed_memory(self, what: str) -> AbstractContextManager[object]:
        return keep_freed_memory() if what == "kept" else contextlib.nullcontext()

    def empty_cache(self) -> None:
        trim_heap()

    def reset_peak(self) -> None:
        # What earlier work has freed and the C library keeps would count as this one's.
        trim_heap()
        # Linux counts a process's peak anew after this; other systems have no such counter.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def _process_peak_bytes() -> int | None:
    """The most memory this process had since the peak was reset; None where nobody counts."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def set_num_threads(number: int) -> None:
    """From now on torch computes with so many threads."""
    # Setting the number that holds already is not nothing: it made a CPU's attention a third slower (docs/lab.md).
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


@contextmanager
def preserve_num_threads() -> Iterator[None]:
    """Whoever changes the number inside, afterwards it is what it was."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        set_num_threads(number)
