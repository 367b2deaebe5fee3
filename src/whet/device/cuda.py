"""NVIDIA GPUs and CUDA graphs."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.device.abstract import AbstractDevice, AbstractGraphs, Made, MemoryUsage, Replay
from whet.device.kernels.switches import use_own_gates

_SYNC_WARNING = "called a synchronizing"
"""How torch's warning begins (c10/cuda/CUDAFunctions.cpp, torch 2.11 to 2.13)."""


@final
class CudaGraphs(AbstractGraphs):
    def __init__(self, place: torch.device) -> None:
        self._place = place
        # Warm-ups and captures have one stream: autograd remembers where a parameter was first used.
        self._stream = torch.cuda.Stream(place)
        self._pool: Any = torch.cuda.graph_pool_handle()

    @contextmanager
    def warm_up(self) -> Iterator[list[str]]:
        with self._aside(), _record_syncs() as waits:
            yield waits

    def capture(self, work: Callable[[], Made]) -> tuple[Replay, Made]:
        torch.cuda.synchronize(self._place)
        # What eager steps have cached is of no use to a pool.
        torch.cuda.empty_cache()
        before = torch.cuda.get_rng_state(self._place)
        graph = torch.cuda.CUDAGraph()
        try:
            with self._aside():
                # A checkpoint may be written beside: what other threads do is no part of the capture.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    made = work()
                except BaseException:
                    # Torch says the same of it again, in other words.
                    with suppress(Exception):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            del graph
            self._put_right(before)
            raise
        return graph.replay, made

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On our own stream, after all that was asked for so far, and before all that is asked for later."""
        outside = torch.cuda.current_stream(self._place)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def _put_right(self, generator: Tensor) -> None:
        """A capture that broke off may leave the allocator and the generator behind in it (pytorch#180395, #190308)."""
        with suppress(Exception):
            torch._C._cuda_endAllocateToPool(self._place.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        try:
            torch.rand(1, device=self._place)
        except RuntimeError:
            fresh = torch.Generator(self._place)
            torch.cuda.default_generators[self._place.index].graphsafe_set_state(fresh)
        try:
            torch.cuda.set_rng_state(generator, self._place)
            torch.cuda.synchronize(self._place)
            torch.rand(1, device=self._place)
            torch.cuda.set_rng_state(generator, self._place)
        except RuntimeError as error:
            raise WhetError(
                "the GPU cannot be used any more after a step that could not be captured",
                got=str(error).splitlines()[0],
                try_="graph=off; the last checkpoint is from before",
            ) from error


@contextmanager
def _record_syncs() -> Iterator[list[str]]:
    """What this thread waits for meanwhile, each with the line it stands in."""
    waits: list[str] = []
    here, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if not str(message).startswith(_SYNC_WARNING):
                show(message, category, filename, lineno, *rest)
            elif threading.get_ident() == here:
                waits.append(f"{filename}:{lineno}")

        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)


@final
class CudaDevice(AbstractDevice):
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

    def elapsed_seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def memory(self) -> MemoryUsage:
        return MemoryUsage(
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
        return use_own_gates()

    def graphs(self) -> CudaGraphs:
        return CudaGraphs(self._place)

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self._place)

    def set_rng_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self._place)


def cuda_unavailable_reason() -> str | None:
    """Why CUDA cannot be used in this process; None when it can."""
    if torch.cuda.is_available():
        return None
    return "this torch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU or driver was found"
