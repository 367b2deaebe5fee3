"""Whether an error means that memory ran out: the texts that torch really raises, and none of the look-alikes."""

import torch

OUT_OF_MEMORY_TEXTS = (
    "MPS backend out of memory",
    "Invalid buffer size:",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)
"""Starts of messages. MPS raises a plain RuntimeError (MPSAllocator.mm, torch 2.13), so its type says nothing."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out.

    >>> is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 16.00 GiB, ..."))
    True
    >>> is_out_of_memory(RuntimeError("the file says: CUDA out of memory"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    # The CPU allocator's text stands behind the place in the source: "[enforce fail at alloc_cpu.cpp:118] . ...".
    return text.startswith(OUT_OF_MEMORY_TEXTS) or (
        text.startswith("[enforce fail at") and "DefaultCPUAllocator:" in text
    )
