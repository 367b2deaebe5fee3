"""Trace a step on CPU tensors along the code paths that torch takes on another device."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.device.abstract import AbstractDevice

_traced_kind: ContextVar[str | None] = ContextVar("_traced_kind", default=None)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype of a device. During a trace, it is that of the traced device."""
    return torch.float32 if (_traced_kind.get() or device.type) == "mps" else torch.float64


@contextlib.contextmanager
def trace_as(kind: str) -> Iterator[None]:
    """Make CPU tensors take the code paths of another kind of device inside the `with` block.

    MPS computes attention with gradients with the math backend (attention.cpp of torch 2.13), and only the CPU uses
    oneDNN.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_traced_kind.reset, _traced_kind.set(kind))
        if kind == "mps":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if kind != "cpu":
            # Do not use `flags`, because it also sets options of Intel GPUs, and warns if there is no such GPU.
            before, *_ = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)
            stack.callback(torch.backends.mkldnn.set_flags, before, _fp32_precision=None)
        yield


class StandInDevice(AbstractDevice):
    """A device of another kind for traces, whose tensors are on the CPU."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lr_dtype = torch.float32 if kind == "mps" else torch.float64

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")
