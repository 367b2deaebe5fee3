"""Does the C library keep what tensors on the CPU have freed, or give it back to the system at once?

A step frees what it computed and the next one asks for as much again. Given back, each page of it is faulted in and
filled with zeros anew: 3 % of a text step, a fifth of a small convolutional net's (docs/lab.md).
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator

from whet.base import env

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt: how much may lie free at the end of the heap, and from which size on memory is asked for apart."""
_NEVER = -1
_APART_FROM = 256 << 20
"""Larger blocks of ever other sizes leave holes: with tensors up to 200 MB a limit of 1 GB doubled the peak."""
_OWN_MOST = 32 << 20
"""The C library raises its own limit for memory apart up to here as it learns, and trims at twice that."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")

_keepers: list[object] = []
"""The process has one heap: it is kept until the last of those who asked for it is done."""


@contextlib.contextmanager
def kept_heap() -> Iterator[None]:
    """While entered, freed memory stays with this process; afterwards it is given back. Only glibc can; else nothing.

    Whoever has told the C library otherwise by its variables is left alone.
    """
    set_limit = _mallopt()
    if set_limit is None or _is_told_otherwise():
        yield
        return
    keeper = object()
    _keepers.append(keeper)
    # Not every glibc takes a limit above its own most.
    if not set_limit(_MMAP_THRESHOLD, _APART_FROM):
        set_limit(_MMAP_THRESHOLD, _OWN_MOST)
    set_limit(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        # In a process that was forked meanwhile it is gone already.
        with contextlib.suppress(ValueError):
            _keepers.remove(keeper)
        if not _keepers:
            _put_limits_back(set_limit)
            give_back()


def give_back() -> None:
    """What is free and kept goes back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    return getattr(ctypes.CDLL(None), "mallopt", None)


def _is_told_otherwise() -> bool:
    return any(env.read(name) for name in _OF_THE_USER) or "glibc.malloc." in (env.read("GLIBC_TUNABLES") or "")


def _put_limits_back(set_limit: Callable[[int, int], int]) -> None:
    set_limit(_MMAP_THRESHOLD, _OWN_MOST)
    set_limit(_TRIM_THRESHOLD, 2 * _OWN_MOST)


def _leave_in_child() -> None:
    """Workers that load data make no steps: what they free is not asked for again."""
    set_limit = _mallopt()
    if _keepers and set_limit is not None:
        _keepers.clear()
        _put_limits_back(set_limit)


os.register_at_fork(after_in_child=_leave_in_child)
