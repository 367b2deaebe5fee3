"""Which kernels may torch's scaled_dot_product_attention use? The wanted one first, and others where it cannot."""

from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

_ORDER = ("cudnn", "flash", "efficient", "math")
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def preferring(kernel: str) -> AbstractContextManager[object]:
    """While entered, this kernel goes first; masks, number formats or shapes that it lacks go to the next ones.

    Those before it in the order are not used at all.
    """
    allowed = _ORDER[_ORDER.index(kernel) :]
    return sdpa_kernel([_BACKENDS[name] for name in allowed], set_priority=True)
