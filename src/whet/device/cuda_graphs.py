"""How CUDA captures work as a graph, and how the process is put right when it cannot."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from torch import Tensor

from whet.base.errors import WhetError
from whet.device.graphs import AbstractGraphs, Made, Replay

_WAITED = "called a synchronizing"
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
        with self._aside(), _noted_waits() as waits:
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
def _noted_waits() -> Iterator[list[str]]:
    """What this thread waits for meanwhile, each with the line it stands in."""
    waits: list[str] = []
    here, mode = threading.get_ident(), torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if not str(message).startswith(_WAITED):
                show(message, category, filename, lineno, *rest)
            elif threading.get_ident() == here:
                waits.append(f"{filename}:{lineno}")

        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        warnings.filterwarnings("always", message=_WAITED)
        warnings.showwarning = note  # type: ignore[assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(mode)
