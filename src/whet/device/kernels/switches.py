"""Switches for whet's kernels, and the selection of torch's attention backend.

A model that supports one of whet's kernels checks its switch in the forward pass. Switches are off unless a device
turns them on, so a model that runs outside whet uses torch's kernels.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HAS_TRITON = find_spec("triton") is not None

_SWITCHES = {"attention": False, "norms": False, "gates": False}

# In torch's order of preference. `prefer_sdpa_kernel` depends on this order.
_SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def use_whet_kernels(*names: str) -> AbstractContextManager[None]:
    """Use whet's kernels for "attention", "norms" or "gates" in this context, in models that call them."""
    return _switch(*names, is_on=True)


def use_torch_kernels(*names: str) -> AbstractContextManager[None]:
    """Use torch's kernels for "attention", "norms" or "gates" in this context."""
    return _switch(*names, is_on=False)


@contextlib.contextmanager
def _switch(*names: str, is_on: bool) -> Iterator[None]:
    before = {name: _SWITCHES[name] for name in names}
    _SWITCHES.update(dict.fromkeys(names, is_on))
    try:
        yield
    finally:
        _SWITCHES.update(before)


def is_whet_kernel_on(name: str) -> bool:
    """Return whether whet's kernel for "attention", "norms" or "gates" is selected."""
    return _SWITCHES[name]


def is_supported(x: Tensor) -> bool:
    """Return whether whet's kernels support this tensor. They require CUDA, half precision and Triton."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and HAS_TRITON


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks. They run only if the module is called, so a kernel must not replace it."""
    return bool(
        module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    )


def prefer_sdpa_kernel(kernel: str) -> AbstractContextManager[object]:
    """Prefer one backend of scaled_dot_product_attention in this context.

    For inputs that the backend does not support, torch uses the backends after it in torch's order of preference.
    Backends before it are not used.
    """
    names = list(_SDPA_BACKENDS)
    allowed = names[names.index(kernel) :]
    return sdpa_kernel([_SDPA_BACKENDS[name] for name in allowed], set_priority=True)
