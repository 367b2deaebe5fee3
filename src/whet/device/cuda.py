"""The CUDA device and CUDA graphs."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor

from whet.base.errors import WhetError, first_line
from whet.device.abstract import (
    AbstractDevice,
    AbstractGraphs,
    AbstractReader,
    DeviceMemory,
    Made,
    MemoryUsage,
    Replay,
)
from whet.device.kernels.switches import use_whet_kernels

_SYNC_WARNING = "called a synchronizing"
"""Prefix of torch's warning about a synchronization (c10/cuda/CUDAFunctions.cpp, torch 2.11 to 2.13)."""


@final
class CudaDevice(AbstractDevice):
    """One CUDA GPU, used through torch."""

    kind = "cuda"
    # Fused optimizer kernels read the learning rate from GPU memory as float32.
    lr_dtype = torch.float32
    attention_kernels = ("cudnn", "flash", "efficient", "math", "whet")
    has_whet_norms = True
    has_tf32 = True
    adds_in_any_order = True
    rank_backend = "nccl"
    rounding_variables = (
        *AbstractDevice.rounding_variables,
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    )

    def __init__(self, index: int = 0, *, overlaps_copies: bool = False) -> None:
        super().__init__()
        self._torch_device = torch.device("cuda", index)
        self._overlaps_copies = overlaps_copies
        torch.cuda.set_device(index)
        self.memory = CudaMemory(self._torch_device)

    @property
    def torch_device(self) -> torch.device:
        return self._torch_device

    @property
    def generator(self) -> torch.Generator:
        torch.cuda.init()
        return torch.cuda.default_generators[self._torch_device.index]

    def put(self, tensor: Tensor) -> Tensor:
        if self._overlaps_copies and tensor.device.type == "cpu":
            return self.put_async(tensor)
        return tensor.to(self._torch_device)

    def put_async(self, tensor: Tensor) -> Tensor:
        # A copy from host memory is asynchronous only if the memory is pinned.
        return tensor.pin_memory().to(self._torch_device, non_blocking=True)

    def sync(self) -> None:
        torch.cuda.synchronize(self._torch_device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def use_precision(self, precision: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"

    @contextmanager
    def preserve_precision(self) -> Iterator[None]:
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, cudnn.allow_tf32
        try:
            yield
        finally:
            matmul.allow_tf32, cudnn.allow_tf32 = before

    def compute_context(self, *, is_step: bool = False) -> AbstractContextManager[object]:  # noqa: ARG002
        return use_whet_kernels("gates")

    def reader(self) -> "CudaReader":
        return CudaReader(self._torch_device)

    def graphs(self) -> "CudaGraphs":
        return CudaGraphs(self._torch_device)


@final
class CudaMemory(DeviceMemory):
    """Counters and cache of torch's CUDA allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def usage(self) -> MemoryUsage:
        return MemoryUsage(
            allocated=torch.cuda.memory_allocated(self._device),
            reserved=torch.cuda.memory_reserved(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
            limit=torch.cuda.get_device_properties(self._device).total_memory,
        )

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def cuda_unavailable_reason() -> str | None:
    """Return why CUDA cannot be used in this process, or None if it can."""
    if torch.cuda.is_available():
        return None
    return "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU or driver was found"


@final
class CudaReader(AbstractReader):
    """Reads tensors on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def has_reached(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        self._stream.wait_event(mark)
        with torch.cuda.stream(self._stream):
            yield


# --- graphs ----------------------------------------------------------------------------------------------------------


@final
class CudaGraphs(AbstractGraphs):
    """Captures CUDA graphs, and repairs torch's state after a failed capture."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Use the same stream for warm-ups and captures, because autograd remembers the stream of a parameter's first
        # use.
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        with self._on_own_stream(), _record_syncs() as syncs:
            yield syncs

    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        torch.cuda.synchronize(self._device)
        # The pool of the graph cannot use memory that the allocator has cached for eager steps.
        torch.cuda.empty_cache()
        rng_state = torch.cuda.get_rng_state(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._on_own_stream():
                # Use thread_local, because another thread may copy a checkpoint at the same time.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    made = work()
                except BaseException:
                    # Here capture_end raises too, with a less specific message.
                    with suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            del graph
            self._repair(rng_state)
            raise
        return graph.replay, made

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Run on the capture stream, after all earlier and before all later work of the current stream."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def _repair(self, rng_state: Tensor) -> None:
        """Restore the allocator and the generator after a failed capture.

        torch may leave both in capture mode (pytorch#180395, #190308). Raise WhetError if the GPU remains unusable.
        """
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        # Drawing a number fails if the generator is still in capture mode. In that case, replace its state.
        try:
            torch.rand(1, device=self._device)
        except RuntimeError:
            fresh = torch.Generator(self._device)
            torch.cuda.default_generators[self._device.index].graphsafe_set_state(fresh)
        try:
            torch.cuda.set_rng_state(rng_state, self._device)
            torch.cuda.synchronize(self._device)
            torch.rand(1, device=self._device)
            torch.cuda.set_rng_state(rng_state, self._device)
        except RuntimeError as error:
            raise WhetError(
                "the GPU is unusable after a failed graph capture",
                got=first_line(error),
                try_="graph=off; the last checkpoint is from before the failure",
            ) from error


@contextmanager
def _record_syncs() -> Iterator[list[str]]:
    """Yield a list that collects the source line of every device synchronization in this thread."""
    syncs: list[str] = []
    thread, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def record(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if not str(message).startswith(_SYNC_WARNING):
                show(message, category, filename, lineno, *rest)
            # Other threads, such as the checkpoint writer, may synchronize at any time.
            elif threading.get_ident() == thread:
                syncs.append(f"{filename}:{lineno}")

        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        warnings.showwarning = record  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield syncs
        finally:
            torch.cuda.set_sync_debug_mode(mode)
