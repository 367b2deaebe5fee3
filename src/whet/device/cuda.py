"""NVIDIA GPUs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor

from whet.device.abstract import AbstractDevice, Memory
from whet.device.cuda_graphs import CudaGraphs
from whet.device.own.wanted import own_gates


@final
class Cuda(AbstractDevice):
    kind = "cuda"
    attention_kernels = ("cudnn", "flash", "efficient", "math", "own")
    has_own_norms = True

    def __init__(self, index: int = 0, *, overlaps_copies: bool = False) -> None:
        self._place = torch.device("cuda", index)
        self._overlaps_copies = overlaps_copies
        torch.cuda.set_device(index)

    @property
    def place(self) -> torch.device:
        return self._place

    @property
    def lr_dtype(self) -> torch.dtype:
        # The fused kernels read the rate on the GPU, as float32.
        return torch.float32

    def send(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._place, non_blocking=True)

    def put(self, tensor: Tensor) -> Tensor:
        if self._overlaps_copies and tensor.device.type == "cpu":
            return self.send(tensor)
        return tensor.to(self._place)

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def sync(self) -> None:
        torch.cuda.synchronize(self._place)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def memory(self) -> Memory:
        return Memory(
            allocated=torch.cuda.memory_allocated(self._place),
            reserved=torch.cuda.memory_reserved(self._place),
            peak=torch.cuda.max_memory_allocated(self._place),
            limit=torch.cuda.get_device_properties(self._place).total_memory,
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._place)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def use_precision(self, precision: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"

    @contextmanager
    def keeping_precision(self) -> Iterator[None]:
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32
        try:
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32 = before

    def computing(self, *, is_step: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        return own_gates()

    def graphs(self) -> CudaGraphs:
        return CudaGraphs(self._place)

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._place)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self._place)


def why_not() -> str | None:
    """Why CUDA cannot be used in this process; None when it can."""
    if torch.cuda.is_available():
        return None
    return "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU or driver was found"
