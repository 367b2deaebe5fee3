"""Does the C library keep what tensors on the CPU have freed, or give it back to the system at once?

A step frees what it computed and the next one asks for as much again. Given back, each page of it is faulted in and
filled with zeros anew: 3 % of a text step, a fifth of a small convolutional net's (docs/lab.md).
"""

import contextlib
import ctypes
from collections.abc import Iterator

from whet.base import env

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of mallopt: how much may lie free at the end of the heap, and from which size on memory is asked for apart."""
_NEVER = -1
_APART_FROM = 1 << 30
_OWN_MOST = 32 << 20
"""The C library raises its own limit for memory apart up to here as it learns, and trims at twice that."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@contextlib.contextmanager
def kept_heap() -> Iterator[None]:
    """While entered, freed memory stays with this process; afterwards it is given back. Only glibc can; else nothing.

    Whoever has told the C library otherwise by its variables is left alone.
    """
    set_limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_limit is None or _is_told_otherwise():
        yield
        return
    # Not every glibc takes a limit above its own most.
    if not set_limit(_MMAP_THRESHOLD, _APART_FROM):
        set_limit(_MMAP_THRESHOLD, _OWN_MOST)
    set_limit(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        set_limit(_MMAP_THRESHOLD, _OWN_MOST)
        set_limit(_TRIM_THRESHOLD, 2 * _OWN_MOST)
        give_back()


def give_back() -> None:
    """What is free and kept goes back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _is_told_otherwise() -> bool:
    return any(env.read(name) for name in _OF_THE_USER) or "glibc.malloc." in (env.read("GLIBC_TUNABLES") or "")
