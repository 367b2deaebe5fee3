"""Switches for whet's own kernels and for the backends of torch's attention."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_ORDER = ("cudnn", "flash", "efficient", "math")
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def prefer_sdpa_kernel(kernel: str) -> AbstractContextManager[object]:
    """While entered, this kernel goes first; masks, number formats or shapes that it lacks go to the next ones.

    Those before it in the order are not used at all.
    """
    allowed = _ORDER[_ORDER.index(kernel) :]
    return sdpa_kernel([_BACKENDS[name] for name in allowed], set_priority=True)


HAS_TRITON = find_spec("triton") is not None

_SWITCHES = {"attention": False, "norms": False, "gates": False}


@contextlib.contextmanager
def _switch(*names: str, is_on: bool) -> Iterator[None]:
    before = {name: _SWITCHES[name] for name in names}
    _SWITCHES.update(dict.fromkeys(names, is_on))
    try:
        yield
    finally:
        _SWITCHES.update(before)


def use_own_attention() -> contextlib.AbstractContextManager[None]:
    """While entered, models that have a place for it use attention of our own (attention=own)."""
    return _switch("attention", is_on=True)


def use_own_norms() -> contextlib.AbstractContextManager[None]:
    """While entered, models that have a place for them use norms of our own (norms=own)."""
    return _switch("norms", is_on=True)


def use_own_gates() -> contextlib.AbstractContextManager[None]:
    """While entered, models that have a place for it use a gate of our own: whenever whet computes on CUDA."""
    return _switch("gates", is_on=True)


def use_torch_kernels(*settings: str) -> contextlib.AbstractContextManager[None]:
    """While entered, torch's kernels compute what these settings are for: attention, norms."""
    return _switch(*settings, is_on=False)


def is_own_attention_on() -> bool:
    """Whether attention=own is in force."""
    return _SWITCHES["attention"]


def are_own_norms_on() -> bool:
    """Whether norms=own is in force."""
    return _SWITCHES["norms"]


def are_own_gates_on() -> bool:
    """Whether whet computes."""
    return _SWITCHES["gates"]


def is_supported(x: Tensor) -> bool:
    """Whether kernels of our own are written for this tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and HAS_TRITON


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what this module gets or gives, so that it has to be called."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )
