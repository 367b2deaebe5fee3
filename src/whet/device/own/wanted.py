"""Are kernels of whet's own used? Only where triton is installed, on CUDA, in half precision."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

HAS_TRITON = find_spec("triton") is not None

_SWITCHES = {"attention": False, "norms": False, "gates": False}


@contextlib.contextmanager
def _switched(*names: str, is_on: bool) -> Iterator[None]:
    before = {name: _SWITCHES[name] for name in names}
    _SWITCHES.update(dict.fromkeys(names, is_on))
    try:
        yield
    finally:
        _SWITCHES.update(before)


def own_attention() -> contextlib.AbstractContextManager[None]:
    """While entered, models that have a place for it use attention of our own (attention=own)."""
    return _switched("attention", is_on=True)


def own_norms() -> contextlib.AbstractContextManager[None]:
    """While entered, models that have a place for them use norms of our own (norms=own)."""
    return _switched("norms", is_on=True)


def own_gates() -> contextlib.AbstractContextManager[None]:
    """While entered, models that have a place for it use a gate of our own: whenever whet computes on CUDA."""
    return _switched("gates", is_on=True)


def by_torch(*settings: str) -> contextlib.AbstractContextManager[None]:
    """While entered, torch's kernels compute what these settings are for: attention, norms."""
    return _switched(*settings, is_on=False)


def is_attention_wanted() -> bool:
    """Whether attention=own is in force."""
    return _SWITCHES["attention"]


def are_norms_wanted() -> bool:
    """Whether norms=own is in force."""
    return _SWITCHES["norms"]


def are_gates_wanted() -> bool:
    """Whether whet computes."""
    return _SWITCHES["gates"]


def can_take(x: Tensor) -> bool:
    """Whether kernels of our own are written for this tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and HAS_TRITON


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what this module gets or gives, so that it has to be called."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )
