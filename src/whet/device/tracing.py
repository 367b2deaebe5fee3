"""Trace on CPU tensors the branches that torch takes on another device."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whet.device.abstract import AbstractDevice

_traced_kind: ContextVar[str | None] = ContextVar("_traced_kind", default=None)


def widest_float(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype of a device, or of the device that is being traced for."""
    return torch.float32 if (_traced_kind.get() or device.type) == "mps" else torch.float64


@contextlib.contextmanager
def trace_as(kind: str) -> Iterator[None]:
    """Make CPU tensors take the branches of a device of this kind in training.

    MPS computes attention that needs gradients with the math kernel (attention.cpp of torch 2.13), and only the CPU
    has oneDNN.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(_traced_kind.reset, _traced_kind.set(kind))
        if kind == "mps":
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if kind != "cpu":
            # Not `flags`, which also sets Intel GPU options and warns that there is no such GPU.
            before, *_ = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)
            stack.callback(torch.backends.mkldnn.set_flags, before, _fp32_precision=None)
        yield


class StandInDevice(AbstractDevice):
    """CPU tensors that stand for those of another device while a step is traced."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lr_dtype = torch.float32 if kind == "mps" else torch.float64

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")
