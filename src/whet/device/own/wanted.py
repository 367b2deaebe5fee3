"""Are kernels of whet's own used? Only where triton is installed, on CUDA, in half precision."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None

_SWITCHES = {"attention": False}


@contextlib.contextmanager
def own_attention() -> Iterator[None]:
    """While entered, models that have a place for it use attention of our own (attention=own)."""
    before = _SWITCHES["attention"]
    _SWITCHES["attention"] = True
    try:
        yield
    finally:
        _SWITCHES["attention"] = before


def is_attention_wanted() -> bool:
    """Whether attention=own is in force."""
    return _SWITCHES["attention"]


def can_take(x: Tensor) -> bool:
    """Whether kernels of our own are written for this tensor."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and HAS_TRITON
