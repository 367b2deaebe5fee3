"""Figures of each kind of device, for predictions of memory and time that need no device."""

from collections.abc import Mapping
from dataclasses import dataclass

_KB, _MB = 1024, 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigures:
    """Figures of one kind of device."""

    title: str
    """The name in messages."""
    context_bytes: int
    """Memory of contexts, kernels and workspaces before the first tensor."""
    allocation_bytes: int
    """Every allocation takes a multiple of this."""
    scratch_bytes: int
    """Workspaces that torch allocates, so that they count as allocated memory."""
    efficiency: float
    """Share of the published peak of arithmetic that training reaches."""
    operator_seconds: float
    """Time of an operator in eager mode."""


DEVICE_FIGURES: Mapping[str, DeviceFigures] = {
    "cuda": DeviceFigures(
        title="CUDA",
        # Typical with cuBLAS.
        context_bytes=768 * _MB,
        # Blocks of the CUDACachingAllocator.
        allocation_bytes=512,
        # cuBLAS keeps a workspace per combination of thread and stream: 32 MiB on Hopper (8 MiB on older GPUs) for the
        # forward pass, and as much for the autograd thread.
        scratch_bytes=64 * _MB,
        # Transformers: 0.21 (GPT-3) to 0.72 (FlashAttention-2, A100), the median of seven is 0.41.
        efficiency=0.41,
        # 4.5 us (an addition on a CPU, dev-discuss.pytorch.org 1836) to 25 us with a kernel launch.
        operator_seconds=11e-6,
    ),
    "mps": DeviceFigures(
        title="MPS",
        context_bytes=256 * _MB,
        # Pages of Metal.
        allocation_bytes=16 * _KB,
        scratch_bytes=0,
        # 0.2 for a small GPT (minimind#852, M5 Pro) to 0.68 for matrix products alone (arXiv 2502.05317, M4).
        efficiency=0.37,
        # 249 us for a GRUCell of about 10 operators (pytorch/pytorch#138898).
        operator_seconds=20e-6,
    ),
    "cpu": DeviceFigures(
        title="CPU",
        context_bytes=0,
        # Alignment.
        allocation_bytes=64,
        scratch_bytes=0,
        # No figures were found for training on CPUs: the values of CUDA.
        efficiency=0.41,
        operator_seconds=11e-6,
    ),
}
