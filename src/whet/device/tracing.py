"""Trace on CPU tensors the branches that torch takes on another device."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.device.abstract import AbstractDevice

_traced_for: ContextVar[str | None] = ContextVar("_traced_for", default=None)


def widest_float(place: torch.device) -> torch.dtype:
    """The widest floating-point type that a device has; while something is traced, the one that it is traced for."""
    return torch.float32 if (_traced_for.get() or place.type) == "mps" else torch.float64


@contextlib.contextmanager
def trace_as(kind: str) -> Iterator[None]:
    """Sends what is traced on CPU tensors along the way that a device of this kind goes in training.

    MPS computes attention that needs gradients by its formula (attention.cpp of torch 2.13), and only the CPU has
    oneDNN.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_traced_for.reset, _traced_for.set(kind))
        if kind == "mps":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if kind != "cpu":
            # Not `flags`, which also sets what an Intel GPU may do, and warns that there is none.
            before, *_ = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)
            stack.callback(torch.backends.mkldnn.set_flags, before, _fp32_precision=None)
        yield


class StandInDevice(AbstractDevice):
    """CPU tensors that are to be taken for those of another device."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    @property
    def lr_dtype(self) -> torch.dtype:
        return torch.float32 if self.kind == "mps" else torch.float64
