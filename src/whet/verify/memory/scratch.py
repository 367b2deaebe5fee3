"""What do kernels take beside their outputs, and give back when they are done? The ones that weigh something."""

from typing import Any

from whet.verify.memory.lifetimes import Scratch

_MB = 1024**2

FIXED_SCRATCH_BYTES = {"cuda": 64 * _MB, "mps": 0, "cpu": 0}
"""cuBLAS keeps a workspace for each thread and stream that multiplied: 32 MiB on Hopper (8 before) for the forward
pass and as much for autograd's own thread. torch takes them from its allocator, so they count as allocated."""

_MADE_CONTIGUOUS = {"aten::native_layer_norm": 0, "aten::native_layer_norm_backward": 1}
"""Operators that copy an input, at this place, if it does not lie in one row."""


def scratch_of(device: str) -> Scratch:
    """The rule of one device."""
    return _on_cuda if device == "cuda" else _none


def _none(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ARG001
    return 0


def _on_cuda(func: Any, args: tuple[Any, ...], out: Any) -> int:  # noqa: ARG001
    name = func.name()
    if name == "aten::_scaled_dot_product_flash_attention_backward":
        # The gradient of the queries is summed in float32; and one number a row.
        return int(args[1].numel() * 4 + args[1].numel() // args[1].shape[-1] * 4)
    if name == "aten::_scaled_dot_product_efficient_attention_backward":
        query = args[1]
        rows = query.numel() // query.shape[-1]
        return int(rows * 4 + (0 if query.element_size() == 4 else query.numel() * 4))
    if name in _MADE_CONTIGUOUS:
        given = args[_MADE_CONTIGUOUS[name]]
        return 0 if given.is_contiguous() else int(given.nbytes)
    if name == "aten::embedding_dense_backward":
        # Indices are sorted with their places: both twice, and what the sort needs.
        return int(args[1].numel() * 8 * 5)
    return 0
